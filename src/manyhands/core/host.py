"""All shards of one server process: who gets which message, the beat, and the lease that the coordinator grants."""

from __future__ import annotations

from dataclasses import dataclass, field

from manyhands.core.messages import (
    Beat,
    Grant,
    Message,
    Pull,
    Push,
    Refused,
    Replicate,
    Replicated,
    Report,
    Saved,
    Send,
    Snapshot,
    State,
    Timing,
    Views,
)
from manyhands.core.policies import Policy
from manyhands.core.replication import Action, Replica

__all__ = ["Host"]


@dataclass(slots=True, kw_only=True)
class Host:
    """A server: a replica of each shard, most of them empty. It begins with ``tick``, and is at rest without it."""

    me: int
    coordinator: int
    shards: int
    policy: Policy
    timing: Timing
    replicas: list[Replica] = field(init=False)
    _saves: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """By shard: the last checkpoint that was begun, and whether it is on disk."""

    def __post_init__(self) -> None:
        self.replicas = [
            Replica(me=self.me, shard=shard, policy=self.policy, timing=self.timing) for shard in range(self.shards)
        ]

    def receive(self, sender: int, message: Message, now: float) -> list[Action]:
        """A message from another process."""
        match message:
            case Push(shard):
                return self.replicas[shard].push(sender, message, now)
            case Pull(shard):
                return self.replicas[shard].pull(sender, message, now)
            case Replicate(shard):
                return self.replicas[shard].replicate(sender, message)
            case Replicated(shard):
                return self._replicated(self.replicas[shard], sender, message, now)
            case Grant():
                return self._granted(message, now)
            case Views():
                return self._adopt(message, now)
            case State(shard):
                return self.replicas[shard].take_state(sender, message)
            case Refused(shard):
                self.replicas[shard].refused(message)
            case Snapshot(shard):
                return self._snapshot(self.replicas[shard], message)
        return []

    def tick(self, now: float) -> list[Action]:
        """To be called every ``beat_s``."""
        actions = [action for replica in self.replicas for action in replica.tick(now)]
        return [*actions, self._beat(now)]

    def loaded(self, epoch: int, state: State, now: float) -> list[Action]:
        """What a ``Load`` for ``epoch`` asked for is in memory."""
        return self.replicas[state.shard].loaded(epoch, state, now)

    def saved(self, checkpoint: int, state: State) -> list[Action]:
        """What a ``Save`` asked for is on disk."""
        self._saves[state.shard] = (checkpoint, True)
        return [Send(self.coordinator, Saved(state.shard, state.epoch, checkpoint))]

    def not_saved(self, state: State) -> None:
        """What a ``Save`` asked for could not be written; it is tried again when the coordinator asks again."""
        self._saves.pop(state.shard, None)

    def _snapshot(self, replica: Replica, message: Snapshot) -> list[Action]:
        checkpoint, is_written = self._saves.get(replica.shard, (0, False))
        if checkpoint == message.checkpoint:  # the coordinator repeats itself until it hears that it is written
            answer = Send(self.coordinator, Saved(replica.shard, message.epoch, checkpoint))
            return [answer] if is_written else []
        actions = replica.snapshot(message)
        if actions:
            self._saves[replica.shard] = (message.checkpoint, False)
        return actions

    def _beat(self, now: float) -> Send:
        states = [(replica, replica.backup_state(now)) for replica in self.replicas]
        reports = tuple(Report(replica.shard, replica.term, state) for replica, state in states if state is not None)
        return Send(self.coordinator, Beat(now, reports))

    def _replicated(self, replica: Replica, backup: int, message: Replicated, now: float) -> list[Action]:
        before = replica.in_sync
        actions = replica.note_replicated(backup, message, now)
        # The sooner the coordinator knows, the sooner it can do without this server.
        return [*actions, self._beat(now)] if replica.in_sync and not before else actions

    def _granted(self, message: Grant, now: float) -> list[Action]:
        # The views first: the lease is for what they say.
        actions = self._adopt(message.views, now)
        until = message.sent + self.timing.lease_s
        for replica in self.replicas:
            actions += replica.renew(until, now)
            actions += replica.know(message.workers, now)
        return actions

    def _adopt(self, message: Views, now: float) -> list[Action]:
        return [action for view in message.views for action in self.replicas[view.shard].adopt(view, now)]
