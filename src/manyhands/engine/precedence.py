"""Who goes first where processes share a core.

A server that workers do not wait for is woken while all cores compute. The scheduler would let it wait for its turn,
some milliseconds, until everybody waits for it after all. Raising a priority takes a privilege; where we do not have
it, the workers step back instead.
"""

from __future__ import annotations

import os

__all__ = ["go_first", "step_back"]

_STEPS = 10


def go_first() -> None:
    """This process is short of work and others depend on it: let it run whenever it has some."""
    _change(-_STEPS)


def step_back() -> None:
    """Let processes that went first run before this one, if they could not arrange that themselves."""
    if _change(-1):
        _change(1)
    else:
        _change(_STEPS)


def _change(steps: int) -> bool:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + steps)
    except OSError:
        return False
    return True
