"""The protocol of replicated parameter servers under a virtual clock and network, with invariants after every event."""
