"""Pure decisions: no torch, no sockets, no clock."""
