"""A copy of the whole state, made now and then, for models so small that one process applies a step alone.

Such a model loses more time to an undo log than to the update itself. Instead, whoever applies keeps a copy every so
often, at most a moment old. A process that dies while it changes the state is answered by going back to that copy: the
caller restores it and sets the commit word back, and the steps since are taken again. They are functions of
(seed, step, lane), so they end in the same bits. The caller never sees a step undone that it built something on: a run
that rests (for a checkpoint, a validation, the end of an epoch) begins with a new copy.
"""

from __future__ import annotations

import time

from manyhands.comm.arena import Arena

__all__ = ["Kept", "go_back", "replay_steps"]

_INTERVAL_NS = 100_000_000
_INTERVAL_NS_PER_BYTE = 25  # a copy takes about a hundredth of that


class Kept:
    """The kept copy of one arena's state, as the process that applies sees it."""

    def __init__(self, arena: Arena) -> None:
        self._control = arena.control
        self._pairs = arena.live_and_kept()
        self._interval_ns = _INTERVAL_NS + _INTERVAL_NS_PER_BYTE * sum(live.numel() for live, _ in self._pairs)
        self._most_steps = replay_steps(arena)

    def renew(self, step: int) -> None:
        """Copy the state before ``step``, if there is no copy or it has become old."""
        control, now = self._control, time.monotonic_ns()
        age = step + 1 - control.kept
        if control.kept and age < self._most_steps and now - control.kept_ns < self._interval_ns:
            return
        control.kept = 0
        for live, kept in self._pairs:
            kept.copy_(live)
        control.kept_ns = now
        control.kept = step + 1


def replay_steps(arena: Arena) -> int:
    """How far one may have to go back, at most. What the caller tells the workers per step must be there as long."""
    return max(arena.spec.ring // 2, 1)


def go_back(arena: Arena, slot: int) -> bool:
    """Called by the caller for a slot whose process has ended. True when steps are taken again.

    The process that died was the only one that changed anything: all others wait for its commit.
    """
    control = arena.control
    mark = control.slot_value(slot, "undo_step")
    if torn := control.steps < mark:
        for live, kept in arena.live_and_kept():
            live.copy_(kept)
        control.repairs += 1  # before the commit word: whoever sees the old step forgets what it knows
        control.commit(control.kept - 1, control.committed[1])
    control.set_slot_value(slot, "undo_step", 0)
    if torn:
        control.wake_everybody()
    return torn
