"""Makes the update of a batch of units atomic against the death of the process that does it.

Before units change, their bytes are copied into the worker's undo buffer and the buffer is marked. A process that
dies in between is rolled back by the caller, from the same memory; the units are then as if it had never begun,
and whoever inherits them applies them from the untouched gradients of the lanes. The mark has three states:

    0            nothing is going on
    step + 1     units are being changed: restore them
    -(step + 1)  units are changed, their stamps are being written: complete the stamps
"""

from __future__ import annotations

import torch

from manyhands.comm.arena import Arena
from manyhands.sync.rows import recover_rows

__all__ = ["BATCH_BYTES", "BATCH_UNITS", "SMALL_BYTES", "UndoLog", "recover", "undo_capacity"]

BATCH_UNITS = 256
BATCH_BYTES = 1 << 19
"""How much is saved and applied together: what the cache holds, with the state beside it."""
SMALL_BYTES = 1 << 20
"""What one server applies in one go, if that is all: a second batch would cost more than the cache saves."""


def undo_capacity(planes: int, unit_bytes: list[int], extra_bytes: list[int], *, alone: bool) -> int:
    """How large an undo buffer must be for any batch."""
    batch = max([SMALL_BYTES if alone else BATCH_BYTES, *unit_bytes]) + 64 * BATCH_UNITS
    return (1 + planes) * batch + max(extra_bytes, default=0) + 4096


class UndoLog:
    """The undo buffer of one slot."""

    def __init__(self, arena: Arena, slot: int) -> None:
        self._arena = arena
        self._buffer = arena.undo(slot)
        self._scalars = arena.undo_scalars[slot]
        self._words = arena.control.slot(slot)
        self._planes = [arena.plane(index) for index in range(1 + len(arena.spec.planes))]
        self._mark, self._first, self._stop = 5, 6, 7  # positions of undo_* in SLOT_FIELDS
        self._pairs: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def _copies(self, first: int, stop: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(live, saved) pairs of byte views for the units [first, stop)."""
        if (first, stop) not in self._pairs:
            units, extras = self._arena.spec.units, self._arena.spec.extras
            start, end = units[first].start, units[stop - 1].stop
            live = [plane[start:end] for plane in self._planes]
            inside = {unit.parameter for unit in units[first:stop]}
            live += [
                self._arena.extra(i).view(-1).view(torch.uint8) for i, e in enumerate(extras) if e.parameter in inside
            ]
            pairs, at = [], 0
            for view in live:
                pairs.append((view, self._buffer[at : at + view.numel()]))
                at += -(-view.numel() // 64) * 64
            self._pairs[first, stop] = pairs
        return self._pairs[first, stop]

    def begin(self, first: int, stop: int, step: int) -> None:
        """Save units [first, stop); from here to ``end`` a death is undone."""
        if self._words[self._first : self._stop + 1].tolist() == [first, stop] and self._words[self._mark] == step + 1:
            return  # saved already, while there was time
        self._words[self._mark] = 0  # what was saved before is about to be overwritten
        for live, saved in self._copies(first, stop):
            saved.copy_(live)
        scalars, count = self._arena.scalars, stop - first
        self._scalars[:count, :-1] = scalars[first:stop]
        self._scalars[:count, -1] = self._arena.control.unit_ready[first:stop]
        self._words[self._first] = first
        self._words[self._stop] = stop
        self._words[self._mark] = step + 1

    def parameters(self, first: int, stop: int) -> torch.Tensor:
        """The bytes of the parameters of these units, as they were when they were last saved."""
        return self._copies(first, stop)[0][1]

    def drop(self) -> None:
        """Nothing will be changed after all: what was saved must never be put back."""
        self._words[self._mark] = 0

    def end(self, first: int, stop: int, step: int) -> None:
        """The units are changed: stamp them and clear the mark."""
        self._words[self._mark] = -(step + 1)
        self._stamp(first, stop, step)

    def _stamp(self, first: int, stop: int, step: int) -> None:
        done = self._arena.control.unit_done[first:stop]
        # Never back: the step may be committed, and a new owner may be stamping the next one already.
        done[done < step + 1] = step + 1
        self._words[self._mark] = 0

    def recover(self) -> bool:
        """Undo or complete what a dead process left. True when something was undone."""
        mark, first, stop = self._words[self._mark], self._words[self._first], self._words[self._stop]
        if mark < 0:
            self._stamp(first, stop, -mark - 1)
            return False
        if mark == 0:
            return False
        if self._arena.control.steps >= mark and not self._arena.spec.exchange:
            # Saved ahead by one that was late: the step was over, its units may belong to others and have changed.
            self._words[self._mark] = 0
            return False
        for live, saved in self._copies(first, stop):
            live.copy_(saved)
        count = stop - first
        self._arena.scalars[first:stop] = self._scalars[:count, :-1]
        self._arena.control.unit_ready[first:stop] = self._scalars[:count, -1].astype("int64")
        self._words[self._mark] = 0
        return True


def recover(arena: Arena, slot: int) -> bool:
    """Called by the caller for a slot whose process has ended."""
    rows = recover_rows(arena, slot)
    return UndoLog(arena, slot).recover() or rows
