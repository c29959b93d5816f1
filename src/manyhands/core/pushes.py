"""What a worker must remember: its chunk, which shards it has read, which have acknowledged. Events in, actions out.

A chunk goes through four phases: asking the coordinator for it, pulling every shard, computing, pushing to every
shard. All of it happens in one epoch of the ledger; when the epoch ends, the chunk is given up, whatever its phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.core.messages import (
    Ask,
    Lease,
    Message,
    Pull,
    Pulled,
    Push,
    Pushed,
    Refused,
    Send,
    Timing,
    View,
    Views,
    Working,
)

__all__ = ["Action", "Compute", "Pushes"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the chunk with what was pulled (by shard), then call ``computed`` with the same ticket."""

    ticket: int
    epoch: int
    chunk: int
    pulled: tuple[Pulled, ...]


Action = Send | Compute


@dataclass(slots=True, kw_only=True)
class Pushes:
    """One worker, one chunk at a time. It begins with ``start`` and repeats itself with every ``tick``."""

    me: int
    coordinator: int
    shards: int
    timing: Timing
    phase: Literal["asking", "pulling", "computing", "pushing", "finished"] = "asking"
    epoch: int = 0
    chunk: int = -1
    views: dict[int, View] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    """The shards that have not answered in this phase."""
    pulled: dict[int, Pulled] = field(default_factory=dict)
    update: Any = None
    _requested: float = 0.0
    """When servers were last asked for something."""
    _question: Ask = field(default_factory=lambda: Ask(0, 0, None))

    def start(self) -> list[Action]:
        """Ask for the first chunk."""
        return self._ask(None)

    def receive(self, sender: int, message: Message, now: float) -> list[Action]:
        """A message from another process."""
        match message:
            case Pushed():
                return self._pushed(message)
            case Pulled():
                return self._pulled(message)
            case Lease():
                return self._leased(message, now)
            case Views():
                return self._look(message, now)
            case Refused(shard, term):
                if shard in self.missing and term > self.views[shard].term:
                    return [Send(self.coordinator, Working(self.epoch, None))]
        return []

    def computed(self, ticket: int, update: Any, now: float) -> list[Action]:
        """What ``Compute`` asked for; void if the chunk was given up meanwhile."""
        if ticket != self._question.ticket or self.phase != "computing":
            return []
        self.phase, self.update = "pushing", update
        self.missing = set(range(self.shards))
        return self._request(range(self.shards), now)

    def tick(self, now: float) -> list[Action]:
        """To be called every ``beat_s``: repeat what got no answer.

        Only computing renews the lease. One who cannot reach a server shall not keep the chunk from others.
        """
        if self.phase == "finished":
            return []
        if self.phase == "asking":
            return [Send(self.coordinator, self._question)]
        look = Send(self.coordinator, Working(self.epoch, self.chunk if self.phase == "computing" else None))
        is_late = now - self._requested >= self.timing.retry_s
        return [look, *self._request(sorted(self.missing), now)] if is_late else [look]

    def _ask(self, done: int | None) -> list[Action]:
        self.phase, self.chunk, self.update = "asking", -1, None
        self.missing.clear()
        self.pulled.clear()
        self._question = Ask(self._question.ticket + 1, self.epoch, done)
        return [Send(self.coordinator, self._question)]

    def _leased(self, message: Lease, now: float) -> list[Action]:
        if message.ticket != self._question.ticket or self.phase != "asking" or message.views.epoch < self.epoch:
            return []
        self._learn(message.views)
        if message.finished:
            self.phase = "finished"
        elif message.chunk is not None:
            self.phase, self.chunk = "pulling", message.chunk
            self.missing = set(range(self.shards))
            return self._request(range(self.shards), now)
        return []

    def _look(self, message: Views, now: float) -> list[Action]:
        if message.epoch < self.epoch:
            return []
        before = self.epoch
        changed = self._learn(message)
        if self.phase in ("asking", "finished"):
            return []
        if self.epoch != before:
            return self._ask(None)
        outdated = self.missing & changed
        return self._request(sorted(outdated), now) if outdated else []

    def _learn(self, message: Views) -> set[int]:
        """The shards that have a newer view now."""
        newer = [
            view for view in message.views if view.shard not in self.views or view.term > self.views[view.shard].term
        ]
        self.views.update((view.shard, view) for view in newer)
        self.epoch = message.epoch
        return {view.shard for view in newer}

    def _request(self, shards: Iterable[int], now: float) -> list[Action]:
        self._requested = now
        actions: list[Action] = []
        for shard in shards:
            view = self.views[shard]
            if view.primary is None:
                continue
            if self.phase == "pulling":
                actions.append(Send(view.primary, Pull(shard, self.epoch, view.term, self.chunk)))
            elif self.phase == "pushing":
                version = self.pulled[shard].version
                push = Push(shard, self.epoch, view.term, self.chunk, version, self.update)
                actions.append(Send(view.primary, push))
        return actions

    def _is_mine(self, message: Pulled | Pushed) -> bool:
        """Whether it is about this chunk, in this epoch."""
        return message.chunk == self.chunk and message.epoch == self.epoch

    def _pulled(self, message: Pulled) -> list[Action]:
        if self.phase != "pulling" or not self._is_mine(message) or message.shard not in self.missing:
            return []
        self.pulled[message.shard] = message
        self.missing.discard(message.shard)
        if self.missing:
            return []
        self.phase = "computing"
        pulled = tuple(self.pulled[shard] for shard in range(self.shards))
        return [Compute(self._question.ticket, self.epoch, self.chunk, pulled)]

    def _pushed(self, message: Pushed) -> list[Action]:
        if self.phase != "pushing" or not self._is_mine(message):
            return []
        self.missing.discard(message.shard)
        return self._ask(self.chunk) if not self.missing else []
