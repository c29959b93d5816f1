"""The coordinator of a run with parameter servers: leases chunks to workers, keeps the views, completes checkpoints.

Work goes from checkpoint to checkpoint. No chunk beyond the next one is leased before all chunks up to it are done
and every shard has been written; so a checkpoint holds the same chunks in all shards, and going back to it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from manyhands.core.chunks import Chunks
from manyhands.core.leases import Leases
from manyhands.core.messages import Ask, Beat, Grant, Lease, Message, Saved, Send, Snapshot, Timing, Working
from manyhands.core.views import ViewService

__all__ = ["Action", "Completed", "Coordinator", "RolledBack"]


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The ledger goes back to ``chunks`` and begins a new epoch: nothing else that was acknowledged counts."""

    epoch: int
    checkpoint: int
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Completed:
    """All shards are written: from now on this is where the run goes back to."""

    checkpoint: int
    chunks: Chunks


Action = Send | RolledBack | Completed


@dataclass(slots=True)
class _Saving:
    checkpoint: int
    chunks: Chunks
    missing: set[int]


@dataclass(slots=True)
class _Answered:
    """What a worker's last ticket got."""

    ticket: int
    epoch: int
    chunk: int | None


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """The run from 0 to ``chunks``, with a checkpoint each ``checkpoint_every`` of them, the first one at 0."""

    shards: int
    chunks: int
    checkpoint_every: int
    timing: Timing
    leases: Leases
    service: ViewService = field(init=False)
    finished: bool = False
    _done: Chunks = field(default_factory=Chunks)
    """What the last complete checkpoint holds."""
    _checkpoints: int = 0
    """How many were begun."""
    _saving: _Saving | None = None
    _answered: dict[int, _Answered] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.service = ViewService(shards=self.shards, timing=self.timing)
        self.leases.horizon = min(self.checkpoint_every, self.chunks)

    def start(self, servers: list[int], now: float) -> list[Action]:
        """Begin on these servers; the checkpoint 0 exists."""
        return list(self.service.start(servers, now))

    def receive(self, sender: int, message: Message, now: float) -> list[Action]:
        """A message from another process."""
        epoch = self.service.epoch
        match message:
            case Beat():
                sends = self.service.beat(sender, message, now)
                return self._follow(epoch, [self._with_workers(send) for send in sends])
            case Ask():
                return self._ask(sender, message, now)
            case Working():
                if message.epoch == self.service.epoch and message.chunk is not None:
                    self.leases.renew(message.chunk, sender, now)
                return [Send(sender, self.service.current())]
            case Saved():
                return self._saved(message)
        return []

    def _with_workers(self, send: Send) -> Send:
        if not isinstance(send.message, Grant):
            return send
        return replace(send, message=replace(send.message, workers=tuple(self._answered)))

    def died(self, process: int, now: float) -> list[Action]:
        """A server or a worker has ended; only to be called when it is certain."""
        self.leases.gone(process)
        if self._answered.pop(process, None) is not None:
            return []
        return self._follow(self.service.epoch, self.service.died(process, now))

    def tick(self, now: float) -> list[Action]:
        """To be called every ``beat_s``."""
        self.leases.expire(now)
        return self._follow(self.service.epoch, self.service.tick(now)) + self._ask_to_save()

    def _ask(self, worker: int, message: Ask, now: float) -> list[Action]:
        last = self._answered.get(worker)
        if last is not None and message.ticket < last.ticket:
            return []
        actions: list[Action] = []
        epoch = self.service.epoch
        if message.done is not None and message.epoch == epoch and self.leases.done(message.done):
            actions += self._rest()
        asked_before = last is not None and (last.ticket, last.epoch) == (message.ticket, epoch)
        chunk = last.chunk if last is not None and asked_before else None  # the answer was lost, or it came twice
        if chunk is None:
            chunk = self.leases.lease(worker, now)
            self._answered[worker] = _Answered(message.ticket, epoch, chunk)
        return [*actions, Send(worker, Lease(message.ticket, chunk, self.finished, self.service.current()))]

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def _rest(self) -> list[Action]:
        """Begin a checkpoint when all is done that may be done before it."""
        if self._saving is not None or self.leases.prefix < self.leases.horizon:
            return []
        self._checkpoints += 1
        self._saving = _Saving(self._checkpoints, self.leases.done_chunks, set(range(self.shards)))
        return self._ask_to_save()

    def _ask_to_save(self) -> list[Action]:
        saving = self._saving
        if saving is None:
            return []
        views = [self.service.views[shard] for shard in sorted(saving.missing)]
        return [
            Send(view.primary, Snapshot(view.shard, view.epoch, view.term, saving.checkpoint, saving.chunks))
            for view in views
            if view.primary is not None
        ]

    def _saved(self, message: Saved) -> list[Action]:
        saving = self._saving
        if saving is None or (message.epoch, message.checkpoint) != (self.service.epoch, saving.checkpoint):
            return []
        saving.missing.discard(message.shard)
        if saving.missing:
            return []
        self._saving, self._done = None, saving.chunks
        self.service.checkpoint = saving.checkpoint
        self._set_horizon()
        self.finished = saving.chunks.prefix >= self.chunks
        return [Completed(saving.checkpoint, saving.chunks)]

    def _set_horizon(self) -> None:
        self.leases.horizon = min(self._done.prefix + self.checkpoint_every, self.chunks)

    def _follow(self, epoch: int, sends: list[Send]) -> list[Action]:
        """After the view service has acted: when it has gone back since ``epoch``, all goes back with it."""
        if self.service.epoch == epoch:
            return list(sends)
        self._saving = None
        self.leases.rollback(self._done)
        self._set_horizon()
        return [RolledBack(self.service.epoch, self.service.checkpoint, self._done), *sends]
