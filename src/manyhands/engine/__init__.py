"""Where processes come from: this machine."""
