"""One shard on one server: primary, backup, or neither, as its view says. Events in, actions out.

A primary gives each chunk one entry in its log, applies it, and sends it to its backup. It acknowledges the chunk
when the backup has the entry, and alone only under a view without a backup. A new backup begins with a copy of the
state; as soon as it has one it has all that was ever acknowledged, and may be promoted: it is in sync.

Updates that make a step together wait for each other without an entry, and get their entries at once, so that nobody
ever has half a step: neither a backup, nor a copy of the state.

Time matters in one place only: a primary acknowledges nothing after its lease from the coordinator has run out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from manyhands.core.actions import Action, Discard, Execute, Install, Load, Save
from manyhands.core.chunks import ChunkSet
from manyhands.core.messages import (
    Entry,
    Pull,
    Pulled,
    Push,
    Pushed,
    Refused,
    Replicate,
    Replicated,
    Send,
    Snapshot,
    State,
    Timing,
    View,
)
from manyhands.core.policies import Apply, Hold, Moment, Policy, together

__all__ = ["MOST_TOGETHER", "Action", "Discard", "Execute", "Install", "Load", "Replica", "Save"]

NOTHING = -1  # an index: the backup has not even a copy of the state
NEVER = float("-inf")
MOST_TOGETHER = 64
"""Updates of one step."""


@dataclass(slots=True)
class _Reading:
    """What a worker has read, and whether it still computes with it."""

    version: int
    until: float
    computing: bool = True


@dataclass(slots=True, kw_only=True)
class Replica:
    """A shard's state (without the parameters themselves) and what its server knows of the others."""

    me: int
    shard: int
    policy: Policy
    timing: Timing
    term: int = 0
    """The highest that was heard of."""
    view: View | None = None
    """The view of that term; None when only its number is known."""
    lease_until: float = NEVER

    epoch: int = 0
    """Of the state; 0: there is none."""
    index: int = 0
    version: int = 0
    applied: ChunkSet = field(default_factory=ChunkSet)

    replicated: int = NOTHING
    """What the backup has, as far as the primary knows."""
    copied: float = NEVER
    """When the last copy of the state was sent to the backup."""
    base: int = 0
    tail: list[tuple[Entry, ...]] = field(default_factory=list)
    """The entries after ``base``, which that copy had, for the backup, step by step."""
    heard: float = 0.0
    """When the backup last had nothing to answer, or answered."""
    pending: dict[int, int] = field(default_factory=dict)
    """The entries, by chunk, that the backup must have before they are acknowledged."""
    waiting: dict[int, list[int]] = field(default_factory=dict)
    """The workers, by chunk, that wait for an acknowledgement."""
    held: dict[int, Push] = field(default_factory=dict)
    group: dict[int, Push] = field(default_factory=dict)
    """What makes the next step together, and waits for more."""
    verdict: Apply = field(default_factory=Apply)
    """Of the last of them."""
    workers: frozenset[int] = frozenset()
    """Who works, as far as the coordinator has said."""
    reading: dict[int, _Reading] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        """Whether this is the primary, with the state."""
        return self.view is not None and self.view.primary == self.me and self.view.epoch == self.epoch

    @property
    def follows(self) -> bool:
        """Whether this is the backup, with or without the state."""
        return self.view is not None and self.view.backup == self.me

    @property
    def in_sync(self) -> bool:
        """Whether the backup has everything that was acknowledged."""
        return self.replicated != NOTHING

    @property
    def _backup(self) -> int | None:
        return None if self.view is None else self.view.backup

    def backup_state(self, now: float) -> Literal["joining", "in sync", "stuck"] | None:
        """What the coordinator must know of the backup; None when this is no primary with a backup."""
        if not self.leads or self._backup is None:
            return None
        is_copying = self.copied != NEVER and not self.in_sync
        patience = self.timing.transfer_s if is_copying else self.timing.lease_s
        if self._backup_lacks_something and now - self.heard > patience:
            return "stuck"
        return "in sync" if self.in_sync else "joining"

    # -- from the coordinator -------------------------------------------------------------------------------------
    def adopt(self, view: View, now: float) -> list[Action]:
        """A view of the shard; older ones than the one in force change nothing."""
        if view.term < self.term or (view.term == self.term and self.view is not None):
            return []
        self.term, self.view = view.term, view
        if view.primary == self.me and view.epoch == self.epoch:
            return self._lead(now)
        actions: list[Action] = [Discard(self.shard)] if self.epoch else []
        self._forget()
        if view.primary == self.me:
            actions.append(Load(self.shard, view.epoch, view.checkpoint))
        return actions + self._greet()

    def renew(self, until: float, now: float) -> list[Action]:
        """The lease lasts ``until``; what waited for it is acknowledged."""
        self.lease_until = max(self.lease_until, until)
        return self._acknowledge_all(now)

    def know(self, workers: Collection[int], now: float) -> list[Action]:
        """These are at work: nobody waits for others any more."""
        self.workers = frozenset(workers)
        self.reading = {worker: reading for worker, reading in self.reading.items() if worker in self.workers}
        return self._judge_held(now) if self.leads else []

    def snapshot(self, message: Snapshot) -> list[Action]:
        """Write a checkpoint, if the state is exactly what it shall hold."""
        if not self.leads or message.term != self.term or message.epoch != self.epoch:
            return []
        if self.pending or self.applied.frozen() != message.chunks:
            return []
        return [Save(message.checkpoint, self._state())]

    def loaded(self, epoch: int, state: State, now: float) -> list[Action]:
        """The checkpoint's state for ``epoch`` is in memory."""
        if self.view is None or self.view.primary != self.me or self.view.epoch != epoch or self.epoch == epoch:
            return []
        self._take(state)
        self.epoch = epoch
        return self._lead(now)

    def tick(self, now: float) -> list[Action]:
        """Look after what got no answer."""
        if not self.leads:
            return self._greet()
        self.reading = {worker: reading for worker, reading in self.reading.items() if reading.until > now}
        actions = self._judge_held(now)
        if self.group and not self._versions_in_use():
            actions += self._step(now)
        if self._backup_lacks_something and now - self.heard >= self.timing.lease_s / 2:
            actions += self._repeat(now)
        return actions

    # -- from workers ---------------------------------------------------------------------------------------------
    def pull(self, worker: int, message: Pull, now: float) -> list[Action]:
        """A worker reads the parameters."""
        if not self._is_addressed(message):
            return self._refuse(worker, message)
        if now >= self.lease_until:
            return []
        self.reading[worker] = _Reading(self.version, now + self.timing.reading_s)
        return [Send(worker, Pulled(self.shard, self.epoch, message.chunk, self.version, since=message.has))]

    def wants(self, message: Push) -> bool:
        """Whether the update is one that we shall judge, and have not got yet."""
        known = message.chunk in self.applied or message.chunk in self.held or message.chunk in self.group
        return self._is_addressed(message) and not known

    def may_read(self, epoch: int, term: int, now: float) -> bool:
        """Whether somebody who knows of this view may be told what the parameters are."""
        return self.leads and (epoch, term) == (self.epoch, self.term) and now < self.lease_until

    def push(self, worker: int, message: Push, now: float) -> list[Action]:
        """A worker brings an update; one for a chunk that has had its effect is acknowledged and ignored."""
        if not self._is_addressed(message):
            return self._refuse(worker, message)
        chunk = message.chunk
        waiting = self.waiting.setdefault(chunk, [])
        if worker not in waiting:
            waiting.append(worker)
        if worker in self.reading:
            self.reading[worker].computing = False
        if chunk in self.applied:
            return self._acknowledge(chunk, now)
        actions: list[Action] = []
        if self.wants(message):
            actions = self._judge(message, now)
        actions += self._judge_held(now)
        if self.group and not self._versions_in_use():
            everybody = {worker for chunk in self.group for worker in self.waiting.get(chunk, ())}
            if everybody >= self.workers:  # they all wait for us
                actions += self._step(now)
        return actions

    # -- between servers ------------------------------------------------------------------------------------------
    def take_state(self, primary: int, message: State) -> list[Action]:
        """A copy of the primary's state; the only way for a backup to begin."""
        if message.term < self.term:
            return [Send(primary, Refused(self.shard, self.term))]
        if message.term > self.term or not self.follows:
            return []  # the view that explains it is on its way, and so is a repetition
        actions: list[Action] = []
        if not self.epoch or message.index > self.index:
            self._take(message)
            actions.append(Install(message))
        return [*actions, Send(primary, Replicated(self.shard, self.term, self.index))]

    def replicate(self, primary: int, message: Replicate) -> list[Action]:
        """An entry of the primary's log. Entries are taken in order; after a gap the primary repeats itself."""
        if message.term < self.term:
            return [Send(primary, Refused(self.shard, self.term))]
        if message.term > self.term or not self.follows or not self.epoch:
            return []
        actions: list[Action] = []
        if message.entries[0].index == self.index + 1:
            actions += [action for entry in message.entries for action in self._execute(entry)]
        return [*actions, Send(primary, Replicated(self.shard, self.term, self.index))]

    def note_replicated(self, backup: int, message: Replicated, now: float) -> list[Action]:
        """The backup has answered."""
        if not self.leads or message.term != self.term or backup != self._backup:
            return []
        if message.index == NOTHING:
            return [] if self.in_sync else self._copy(now)
        if message.index > self.replicated:
            self.replicated, self.heard = message.index, now
            if self.replicated >= self.base:
                self.tail = [entries for entries in self.tail if entries[-1].index > self.replicated]
                self.base = self.replicated
        self.pending = {chunk: index for chunk, index in self.pending.items() if index > self.replicated}
        return self._acknowledge_all(now)

    def refused(self, message: Refused) -> None:
        """Somebody knows of a newer term: act no more until its view is here."""
        if message.term > self.term:
            self.term, self.view = message.term, None
            self.waiting.clear()
            self.held.clear()
            self.group.clear()

    # -- acting as primary ----------------------------------------------------------------------------------------
    def _lead(self, now: float) -> list[Action]:
        self.pending.clear()
        self.replicated, self.copied, self.base, self.heard = NOTHING, NEVER, self.index, now
        self.tail.clear()
        return self._acknowledge_all(now)

    def _is_addressed(self, message: Pull | Push) -> bool:
        return self.leads and message.term == self.term and message.epoch == self.epoch

    def _refuse(self, worker: int, message: Pull | Push) -> list[Action]:
        return [Send(worker, Refused(self.shard, self.term))] if message.term < self.term else []

    def _versions_in_use(self) -> list[int]:
        """The versions that workers still compute with."""
        return [reading.version for reading in self.reading.values() if reading.computing]

    def moment(self) -> Moment:
        """What is known of the others."""
        computing = self._versions_in_use()
        return Moment(
            workers=max(len(self.workers), len(self.reading), 1),
            oldest=self.version - min(computing) if computing else None,
            held=len(self.held),
            waiting=self.version - min(push.version for push in self.held.values()) if self.held else None,
            collected=len(self.group),
        )

    def _judge(self, push: Push, now: float) -> list[Action]:
        if push.bad:
            return self._enter([push], [None], now)
        # A worker may have read what a primary before this one had and nobody else: it is not older for that.
        verdict = self.policy.judge(max(self.version - push.version, 0), self.moment())
        if isinstance(verdict, Hold):
            self.held[push.chunk] = push
            return []
        if not isinstance(verdict, Apply):
            return self._enter([push], [None], now)
        self.group[push.chunk], self.verdict = push, verdict
        return self._step(now) if verdict.step or len(self.group) == MOST_TOGETHER else []

    def _step(self, now: float) -> list[Action]:
        """Take the step with the updates that have come for it."""
        pushes = list(self.group.values())
        self.group.clear()
        rate, factor, compensation = together(self.verdict, len(pushes))
        last = Apply(rate * factor, True, compensation)
        return self._enter(pushes, [Apply(step=False)] * (len(pushes) - 1) + [last], now)

    def _judge_held(self, now: float) -> list[Action]:
        actions: list[Action] = []
        before = None
        while self.held and len(self.held) != before:
            before = len(self.held)
            for chunk in list(self.held):
                actions += self._judge(self.held.pop(chunk), now)
        return actions

    def _enter(self, pushes: Sequence[Push], decisions: Sequence[Apply | None], now: float) -> list[Action]:
        entries = tuple(
            Entry(self.index + number, self.term, push.chunk, decision, push.update)
            for number, (push, decision) in enumerate(zip(pushes, decisions, strict=True), start=1)
        )
        actions = [action for entry in entries for action in self._execute(entry)]
        backup = self._backup
        if backup is not None:
            self.pending |= {entry.chunk: entry.index for entry in entries}
            if not self._backup_lacks_something:
                self.heard = now
            if self.copied != NEVER:  # or else it will be in the copy
                self.tail.append(entries)
                actions.append(Send(backup, Replicate(self.shard, self.term, entries)))
        return actions + [action for entry in entries for action in self._acknowledge(entry.chunk, now)]

    def _acknowledge(self, chunk: int, now: float) -> list[Action]:
        is_safe = self._backup is None or (self.in_sync and chunk not in self.pending)
        if chunk not in self.applied or not is_safe or now >= self.lease_until:
            return []
        message = Pushed(self.shard, self.epoch, self.term, chunk)
        return [Send(worker, message) for worker in self.waiting.pop(chunk, ())]

    def _acknowledge_all(self, now: float) -> list[Action]:
        return [action for chunk in list(self.waiting) for action in self._acknowledge(chunk, now)]

    # -- the backup, seen from the primary ------------------------------------------------------------------------
    @property
    def _backup_lacks_something(self) -> bool:
        return self._backup is not None and (bool(self.tail) or self.replicated < self.base)

    def _copy(self, now: float) -> list[Action]:
        if now - self.copied < self.timing.transfer_s / 2:
            return []  # it is under way
        assert self.view is not None and self.view.backup is not None
        self.copied, self.base = now, self.index
        self.tail.clear()
        return [Send(self.view.backup, self._state())]

    def _repeat(self, now: float) -> list[Action]:
        assert self.view is not None and self.view.backup is not None
        if not self.in_sync:
            return []  # it will ask for a copy
        if self.replicated < self.base:
            return self._copy(now)
        return [Send(self.view.backup, Replicate(self.shard, self.term, entries)) for entries in self.tail]

    def _greet(self) -> list[Action]:
        """A backup that has nothing asks for a copy; one sent before it knew of its office would be ignored."""
        if not self.follows or self.epoch or self.view is None or self.view.primary is None:
            return []
        return [Send(self.view.primary, Replicated(self.shard, self.term, NOTHING))]

    # -- the state ------------------------------------------------------------------------------------------------
    def _execute(self, entry: Entry) -> list[Action]:
        self.index = entry.index
        self.applied.add(entry.chunk)
        if entry.decision is not None:
            self.version += entry.decision.step
        return [Execute(self.shard, entry)]

    def _state(self) -> State:
        return State(self.shard, self.epoch, self.term, self.index, self.version, self.applied.frozen())

    def _take(self, state: State) -> None:
        self.epoch, self.index, self.version = state.epoch, state.index, state.version
        self.applied = ChunkSet(state.applied)

    def _forget(self) -> None:
        self.epoch = self.index = self.version = 0
        self.applied = ChunkSet()
        self.pending.clear()
        self.waiting.clear()
        self.held.clear()
        self.group.clear()
        self.reading.clear()
