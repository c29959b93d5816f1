"""A worker that brings updates to servers: asks for a chunk, computes, brings what came of it, and so on.

It looks like the Stepper of the synchronous step to whoever computes. What it does next is read off the words of the
exchange: a successor of a dead worker takes up its grant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from manyhands.comm.arena import MOST_WORKERS, Arena
from manyhands.comm.control import SLOT_FIELDS
from manyhands.engine.precedence import step_back
from manyhands.sync.clip import Clip
from manyhands.sync.loose import Loose
from manyhands.sync.pulse import AT, BEAT, LANE, Pulse, Stopped
from manyhands.sync.windows import read_newest

__all__ = ["Client", "Courier", "GivenUp"]

_WAIT_S = 0.1
_SENT, _RECEIVED = SLOT_FIELDS.index("sent_bytes"), SLOT_FIELDS.index("received_bytes")


class GivenUp(BaseException):
    """The chunk in progress was taken from the worker; no business of the user's code."""


class Courier(Pulse):
    """What every worker does that brings updates on its own, however they travel."""

    def __init__(self, arena: Arena, slot: int, clips: Sequence[Clip]) -> None:
        super().__init__(arena, slot)
        self._arena, self._control, self._slot = arena, arena.control, slot
        self._clips = tuple(clips)
        self.home = slot
        self.places = [slot, slot + MOST_WORKERS] if arena.spec.ahead else [slot]
        """Where our gradients go, in turns."""
        self.place = slot
        self.window: int | None = None
        """Where the parameters are to be read, if not at home."""
        self._gradients = {place: arena.gradients(place) for place in self.places}
        self._tables = arena.tables() if arena.spec.tables else None
        self._bad = False
        self.step, self.span = arena.control.steps, 1
        """The chunk, and how many from there on are ours."""
        self.my_lanes: list[int] = []

    def lanes(self) -> list[int]:
        """The whole chunk is ours."""
        return [0]

    def begin_lane(self, lane: int) -> None:
        """Data for the chunk is about to be fetched."""
        self._words[LANE] = lane
        self.enter("data")

    def report(self, batch: int, lane: int, stats: Sequence[float]) -> None:
        """The loss and the metrics of the chunk."""
        raise NotImplementedError

    def report_rows(self, pulled: int, pushed: int) -> None:
        """Rows of tables that the chunk moved; they follow its loss and metrics."""
        raise NotImplementedError

    def fetch_rows(self, index: int, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy rows of table ``index`` to ``out``."""
        assert self._tables is not None
        torch.index_select(self._tables.planes[index][0], 0, ids, out=out)

    @property
    def bank(self) -> int:
        """Which of the two banks our memory is read from, as a step."""
        raise NotImplementedError

    @property
    def plan(self) -> int:
        """The plan in force."""
        return self._control.committed[1]

    def end_lane(self, lane: int, *, bad: bool = False, loose: Loose | None = None) -> None:
        """The gradient is in our place."""
        self._bad = bad
        self._words[LANE] = -1

    @torch.no_grad()
    def limit(self) -> None:
        """An update is clipped before it travels: it is a step of its own."""
        if not self._clips:
            return
        gradients, there = self._gradients[self.place], self._arena.present[self.place]
        present = [gradient for gradient, present in zip(gradients, there, strict=True) if present]
        if self._tables is not None:
            present += self._tables.brought_gradients(self._slot)
        norm = float(np.sqrt(sum(float(torch.linalg.vector_norm(g)) ** 2 for g in present)))
        for clip in self._clips:
            for gradient in present:
                clip(gradient, norm)


class Client(Courier):
    """One worker's end of the exchange.

    With two places it goes ahead: while the update in one is applied, it computes into the other. It then reads the
    parameters itself when it begins a chunk, as they are by then.
    """

    def __init__(self, arena: Arena, slot: int, clips: Sequence[Clip], *, counts: bool) -> None:
        """``counts``: the parameters that are read and the gradients that are brought count as bytes, as they are."""
        super().__init__(arena, slot, clips)
        self._exchange = arena.exchange()
        counts = counts and not arena.spec.tables  # of which rows are counted
        self._bytes = sum(entry.size_bytes for entry in arena.spec.parameters) if counts else 0
        if arena.spec.ahead:
            step_back()

    def turn(self, end: int | None = None) -> Literal["step", "message", "over"]:
        """Wait for a chunk or a message. Raises Stopped at the end of the run."""
        control = self._control
        self.enter("wait")
        while True:
            count = control.bell.count
            if control.stop:
                raise Stopped
            if self._has_message():
                return "message"
            if granted := [place for place in self.places if self._is_granted(place)]:
                self._begin(min(granted, key=lambda place: self._exchange.grant[place]))
                return "step"
            control.bell.wait(count, _WAIT_S)
            self._words[BEAT] += 1

    def _is_granted(self, place: int) -> bool:
        """Whether there is a chunk to compute into ``place``; if there was none to be had, ask for another one."""
        exchange, asked = self._exchange, int(self._exchange.asked[place])
        if exchange.granted[place] != asked:
            return False
        if exchange.refused[place]:  # what was sent with it did not arrive: keep what we kept before it
            self._arena.carry_over(asked - 1, place)
            exchange.refused[place] = 0  # last: the bank before is written again only after this
        if exchange.grant[place] == 0:
            self._arena.carry_over(asked, place)
            self._ask(place, 0)
            return False
        return self._arena.spec.ahead or bool((exchange.delivered[:, place] == asked).all())

    def _begin(self, place: int) -> None:
        exchange = self._exchange
        self.place, self.step, self.span = place, int(exchange.grant[place]) - 1, int(exchange.grant_span[place])
        self._words[AT] = self.step
        self._words[_RECEIVED] += self._bytes
        if self._arena.spec.ahead:
            self.window = read_newest(exchange, self._slot)
            exchange.grant_version[place] = exchange.shown_version[self.window]
            for ours, agreed in zip(self._arena.pulled_buffers(self._slot), self._arena.buffers(), strict=True):
                ours.copy_(agreed)

    def _ask(self, place: int, chunk: int) -> None:
        exchange = self._exchange
        exchange.chunk[place], exchange.span[place] = chunk, self.span
        exchange.version[place] = exchange.grant_version[place]
        exchange.bad[place] = self._bad
        exchange.asked[place] += 1  # last: with it the request counts
        self._control.counter.ring()

    def report(self, batch: int, lane: int, stats: Sequence[float]) -> None:
        """The loss and the metrics of the chunk."""
        self._exchange.stats[self.place, batch - self.step] = stats

    def report_rows(self, pulled: int, pushed: int) -> None:
        """Rows of tables that the chunk moved; they follow its loss and metrics."""
        self._exchange.stats[self.place, 0, -2:] = pulled, pushed

    @property
    def bank(self) -> int:
        """Which of the two banks our memory is read from, as a step: requests alternate."""
        return int(self._exchange.asked[self.place])

    def finish(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """Bring the update, and ask for another chunk."""
        if self._bad:
            self._arena.carry_over(self.bank, self.place)
        else:
            self._words[_SENT] += self._bytes
        self._ask(self.place, self.step + 1)
        return True
