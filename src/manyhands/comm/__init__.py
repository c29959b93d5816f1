"""What travels between processes: shared memory, the bell, shipped objects."""
