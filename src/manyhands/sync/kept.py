"""A copy of the whole state, made now and then, for models that are not too large to have one.

Such a model loses more time to an undo log than to the update itself. Instead, a copy is kept every so often, at most a
moment old. A process that dies while it changes the state is answered by going back to that copy: the
caller restores it and sets the commit word back, and the steps since are taken again. They are functions of
(seed, step, lane), so they end in the same bits. The caller never sees a step undone that it built something on: a run
that rests (for a checkpoint, a validation, the end of an epoch) begins with a new copy.

The smallest models are applied whole, by whoever finishes last; it makes the copy, and when it dies everybody else is
waiting for its commit. Of the others every worker applies its units. Then the copy is made by whoever computes the
first lane, before it stamps it: until then nobody applies. When one of several dies that are applying, the others must
have finished before anything is restored, and must not begin again: each marks that it is about to change something and
looks whether the caller is going back, and the caller says that it is and looks at the marks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from manyhands.comm.arena import Arena

__all__ = ["Kept", "go_back", "replay_steps"]

_LEAST_NS, _MOST_NS = 100_000_000, 500_000_000
_PATIENCE = 100  # times as long as a copy takes, until the next one
_fence = threading.Lock()


class Kept:
    """The kept copy of one arena's state, as the process that makes it sees it."""

    def __init__(self, arena: Arena) -> None:
        self._control = arena.control
        self._pairs = arena.live_and_kept()
        self._interval_ns = _LEAST_NS
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
        control.kept_ns = time.monotonic_ns()
        control.kept = step + 1
        self._interval_ns = min(max(_PATIENCE * (control.kept_ns - now), _LEAST_NS), _MOST_NS)


def replay_steps(arena: Arena) -> int:
    """How far one may have to go back, at most. What the caller tells the workers per step must be there as long."""
    return max(arena.spec.ring // 2, 1)


def go_back(arena: Arena, slot: int, others_finish: Callable[[int], None] | None = None) -> bool:
    """Called by the caller for a slot whose process has ended. True when steps are taken again.

    ``others_finish(mark)`` returns when nobody who lives has that mark any more.
    """
    control = arena.control
    if torn := _is_torn(arena, slot):
        control.going_back = 1
        with _fence:
            pass
        if others_finish is not None:
            others_finish(control.slot_value(slot, "undo_step"))
        for live, kept in arena.live_and_kept():
            live.copy_(kept)
        control.unit_done[:] = 0  # the step in progress may be the one that the copy is of
        control.norm_done[:] = 0
        control.repairs += 1  # before the commit word: whoever sees the old step forgets what it knows
        control.commit(control.kept - 1, control.committed[1])
        control.clear_marks()  # after it, or somebody might take the step up; also those of others that died meanwhile
        control.going_back = 0
        control.wake_everybody()
    control.set_slot_value(slot, "undo_step", 0)
    return torn


def _is_torn(arena: Arena, slot: int) -> bool:
    """Whether the process died while it was changing the state. If so, the step cannot be committed: that takes the
    one process that applies it, or the stamps of all units."""
    control = arena.control
    mark = control.slot_value(slot, "undo_step")
    if control.steps >= mark or arena.spec.whole:
        return control.steps < mark
    mine = control.unit_owner(control.committed[1]) == slot
    return bool((control.unit_done[mine] != mark).any())
