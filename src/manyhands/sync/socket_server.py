"""The life of a server that holds its shards in its own memory, and that workers and other servers reach by sockets.

What it decides is in ``core/host.py`` and ``core/replication.py``; here decisions become deeds. The words of the arena
are used for what is between the caller and its processes: signs of life, messages, the end, the optimizer's numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import torch

from manyhands.comm.arena import Arena
from manyhands.comm.codec import Codec
from manyhands.comm.envelope import Envelope
from manyhands.comm.exchange import STALENESS_BINS
from manyhands.comm.links import Links, Wire
from manyhands.core.host import Host
from manyhands.core.lags import Lags
from manyhands.core.messages import (
    Grant,
    Pull,
    Pulled,
    Push,
    Replicate,
    Replicated,
    Saved,
    Send,
    State,
    Timing,
    Views,
)
from manyhands.core.policies import Apply, Drop, Moment, Policy, Verdict, compensates
from manyhands.core.replication import Action, Discard, Execute, Install, Load, Replica, Save
from manyhands.errors import FrameError
from manyhands.server.coder import Coder, Update
from manyhands.server.messages import (
    COORDINATOR,
    ENVELOPES,
    Fetch,
    Fetched,
    PulledRows,
    PullRows,
    Stale,
    bare,
    filled,
    payload_of,
)
from manyhands.server.part import Part, size_bytes
from manyhands.server.row_share import RowShare, bytes_of
from manyhands.sync.copies import Copies
from manyhands.sync.optimizer_state import Template
from manyhands.sync.patience import Patience
from manyhands.sync.prediction import momentum_reach
from manyhands.sync.pulse import Pulse, Stopped
from manyhands.sync.store import Store

__all__ = ["Codecs", "Post", "SocketServer"]

_EARLY = 64  # messages that wait until we know of the view that they are for
_LOOK_S = 0.02  # how often a server without messages looks at the words of the arena


@dataclass(frozen=True, slots=True)
class _Obliging:
    """The same policy for updates of which it is known that they are not too old."""

    rule: Policy

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        verdict = self.rule.judge(staleness, moment)
        return Apply() if isinstance(verdict, Drop) else verdict


class Post(msgspec.Struct, frozen=True):
    """What a process needs to take part in a run by sockets."""

    wire: Wire
    number: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class Codecs:
    """How updates travel to servers, and parameters back; None: as they are."""

    update: Codec | None = None
    pull: Codec | None = None


class SocketServer(Pulse):
    """One server. ``turn`` serves until there is a message from the caller to read."""

    def __init__(
        self,
        arena: Arena,
        slot: int,
        post: Post,
        template: Template,
        policy: Policy,
        codecs: Codecs,
        predict: bool = False,
    ) -> None:
        super().__init__(arena, slot)
        self._arena, self._control = arena, arena.control
        number, timing = post.number, post.timing
        self._template, self._policy, self._timing = template, policy, timing
        shards = arena.spec.exchange
        self._links: Links[Any] = Links(post.wire, number, ENVELOPES, listens=True)
        self._host = Host(me=number, coordinator=COORDINATOR, shards=shards, policy=_Obliging(policy), timing=timing)
        parts = [Part(arena, shard, shards) for shard in range(shards)]
        tables = arena.spec.tables
        self._rows = [RowShare(tables, shard, shards) if tables else None for shard in range(shards)]
        self._coders = [Coder(part, codecs.update, rows) for part, rows in zip(parts, self._rows, strict=True)]
        self._answers = [Coder(part, codecs.pull) for part in parts]
        self._remembers = compensates(policy) or not (codecs.pull is None or codecs.pull.exact)
        self._copies = Copies()
        self._state_bytes = [
            size_bytes(part.state()) + (0 if rows is None else rows.size_bytes)
            for part, rows in zip(parts, self._rows, strict=True)
        ]
        self._exchange = arena.exchange()  # for what is counted
        self._stores: dict[int, Store] = {}
        reach = momentum_reach(template) if predict else 0.0
        self._lags = [Lags(reach) for _ in parts]
        self._loads: dict[int, Load] = {}
        self._early: deque[Envelope[Any]] = deque(maxlen=_EARLY)
        self._patience = Patience(3 * timing.beat_s)
        self._next_tick = time.monotonic()
        self.step = arena.control.steps

    def close(self) -> None:
        """Close the sockets."""
        self._links.close()

    def turn(self, end: int | None = None) -> Literal["step", "message", "over"]:
        """Serve. Returns when there is a message from the caller; raises Stopped at the end of the run."""
        while True:
            if self._control.stop:
                raise Stopped
            if self._has_message():
                return "message"
            now = time.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + self._timing.beat_s
                self._do(self._host.tick(now), now)
                for load in self._loads.values():
                    self._fetch(load, now)
            self.enter("wait")
            for envelope in sorted(self._links.receive(min(_LOOK_S, self._next_tick - now)), key=_turn_of):
                try:
                    self._check(envelope)
                    self._take(envelope)
                except FrameError:
                    self._links.malformed += 1

    # -- messages -------------------------------------------------------------------------------------------
    def _check(self, envelope: Envelope[Any]) -> None:
        """Refuse what is not about shards that there are, or has not as many bytes as belong to them."""
        message, size, shards = envelope.message, size_bytes(envelope.payload), self._host.shards
        views = message.views.views if isinstance(message, Grant) else getattr(message, "views", ())
        state = message.state if isinstance(message, Fetched) else message
        if not all(0 <= about.shard < shards for about in (*views, state) if hasattr(about, "shard")):
            raise FrameError("a message is about a shard that there is not")
        if isinstance(message, Push | Replicate | PullRows):  # what they brought is looked at when it is opened
            return
        belong = self._state_bytes[state.shard] if isinstance(message, State | Fetched) else 0
        if size != belong:
            raise FrameError(f"a message has {size} bytes of tensors where {belong} belong")

    def _take(self, envelope: Envelope[Any]) -> None:
        now, message = time.monotonic(), envelope.message
        if isinstance(message, Pull | Push | PullRows | Replicated) and self._is_early(message):
            self._early.append(envelope)
        elif isinstance(message, PullRows):
            self._read_rows(envelope.sender, message, envelope.payload, now)
        elif isinstance(message, Push) and self._is_too_old(self._host.replicas[message.shard], message):
            self._exchange.add("dropped")
            self._links.send(envelope.sender, Stale(message.shard, message.epoch, message.chunk, message.version))
        elif isinstance(message, Fetched):
            self._fetched(message, envelope.payload, now)
        else:
            if isinstance(message, Push):
                self._count(self._host.replicas[message.shard], message, envelope.sender)
            opened = self._open(envelope)
            self._do(self._host.receive(envelope.sender, opened, now), now)
            if isinstance(message, Push) and message.shard == 0 and message.chunk in self._host.replicas[0].held:
                self._exchange.add("held")
        if isinstance(message, Grant):
            self._copies.keep(message.workers)
        if isinstance(message, Views | Grant):
            views = message.views if isinstance(message, Grant) else message
            self._links.keep({COORDINATOR, *(view.backup for view in views.views), *(v.primary for v in views.views)})
        if self._early and isinstance(message, Views | Grant | Fetched):
            early = sorted(self._early, key=_turn_of)
            self._early.clear()
            for one in early:
                self._take(one)

    def _open(self, envelope: Envelope[Any]) -> Any:
        """The message with what it brought, decoded; once only, however often it comes."""
        message = filled(envelope.message, envelope.payload)
        if isinstance(message, Push):
            if not self._host.replicas[message.shard].wants(message) or message.bad:
                return replace(message, update=None)
            update = self._coders[message.shard].open(message.update)
            update.worker = envelope.sender
            return replace(message, update=update)
        if isinstance(message, Replicate):
            replica, coder = self._host.replicas[message.shard], self._coders[message.shard]
            if not message.entries:
                raise FrameError("a message for a backup without entries")
            if message.entries[0].index != replica.index + 1:
                return message
            entries = [
                replace(entry, update=coder.open(entry.update) if entry.update else None) for entry in message.entries
            ]
            return replace(message, entries=tuple(entries))
        return message

    def _read_rows(self, worker: int, message: PullRows, payload: Sequence[memoryview], now: float) -> None:
        rows = self._rows[message.shard]
        if rows is None or not 0 <= message.table < len(rows.specs) or size_bytes(payload) % 8:
            raise FrameError("a question for rows that there are not")
        if not self._host.replicas[message.shard].may_read(message.epoch, message.term, now):
            return  # whoever may answer will be asked
        store = self._stores[message.shard].rows
        assert store is not None
        ids = torch.frombuffer(bytearray(b"".join(payload)), dtype=torch.int64) if payload else torch.empty(0).long()
        answer = PulledRows(message.shard, message.epoch, message.chunk, message.question)
        self._links.send(worker, answer, [bytes_of(store.read(message.table, ids))])

    def _is_early(self, message: Pull | Push | PullRows | Replicated) -> bool:
        """Whether somebody knows of a view before we do, or we still wait for the state."""
        replica = self._host.replicas[message.shard]
        waits = replica.view is not None and replica.view.primary == self._host.me and not replica.leads
        return message.term > replica.term or (message.term == replica.term and waits)

    def _count(self, replica: Replica, push: Push, worker: int) -> None:
        if not replica.leads or (push.term, push.epoch) != (replica.term, replica.epoch):
            return
        doubled, staleness = push.chunk in replica.applied, max(replica.version - push.version, 0)
        if not doubled:
            self._lags[push.shard].saw(worker, staleness)
        if push.shard == 0 and doubled:
            self._exchange.add("doubled")
        elif push.shard == 0:
            self._exchange.staleness[min(staleness, STALENESS_BINS - 1)] += 1

    def _is_too_old(self, replica: Replica, push: Push) -> bool:
        """Whether the worker must do the chunk again. Dropping the update would lose the chunk."""
        if push.bad or not replica.wants(push):
            return False
        return isinstance(self._policy.judge(max(replica.version - push.version, 0), replica.moment()), Drop)

    # -- deeds ----------------------------------------------------------------------------------------------
    def _do(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Execute) and action.entry.decision is not None:
                self._compensate(action.shard, action.entry.update, action.entry.decision.compensation)
        # What others wait for is sent first: a backup can work while we do, and a primary need not wait until we have
        # done what nobody can take from us any more.
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Replicate | Replicated):
                self._send(action, now)
        for action in actions:
            match action:
                case Send():
                    if not isinstance(action.message, Replicate | Replicated):
                        self._send(action, now)
                case Execute(shard, entry):
                    self._execute(self._stores[shard], entry.update, entry.decision)
                case Install(state):
                    self._install(state, state.data)
                case Load(shard):
                    self._loads[shard] = action
                    self._fetch(action, now)
                case Save(checkpoint, state):
                    self._do(self._host.saved(checkpoint, state), now)
                case Discard(shard):
                    self._copies.forget(shard)
                    self._loads.pop(shard, None)
                    if (store := self._stores.pop(shard, None)) is not None:
                        store.close()

    def _send(self, send: Send, now: float) -> None:
        """Send with the tensors that belong to it."""
        message = send.message
        payload: Sequence[memoryview] = ()
        match message:
            case Pulled():
                message, payload = self._pulled(send.to, message)
            case State() | Saved():
                if message.shard not in self._stores:
                    return  # it has been taken from us meanwhile
                payload = self._stores[message.shard].state()
            case Replicate():
                payload = [piece for entry in message.entries for piece in payload_of(entry.update)]
        self._links.send(send.to, bare(message), payload)

    def _pulled(self, worker: int, message: Pulled) -> tuple[Pulled, Sequence[memoryview]]:
        """The answer to a pull: the parameters, or how they differ from those that the worker has."""
        store = self._stores[message.shard]
        values = store.values(self._lags[message.shard].of(worker))
        parameters = store.parameters(values)
        if not self._remembers:
            return replace(message, since=0), parameters
        coder = self._answers[message.shard]
        number, since, frames = self._copies.answer(message.shard, worker, message.since, values, coder)
        payload = [*(memoryview(frame) for frame in frames), *parameters[1:]] if since else parameters
        return replace(message, number=number, since=since), payload

    def _compensate(self, shard: int, update: Update, strength: float) -> None:
        """As a primary, if we know what the worker has read: after a failover its first update goes as it is."""
        read = self._copies.read(shard, update.worker) if strength and self._host.replicas[shard].leads else None
        if read is not None:
            self._coders[shard].compensate(update, self._stores[shard].values(), read, strength)

    def _execute(self, store: Store, update: Update | None, decision: Apply | None) -> None:
        self.enter("reduce")
        store.execute(update, self._arena.hyper[store.count % self._arena.spec.ring], decision)

    def _install(self, state: State, payload: Sequence[memoryview]) -> None:
        if state.shard not in self._stores:
            rows = self._rows[state.shard]
            self._stores[state.shard] = Store(self._arena.spec, self._template, state.shard, rows)
        self._stores[state.shard].install(payload, len(state.applied))

    def _fetch(self, load: Load, now: float) -> None:
        version, size = (load.epoch, load.checkpoint), self._state_bytes[load.shard]
        if self._patience.is_over(("fetch", load.shard), version, size, now):
            self._links.send(COORDINATOR, Fetch(load.shard, load.epoch, load.checkpoint))

    def _fetched(self, message: Fetched, payload: Sequence[memoryview], now: float) -> None:
        state = message.state
        load = self._loads.get(state.shard)
        if load is None or load.epoch != message.epoch:
            return
        del self._loads[state.shard]
        self._install(state, payload)
        self._do(self._host.loaded(message.epoch, state, now), now)


def _turn_of(envelope: Envelope[Any]) -> int:
    """Of all that has come, what others wait for is done first: parameters, which are large, go last."""
    if isinstance(envelope.message, Push):
        return 1
    return 2 if isinstance(envelope.message, Pull | PullRows) else 0
