"""Training: the trainer, its runs on disk, and what it records."""
