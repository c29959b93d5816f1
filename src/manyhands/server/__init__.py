"""What parameter servers are made of: parts of the state, and the messages that carry them."""
