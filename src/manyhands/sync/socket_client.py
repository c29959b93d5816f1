"""A worker that reaches its servers by sockets: asks for a chunk, pulls, computes, pushes, and so on.

It looks like the Stepper of the synchronous step to whoever computes. What it must remember is in ``core/pushes.py``.
Parameters, gradients and buffers of the worker lie in its own place in the arena.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from manyhands.comm.arena import Arena
from manyhands.comm.control import SLOT_FIELDS
from manyhands.comm.envelope import Envelope, Stream, pour
from manyhands.comm.links import Links
from manyhands.core.messages import Ask, Lease, Pull, Pulled, Push, Pushed, Send, Views
from manyhands.core.placement import place_rows
from manyhands.core.pushes import Action, Compute, Pushes
from manyhands.errors import FrameError
from manyhands.server.coder import Coder, Remainder
from manyhands.server.messages import COORDINATOR, ENVELOPES, PulledRows, PullRows, Stale, bare
from manyhands.server.part import Part
from manyhands.server.row_share import Rows, bytes_of, pack
from manyhands.sync.client import Courier, GivenUp
from manyhands.sync.clip import Clip
from manyhands.sync.pulse import AT, Stopped
from manyhands.sync.socket_server import Codecs, Post

__all__ = ["SocketClient"]

_SENT, _RECEIVED = SLOT_FIELDS.index("sent_bytes"), SLOT_FIELDS.index("received_bytes")
_LOOK_S = 0.01  # how often a worker without messages looks at the words of the arena


@dataclass(slots=True)
class _Wanted:
    """Rows that we have asked a shard for."""

    question: int
    table: int
    ids: torch.Tensor
    at: torch.Tensor
    """Where they belong in ``out``."""
    out: torch.Tensor
    term: int = -1
    since: float = 0.0


class SocketClient(Courier):
    """One worker's end of the links."""

    encodes = True

    def __init__(self, arena: Arena, slot: int, post: Post, clips: Sequence[Clip], codecs: Codecs) -> None:
        super().__init__(arena, slot, clips)
        shards = arena.spec.exchange
        self._parts = [Part(arena, shard, shards) for shard in range(shards)]
        self._coders = [Coder(part, codecs.update) for part in self._parts]
        self._answers = [Coder(part, codecs.pull) for part in self._parts]
        self._remainders: list[Remainder] = []
        if codecs.update is not None:
            self._remainders = [Remainder(coder, len(coder.part.update(slot)[1])) for coder in self._coders]
        self._has: dict[int, tuple[int, int]] = {}
        """By shard: from whom we have our parameters, and the number of that answer."""
        self._updates: list[Sequence[memoryview]] = []
        self._made: tuple[int, int] = (0, -1)
        """Epoch and chunk that they are of."""
        self._versions: dict[int, int] = {}
        """By shard: the version that they were computed with."""
        self._outdated: set[int] = set()
        """The shards that found theirs too old."""
        self._counted = [0, 0]
        self._wanted: dict[int, _Wanted] = {}
        self._question = 0
        self._links: Links[Any] = Links(post.wire, post.number, ENVELOPES)
        self._machine = Pushes(me=post.number, coordinator=COORDINATOR, shards=shards, timing=post.timing)
        self._timing = post.timing
        self._compute: Compute | None = None
        self._stats = np.zeros(arena.spec.stats)
        self._next_tick = 0.0
        self._perform(self._machine.start())

    def close(self) -> None:
        """Close the sockets."""
        self._links.close()

    def turn(self, end: int | None = None) -> Literal["step", "message", "over"]:
        """Wait for a chunk or a message. Raises Stopped at the end of the run."""
        self.enter("wait")
        while True:
            if self._control.stop:
                raise Stopped
            if self._has_message():
                self._has.clear()  # to evaluate, other parameters are laid into our place
                return "message"
            if self._compute is not None:
                self._begin(self._compute)
                return "step"
            for envelope in self._links.receive(_LOOK_S):
                self._take(envelope)
            if time.monotonic() >= self._next_tick:
                self._next_tick = time.monotonic() + self._timing.beat_s
                self._perform(self._machine.tick(time.monotonic()))
            self._tally()
            self.beat()

    def _tally(self) -> None:
        """Say what has gone over our links."""
        links = self._links.traffic.values()
        totals = [sum(link.bytes_out for link in links), sum(link.bytes_in for link in links)]
        for word, total, counted in zip((_SENT, _RECEIVED), totals, self._counted, strict=True):
            self._words[word] += total - counted
        self._counted = totals

    def _begin(self, compute: Compute) -> None:
        self.step = compute.chunk
        self._words[AT] = self.step

    # -- messages -------------------------------------------------------------------------------------------
    def _take(self, envelope: Envelope[Any]) -> None:
        message, machine = envelope.message, self._machine
        if isinstance(message, Stale):
            self._do_again(message)
        elif isinstance(message, PulledRows):
            self._take_rows(message, envelope.payload)
        elif not isinstance(message, Pulled | Pushed) or self._accepts(envelope):
            self._perform(machine.receive(envelope.sender, message, time.monotonic()))
        if isinstance(message, Views | Lease):
            views = message.views.views if isinstance(message, Lease) else message.views
            self._links.keep({COORDINATOR, *(view.primary for view in views)})

    def _accepts(self, envelope: Envelope[Any]) -> bool:
        """Whether this is an answer that we wait for; the parameters that it brings are then in our place."""
        message, machine = envelope.message, self._machine
        mine = (message.epoch, message.chunk) == (machine.epoch, machine.chunk) and message.shard in machine.missing
        if isinstance(message, Pulled):
            return mine and machine.phase == "pulling" and self._take_parameters(envelope.sender, message, envelope)
        if mine and machine.phase == "pushing" and self._remainders and not self._bad:
            self._remainders[message.shard].keep()
        return mine

    def _take_parameters(self, server: int, message: Pulled, envelope: Envelope[Any]) -> bool:
        shard = message.shard
        home, *buffers = self._parts[shard].pulled(self._slot)
        try:
            if message.since == 0:
                pour(envelope.payload, [home, *buffers])
            elif self._has.get(shard) == (server, message.since):
                stream = Stream(envelope.payload)
                self._answers[shard].follow(stream, self._parts[shard].of(self._arena.pull(self._slot)))
                for buffer in buffers:
                    stream.fill(buffer)
                stream.end()
            else:
                return False  # we shall ask again, and get all of them
        except FrameError:
            self._links.malformed += 1
            self._has.pop(shard, None)
            return False
        self._has[shard] = (server, message.number)
        return True

    def _do_again(self, stale: Stale) -> None:
        """Our parameters were too old for a server: pull again, and compute the same chunk again."""
        machine = self._machine
        if (stale.epoch, stale.chunk) != (machine.epoch, machine.chunk):
            return
        if self._versions.get(stale.shard) != stale.version:
            return
        self._outdated.add(stale.shard)
        if machine.phase != "pushing":  # another shard has said so before
            return
        machine.phase, machine.missing = "pulling", set(range(len(self._parts)))
        machine.pulled.clear()
        self._perform(machine.tick(time.monotonic() + self._timing.retry_s))  # as if we had waited for it already

    def _perform(self, actions: Sequence[Action]) -> None:
        before = self._compute
        self._compute = None
        for action in actions:
            if isinstance(action, Compute):
                self._compute = action
            else:
                self._links.send(action.to, self._completed(action), self._payload(action))
        if self._compute is None and self._machine.phase == "computing":
            self._compute = before  # nothing has taken the chunk from us

    def _completed(self, send: Send) -> Any:
        """The message with what only we know."""
        match send.message:
            case Pull(shard):
                server, number = self._has.get(shard, (0, 0))
                return replace(send.message, has=number if server == send.to else 0)
            case Push():
                return replace(send.message, update=None, bad=self._bad)
        return bare(send.message)

    def _payload(self, send: Send) -> Sequence[Any]:
        match send.message:
            case Push(shard):
                return () if self._bad else self._updates[shard]
            case Ask() if send.message.done is not None:
                return [memoryview(self._stats.view(np.uint8))]  # type: ignore[arg-type]
        return ()

    # -- the chunk ------------------------------------------------------------------------------------------
    @torch.no_grad()
    def fetch_rows(self, index: int, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Get rows of table ``index`` from the servers that hold them. Raises GivenUp when the chunk is not ours any
        more, and Stopped at the end of the run."""
        owners = torch.from_numpy(place_rows(ids.numpy(), len(self._parts)))
        self._wanted = {}
        for shard in range(len(self._parts)):
            at = (owners == shard).nonzero().flatten()
            if len(at):
                self._question += 1
                self._wanted[shard] = _Wanted(self._question, index, ids[at], at, out)
        phase = self._phase_name
        self.enter("wait")
        while self._wanted:
            now = time.monotonic()
            for shard, wanted in self._wanted.items():
                self._ask_for_rows(shard, wanted, now)
            if self._control.stop:
                raise Stopped
            for envelope in self._links.receive(_LOOK_S):
                self._take(envelope)
            if now >= self._next_tick:
                self._next_tick = now + self._timing.beat_s
                self._perform(self._machine.tick(now))
            self.beat()
            if self._machine.phase != "computing":
                self._wanted = {}
                raise GivenUp
        self.enter(phase)

    def _ask_for_rows(self, shard: int, wanted: _Wanted, now: float) -> None:
        """Ask, and ask again where the view has changed or no answer has come for long."""
        machine, view = self._machine, self._machine.views[shard]
        if view.primary is None or (view.term == wanted.term and now - wanted.since < self._timing.retry_s):
            return
        wanted.term, wanted.since = view.term, now
        question = PullRows(shard, machine.epoch, view.term, machine.chunk, wanted.table, wanted.question)
        self._links.send(view.primary, question, [bytes_of(wanted.ids)])

    def _take_rows(self, message: PulledRows, payload: Sequence[memoryview]) -> None:
        wanted = self._wanted.get(message.shard)
        if wanted is None or wanted.question != message.question:
            return
        rows = torch.empty(len(wanted.ids), wanted.out.shape[1])
        try:
            pour(payload, [bytes_of(rows)])
        except FrameError:
            self._links.malformed += 1
            return
        wanted.out[wanted.at] = rows
        del self._wanted[message.shard]

    def report(self, batch: int, lane: int, stats: Sequence[float]) -> None:
        """The loss and the metrics of the chunk."""
        self._stats[:] = stats

    def report_rows(self, pulled: int, pushed: int) -> None:
        """Rows of tables that the chunk moved; they follow its loss and metrics."""
        self._stats[-2:] = pulled, pushed

    def finish(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """Bring the update; when all servers have it, another chunk is asked for."""
        compute, self._compute = self._compute, None
        assert compute is not None
        again = (compute.epoch, compute.chunk) == self._made
        self._made = (compute.epoch, compute.chunk)
        if not self._bad:
            self.enter("reduce")
            # Where an update was not too old it may have had its effect: if it is sent again, then as it was.
            self._updates = [
                self._updates[shard] if again and shard not in self._outdated else self._encode(shard)
                for shard in range(len(self._parts))
            ]
        self._versions = {pulled.shard: pulled.version for pulled in compute.pulled}
        self._outdated.clear()
        self._perform(self._machine.computed(compute.ticket, True, time.monotonic()))
        return True

    def _encode(self, shard: int) -> Sequence[memoryview]:
        """The update for a shard; without a codec it is sent from our place, where it stays until it is done with."""
        part = self._parts[shard]
        flags, gradient, *buffers = part.update(self._slot)
        if not self._remainders:
            return [flags, gradient, *buffers, *self._rows_for(shard)]
        frames = self._remainders[shard].encode(flags, part.of(self._arena.lane(self._slot)))
        return [*self._coders[shard].close(flags, frames, buffers), *self._rows_for(shard)]

    def _rows_for(self, shard: int) -> list[memoryview]:
        """The rows of tables that we bring to a shard."""
        if self._tables is None:
            return []
        found: list[Rows | None] = []
        for index, brought in enumerate(self._tables.brought[self._slot].tolist()):
            if not brought:
                found.append(None)
                continue
            place = self._tables.place(self._slot, index)
            ids, gradients = place.ids[: brought - 1], place.gradients[: brought - 1]
            mine = torch.from_numpy(np.flatnonzero(place_rows(ids.numpy(), len(self._parts)) == shard))
            found.append((ids[mine], gradients[mine]))
        return pack(found)
