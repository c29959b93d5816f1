"""A primary and its backups over a network that does anything: what was acknowledged is where it must be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from manyhands.core.chunks import Chunks
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
from manyhands.core.policies import Apply, Bounded, Drop, Plain, Policy, Rennala
from manyhands.core.replication import NOTHING, Action, Discard, Execute, Install, Load, Replica, Save

TIMING = Timing(beat_s=0.2, lease_s=1.0, drift=0.0)
WORKER = 100
SERVERS = (1, 2, 3)
EMPTY = State(0, 0, 0, 0, 0, Chunks())


class Trio(RuleBasedStateMachine):
    """Three servers with one shard, a view service that may do all that it is allowed to, and a bag of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas = {me: Replica(me=me, shard=0, policy=Plain(), timing=TIMING) for me in SERVERS}
        self.logs: dict[int, list[Entry]] = {me: [] for me in SERVERS}
        self.sent: dict[tuple[int, int], list[Entry]] = {}  # (term, index) of a copy -> the entries in it
        self.bag: list[tuple[int, Send]] = []
        self.view = View(0, 1, 1, 1, 2, 0)
        self.in_sync = False
        self.now = 0.0
        self.leased_until = 0.0
        self.acknowledged: set[int] = set()
        self.hear(1)

    def do(self, me: int, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=Pushed(chunk=chunk)):
                    assert me == self.view.primary, "acknowledged after its term ended"
                    assert self.now < self.leased_until, "acknowledged without a lease"
                    self.acknowledged.add(chunk)
                case Send(message=message):
                    if isinstance(message, State):
                        self.sent[message.term, message.index] = list(self.logs[me])
                    self.bag.append((me, action))
                case Execute(entry=entry):
                    assert entry.chunk not in {done.chunk for done in self.logs[me]}, "a second effect"
                    assert entry.index == len(self.logs[me]) + 1
                    self.logs[me].append(entry)
                case Install(state=state):
                    self.logs[me] = list(self.sent[state.term, state.index])
                case Load(epoch=epoch):
                    assert self.view.term == 1, "only the first primary begins with a checkpoint"
                    self.do(me, self.replicas[me].loaded(epoch, EMPTY, self.now))
                case Discard():
                    self.logs[me] = []

    def change(self, primary: int | None, backup: int | None) -> None:
        self.view = View(0, 1, self.view.term + 1, primary, backup, 0)
        self.in_sync = False

    @rule(me=st.sampled_from(SERVERS))
    def hear(self, me: int) -> None:
        """A server hears of the view."""
        self.do(me, self.replicas[me].adopt(self.view, self.now))

    @rule()
    def a_lease_is_granted(self) -> None:
        assert self.view.primary is not None
        self.leased_until = self.now + TIMING.lease_s
        self.hear(self.view.primary)
        self.do(self.view.primary, self.replicas[self.view.primary].renew(self.leased_until, self.now))

    @rule(me=st.sampled_from(SERVERS), chunk=st.integers(0, 9), age=st.integers(0, 1))
    def a_worker_pushes(self, me: int, chunk: int, age: int) -> None:
        push = Push(0, 1, self.view.term - age, chunk, 0, None)
        self.do(me, self.replicas[me].push(WORKER, push, self.now))

    @precondition(lambda self: self.bag)
    @rule(data=st.data(), again=st.booleans(), lost=st.booleans())
    def a_message_arrives(self, data: st.DataObject, again: bool, lost: bool) -> None:
        place = data.draw(st.integers(0, len(self.bag) - 1))
        sender, send = self.bag[place] if again else self.bag.pop(place)
        if send.to in self.replicas and not (lost and not again):
            self.do(send.to, self.handle(self.replicas[send.to], sender, send.message))

    def handle(self, replica: Replica, sender: int, message: Any) -> list[Action]:
        match message:
            case State():
                return replica.take_state(sender, message)
            case Replicate():
                return replica.replicate(sender, message)
            case Replicated():
                return replica.note_replicated(sender, message, self.now)
            case Refused():
                replica.refused(message)
        return []

    @rule(seconds=st.sampled_from([0.1, 0.4, 1.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        for me, replica in self.replicas.items():
            self.do(me, replica.tick(self.now))

    @rule()
    def the_primary_reports(self) -> None:
        assert self.view.primary is not None
        replica = self.replicas[self.view.primary]
        if replica.term == self.view.term and replica.backup_state(self.now) == "in sync":
            self.in_sync = True

    @precondition(lambda self: self.in_sync and self.now >= self.leased_until)
    @rule(with_backup=st.booleans())
    def the_backup_is_promoted(self, with_backup: bool) -> None:
        spare = next(me for me in SERVERS if me not in (self.view.primary, self.view.backup))
        self.change(self.view.backup, spare if with_backup else None)

    @rule(backup=st.none() | st.sampled_from(SERVERS))
    def the_backup_is_changed(self, backup: int | None) -> None:
        if backup != self.view.primary:
            self.change(self.view.primary, backup)

    @invariant()
    def what_was_acknowledged_is_safe(self) -> None:
        primary, backup = self.view.primary, self.view.backup
        assert primary is not None
        log = self.logs[primary]
        assert self.acknowledged <= {entry.chunk for entry in log}
        if self.in_sync:
            assert backup is not None
            copy = self.logs[backup]
            assert copy == log[: len(copy)], "the backup is not a prefix of its primary"
            assert self.acknowledged <= {entry.chunk for entry in copy}

    @invariant()
    def a_replica_knows_what_it_has(self) -> None:
        for me, replica in self.replicas.items():
            assert replica.index == len(self.logs[me])
            assert set(replica.applied.frozen()) == {entry.chunk for entry in self.logs[me]}

    def teardown(self) -> None:
        """Left alone, a pushed chunk is acknowledged and the backup gets in sync."""
        assert self.view.primary is not None
        self.change(self.view.primary, next(me for me in SERVERS if me != self.view.primary))
        self.acknowledged.discard(10)
        for _ in range(4):
            self.now += 0.3
            for me in SERVERS:
                self.hear(me)
            self.a_lease_is_granted()
            self.a_worker_pushes(self.view.primary, 10, 0)
            for replica in self.replicas.values():
                self.do(replica.me, replica.tick(self.now))
            while self.bag:
                sender, send = self.bag.pop(0)
                if send.to in self.replicas:
                    self.do(send.to, self.handle(self.replicas[send.to], sender, send.message))
        assert 10 in self.acknowledged
        self.the_primary_reports()
        assert self.in_sync


TestTrio = Trio.TestCase
TestTrio.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def primary_with(policy: Policy, backup: int | None = None) -> Replica:
    replica = Replica(me=1, shard=0, policy=policy, timing=TIMING)
    assert replica.adopt(View(0, 1, 1, 1, backup, 0), 0.0) == [Load(0, 1, 0)]
    replica.loaded(1, EMPTY, 0.0)
    replica.renew(10.0, 0.0)
    return replica


def primary_in_sync() -> Replica:
    replica = primary_with(Plain(), backup=2)
    (copy,) = replica.note_replicated(2, Replicated(0, 1, NOTHING), 0.0)
    assert copy == Send(2, State(0, 1, 1, 0, 0, Chunks()))
    replica.note_replicated(2, Replicated(0, 1, 0), 0.0)
    assert replica.in_sync
    return replica


def push(chunk: int, version: int = 0, term: int = 1, epoch: int = 1) -> Push:
    return Push(0, epoch, term, chunk, version, None)


def acknowledged(actions: list[Action]) -> list[tuple[int, int]]:
    sends = [action for action in actions if isinstance(action, Send)]
    return [(send.to, send.message.chunk) for send in sends if isinstance(send.message, Pushed)]


def test_a_repeated_push_is_acknowledged_and_changes_nothing() -> None:
    replica = primary_with(Plain())
    first = replica.push(WORKER, push(0), 0.0)
    assert [type(action) for action in first] == [Execute, Send]
    assert replica.push(WORKER, push(0), 0.0) == [Send(WORKER, Pushed(0, 1, 1, 0))]
    assert replica.push(101, push(0), 0.0) == [Send(101, Pushed(0, 1, 1, 0))]
    assert (replica.index, replica.version) == (1, 1)


def test_another_term_or_epoch_is_not_served() -> None:
    replica = primary_with(Plain())
    replica.adopt(View(0, 1, 2, 1, None, 0), 0.0)
    assert replica.push(WORKER, push(0, term=1), 0.0) == [Send(WORKER, Refused(0, 2))]
    assert replica.push(WORKER, push(0, term=3), 0.0) == []
    assert replica.push(WORKER, push(0, term=2, epoch=0), 0.0) == []
    assert replica.pull(WORKER, Pull(0, 1, 1, 0), 0.0) == [Send(WORKER, Refused(0, 2))]
    assert replica.index == 0


def test_nothing_is_acknowledged_or_read_after_the_lease() -> None:
    replica = primary_with(Plain())
    assert acknowledged(replica.push(WORKER, push(0), 10.0)) == []
    assert replica.pull(WORKER, Pull(0, 1, 1, 0), 10.0) == []
    assert acknowledged(replica.renew(12.0, 11.0)) == [(WORKER, 0)]


def test_the_refusal_of_a_newer_term_ends_the_reign() -> None:
    replica = primary_in_sync()
    replica.push(WORKER, push(0), 0.0)
    replica.refused(Refused(0, 2))
    assert not replica.leads
    assert replica.note_replicated(2, Replicated(0, 1, 1), 0.0) == []
    assert replica.push(WORKER, push(0), 0.0) == [Send(WORKER, Refused(0, 2))]


def test_a_backup_does_what_its_primary_decided() -> None:
    backup = Replica(me=2, shard=0, policy=Plain(), timing=TIMING)
    backup.adopt(View(0, 1, 1, 1, 2, 0), 0.0)
    backup.take_state(1, State(0, 1, 1, 0, 0, Chunks()))
    for index, decision in enumerate([Apply(0.5), None, Apply(step=False)], start=1):
        entry = Entry(index, 1, index, decision, None)
        assert backup.replicate(1, Replicate(0, 1, (entry,))) == [Execute(0, entry), Send(1, Replicated(0, 1, index))]
    assert (backup.index, backup.version) == (3, 1)


def test_a_primary_complains_about_a_backup_that_does_not_answer() -> None:
    replica = primary_in_sync()
    assert replica.backup_state(5.0) == "in sync"
    assert acknowledged(replica.push(WORKER, push(0), 5.0)) == []
    assert replica.backup_state(6.0) == "in sync"
    assert replica.backup_state(6.1) == "stuck"
    assert acknowledged(replica.tick(6.1)) == [], "it must not go on alone by itself"
    assert acknowledged(replica.adopt(View(0, 1, 2, 1, None, 0), 6.2)) == [(WORKER, 0)]


def test_under_a_view_with_a_backup_nothing_is_acknowledged_that_it_does_not_have() -> None:
    replica = primary_with(Plain())
    assert acknowledged(replica.push(WORKER, push(0), 0.0)) == [(WORKER, 0)], "alone"
    replica.adopt(View(0, 1, 2, 1, 2, 0), 0.0)
    assert acknowledged(replica.push(WORKER, push(0, term=2), 0.0)) == [], "not even again"
    assert acknowledged(replica.push(WORKER, push(1, term=2), 0.0)) == []
    (copy,) = replica.note_replicated(2, Replicated(0, 2, NOTHING), 0.0)
    assert copy == Send(2, State(0, 1, 2, 2, 2, Chunks(2)))
    assert replica.note_replicated(2, Replicated(0, 2, NOTHING), 1.0) == [], "the copy is under way"
    assert acknowledged(replica.push(WORKER, push(2, term=2), 1.0)) == []
    assert replica.backup_state(2.0) == "joining"
    assert acknowledged(replica.note_replicated(2, Replicated(0, 2, 2), 2.0)) == [(WORKER, 0), (WORKER, 1)]
    assert replica.backup_state(2.0) == "in sync"
    assert acknowledged(replica.note_replicated(2, Replicated(0, 2, 3), 2.0)) == [(WORKER, 2)]


def test_a_held_push_is_answered_when_others_have_pushed_or_are_given_up() -> None:
    replica = primary_with(Bounded(0))
    for worker in (100, 101):
        assert isinstance(replica.pull(worker, Pull(0, 1, 1, worker), 0.0)[0], Send)
    assert replica.push(100, push(100), 0.0) == []
    assert sorted(acknowledged(replica.push(101, push(101), 0.0))) == [(100, 100), (101, 101)]
    assert (replica.index, replica.version) == (2, 1), "two updates, one step"
    for worker in (100, 101):
        replica.pull(worker, Pull(0, 1, 1, worker + 2), 0.0)
    assert replica.push(100, push(102, version=1), 0.0) == []
    replica.renew(100.0, 0.0)
    assert acknowledged(replica.tick(TIMING.reading_s + 1)) == [(100, 102)]


def test_the_updates_of_a_step_reach_the_backup_in_one_message() -> None:
    replica = primary_in_sync()
    replica.policy = Rennala(2)
    replica.know([100, 101, 102], 0.0)
    for worker in (100, 101, 102):
        replica.pull(worker, Pull(0, 1, 1, worker), 0.0)
    assert replica.push(100, push(100), 0.0) == [], "no entry, no answer"
    assert replica.push(100, push(100), 0.0) == [], "not even again"
    assert (replica.index, len(replica.group)) == (0, 1)
    first, second, sent = replica.push(101, push(101), 0.0)
    entries = (Entry(1, 1, 100, Apply(step=False), None), Entry(2, 1, 101, Apply(0.5), None))
    assert (first, second) == (Execute(0, entries[0]), Execute(0, entries[1]))
    assert sent == Send(2, Replicate(0, 1, entries))
    assert replica.version == 1
    assert sorted(acknowledged(replica.note_replicated(2, Replicated(0, 1, 2), 0.0))) == [(100, 100), (101, 101)]
    backup = Replica(me=2, shard=0, policy=Plain(), timing=TIMING)
    backup.adopt(View(0, 1, 1, 1, 2, 0), 0.0)
    backup.take_state(1, State(0, 1, 1, 0, 0, Chunks()))
    assert [type(action) for action in backup.replicate(1, Replicate(0, 1, entries))] == [Execute, Execute, Send]
    assert [type(action) for action in backup.replicate(1, Replicate(0, 1, entries))] == [Send], "once only"
    assert (backup.index, backup.version) == (2, 1)


def test_a_step_is_taken_with_fewer_updates_when_nobody_will_bring_more() -> None:
    replica = primary_with(Rennala(4))
    replica.know([100, 101], 0.0)
    for worker in (100, 101):
        replica.pull(worker, Pull(0, 1, 1, worker), 0.0)
    assert replica.push(100, push(100), 0.0) == []
    assert sorted(acknowledged(replica.push(101, push(101), 0.0))) == [(100, 100), (101, 101)], "both wait for us"
    assert replica.version == 1
    replica.pull(100, Pull(0, 1, 1, 102), 0.0)
    assert replica.push(100, push(102, version=1), 0.0) == [], "the other one may come"
    assert acknowledged(replica.tick(0.1)) == [(100, 102)], "it does not compute"


def test_nobody_waits_for_a_worker_that_has_ended() -> None:
    replica = primary_with(Bounded(0))
    replica.know([100, 101], 0.0)
    for worker in (100, 101):
        replica.pull(worker, Pull(0, 1, 1, worker), 0.0)
    assert replica.push(100, push(100), 0.0) == []
    assert acknowledged(replica.know([100], 0.0)) == [(100, 100)]


def test_a_chunk_that_is_left_out_is_not_judged() -> None:
    replica = primary_with(Rennala(4))
    actions = replica.push(WORKER, replace(push(0), bad=True), 0.0)
    assert actions == [Execute(0, Entry(1, 1, 0, None, None)), Send(WORKER, Pushed(0, 1, 1, 0))]


def test_what_is_dropped_has_an_entry_and_an_answer() -> None:
    class Never:
        def judge(self, staleness: int, moment: object) -> Drop:
            return Drop()

    replica = primary_with(Never())
    actions = replica.push(WORKER, push(0), 0.0)
    assert actions == [Execute(0, Entry(1, 1, 0, None, None)), Send(WORKER, Pushed(0, 1, 1, 0))]
    assert replica.version == 0


def test_a_checkpoint_is_written_of_exactly_the_chunks_that_are_asked_for() -> None:
    replica = primary_with(Plain())
    replica.push(WORKER, push(0), 0.0)
    assert replica.snapshot(Snapshot(0, 1, 1, 1, Chunks(2))) == []
    assert replica.snapshot(Snapshot(0, 1, 0, 1, Chunks(1))) == []
    assert replica.snapshot(Snapshot(0, 1, 1, 1, Chunks(1))) == [Save(1, State(0, 1, 1, 1, 1, Chunks(1)))]


def test_a_new_epoch_begins_with_the_checkpoint_and_not_with_what_is_in_memory() -> None:
    replica = primary_with(Plain())
    replica.push(WORKER, push(0), 0.0)
    assert replica.adopt(View(0, 2, 2, 1, None, 7), 0.0) == [Discard(0), Load(0, 2, 7)]
    assert replica.push(WORKER, push(1, term=2, epoch=2), 0.0) == [], "it has nothing yet"
    assert replica.loaded(1, EMPTY, 0.0) == [], "that was for the epoch before"
    replica.loaded(2, EMPTY, 0.0)
    assert len(replica.applied) == 0
    (read,) = replica.pull(WORKER, Pull(0, 2, 2, 0), 0.0)
    assert read == Send(WORKER, Pulled(0, 2, 0, 0))
