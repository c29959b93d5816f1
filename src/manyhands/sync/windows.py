"""Where workers find the parameters: at a desk of their own, or in windows that all of them look through.

Workers that go ahead read the parameters when they begin a batch, while the server may be taking a step. So it never
writes where somebody reads: every step is shown in a window that is free, and only a whole one is named the newest. A
worker says which window it reads and then looks whether that is still the newest; the server names the newest and then
looks who reads what. One of the two sees the other, so a window that is read is never taken for free.
"""

from __future__ import annotations

import threading

import torch

from manyhands.comm.arena import Arena, dtype_of
from manyhands.comm.exchange import Exchange
from manyhands.sync.apply import Applier

__all__ = ["Desk", "Windows", "read_newest"]

Run = tuple[int, int]

_fence = threading.Lock()


class Desk:
    """Where the parameters of one run of units are handed out."""

    def __init__(self, arena: Arena, applier: Applier, place: torch.Tensor, run: Run) -> None:
        first, last = arena.spec.units[run[0]], arena.spec.units[run[1] - 1]
        part, dtype = slice(first.start, last.stop), dtype_of(arena.spec.parameters[first.parameter].dtype)
        saved = applier.saved(run)
        assert saved is not None
        self._live, self._place = (plane[part].view(dtype) for plane in (arena.plane(0), place))
        self._earlier = saved.view(dtype)

    @torch.no_grad()
    def write(self, ahead: float) -> None:
        """The run was just applied: hand out its parameters, as they will be ``ahead`` steps from now."""
        if ahead:
            torch.lerp(self._earlier, self._live, 1 + ahead, out=self._place)
        else:
            self._place.copy_(self._live)


class Windows:
    """The server's side: shows the parameters after every step."""

    def __init__(self, arena: Arena, applier: Applier) -> None:
        self._arena, self._applier, self._exchange = arena, applier, arena.exchange()
        self._desks: dict[tuple[int, Run], Desk] = {}
        self._outdated = True  # what a predecessor was doing is not known
        self._free = self._find_free()

    def _find_free(self) -> int:
        with _fence:
            pass
        taken = {self._exchange.newest, *(self._exchange.reading - 1).tolist()}
        return next(window for window in range(self._exchange.shape.windows) if window not in taken)

    def look(self, resting: bool) -> None:
        """Before chunks are granted: at a rest the caller may have changed the parameters."""
        if self._outdated and not resting:
            self.show(int(self._exchange.applied[0]), complete=False)
        self._outdated = resting

    def write(self, run: Run, ahead: float) -> None:
        """The run was just applied."""
        if (self._free, run) not in self._desks:
            place = self._arena.shown(self._free)
            self._desks[self._free, run] = Desk(self._arena, self._applier, place, run)
        self._desks[self._free, run].write(ahead)

    def show(self, version: int, *, complete: bool) -> None:
        """Let workers read the step. ``complete``: all runs were written; else show the parameters as they are."""
        if not complete:
            self._arena.shown(self._free).copy_(self._arena.plane(0))
        self._exchange.shown_version[self._free] = version
        self._exchange.newest = self._free  # last: from here on it is read
        self._free = self._find_free()


def read_newest(exchange: Exchange, worker: int) -> int:
    """The window that ``worker`` may read until it reads another one."""
    while True:
        window = exchange.newest
        exchange.reading[worker] = window + 1
        with _fence:
            pass
        if exchange.newest == window:
            return window
