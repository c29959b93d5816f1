"""Membership under any sequence of events: seats are filled, work never lies with the dead, and hope has an end."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from manyhands.core.membership import Action, GiveUp, Membership, Propose, Release, Repair, Spawn
from manyhands.core.placement import heirs, place_lanes

LANES, SLOTS = 6, 8


class Run(RuleBasedStateMachine):
    """A run without processes: it does what the supervisor does with the actions, one event at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Membership(target=2, slots=SLOTS, deaths_per_step=3)
        self.processes: set[int] = set()  # seats that have a process
        self.told_to_leave: set[int] = set()
        self.owners = [-1] * LANES
        self.proposed: list[int] | None = None
        self.step = 0
        self.now, self.pace_s, self.kills = 0.0, 1.0, True
        self.given_up = False
        self.do(self.members.start())

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(slot):
                    assert slot not in self.processes, "two processes in one seat"
                    assert 0 <= slot < SLOTS
                    self.processes.add(slot)
                case Release(slot):
                    assert slot in self.processes
                    self.told_to_leave.add(slot)
                case Repair():
                    self.owners = self.repaired(self.owners)
                    self.proposed = None if self.proposed is None else self.repaired(self.proposed)
                case Propose():
                    self.propose()
                case GiveUp():
                    self.given_up = True

    def living(self) -> set[int]:
        return {slot for slot, status in self.members.status.items() if status != "starting"}

    def repaired(self, owners: list[int]) -> list[int]:
        speeds = dict.fromkeys(self.members.active, 1.0)
        for dead in set(owners) - self.living():
            if not speeds:
                owners = [-1 if owner == dead else owner for owner in owners]
            else:
                taken = heirs(owners, dead, speeds)
                owners = [taken.get(lane, owner) for lane, owner in enumerate(owners)]
        return owners

    def propose(self) -> None:
        if self.members.active:
            self.proposed = place_lanes(LANES, dict.fromkeys(self.members.active, 1.0), self.owners)

    def end(self, slot: int) -> None:
        self.processes.discard(slot)
        self.told_to_leave.discard(slot)
        self.now += self.pace_s
        self.do(self.members.died(slot, self.step, "killed", self.now, killed=self.kills))

    # -- what may happen ------------------------------------------------------------------------------------
    @precondition(lambda self: not self.given_up)
    @rule(data=st.data())
    def a_process_is_ready(self, data: st.DataObject) -> None:
        if self.processes:
            self.do(self.members.ready(data.draw(st.sampled_from(sorted(self.processes)))))

    @precondition(lambda self: not self.given_up)
    @rule(data=st.data())
    def a_process_dies(self, data: st.DataObject) -> None:
        if self.processes:
            self.end(data.draw(st.sampled_from(sorted(self.processes))))

    @precondition(lambda self: not self.given_up and self.told_to_leave)
    @rule()
    def one_that_was_told_to_leaves(self) -> None:
        self.end(min(self.told_to_leave))

    @precondition(lambda self: not self.given_up)
    @rule(workers=st.integers(1, SLOTS - 2))
    def the_user_resizes(self, workers: int) -> None:
        self.do(self.members.resize(workers))

    @precondition(lambda self: not self.given_up and -1 not in self.owners)
    @rule()
    def a_step_is_committed(self) -> None:
        assert set(self.owners) <= self.living()
        self.step += 1
        if self.proposed is not None:
            self.owners, self.proposed = self.proposed, None
            self.do(self.members.adopted(set(self.owners)))

    @rule(pace_s=st.sampled_from([0.0, 0.1, 5.0]), kills=st.booleans())
    def deaths_come_otherwise(self, pace_s: float, kills: bool) -> None:
        self.pace_s, self.kills = pace_s, kills

    @precondition(lambda self: self.given_up)
    @rule()
    def it_is_over(self) -> None:
        """Nothing happens any more."""

    # -- what must hold -------------------------------------------------------------------------------------
    @invariant()
    def lanes_belong_to_the_living_if_there_are_any(self) -> None:
        if self.given_up:
            return
        assert set(self.owners) - {-1} <= self.living(), "a lane lies with somebody who cannot compute it"
        if self.members.active and self.step > 0:
            assert -1 not in self.owners

    @invariant()
    def seats_and_processes_are_the_same(self) -> None:
        if not self.given_up:
            assert set(self.members.seated) == self.processes

    @invariant()
    def enough_seats_are_wanted(self) -> None:
        if not self.given_up:
            staying = [slot for slot, status in self.members.status.items() if status != "leaving"]
            assert len(staying) <= self.members.target
            assert len(staying) == self.members.target or len(self.members.seated) == SLOTS

    def teardown(self) -> None:
        """Left alone, the run settles: as many active workers as wanted, all lanes with them, nobody else there."""
        for _ in range(3 * SLOTS):
            if self.given_up:
                return
            for slot in sorted(self.processes):
                self.do(self.members.ready(slot))
            if -1 not in self.owners:
                self.a_step_is_committed()
            elif self.proposed is not None:
                self.owners = self.proposed
            self.propose()
            for slot in sorted(self.told_to_leave):
                self.end(slot)
        assert len(self.members.active) == len(self.processes) == self.members.target
        assert set(self.owners) <= set(self.members.active)


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def ready_members(target: int) -> Membership:
    members = Membership(target=target, slots=SLOTS)
    members.start()
    for slot in range(target):
        members.ready(slot)
    return members


def deaths(members: Membership, count: int, pace_s: float, *, killed: bool, step: int = 5) -> list[GiveUp]:
    """So many workers die at one step, one after another; what the run gives up with, if it does."""
    for number in range(count):
        for action in members.died(0, step, "died of it", number * pace_s, killed=killed):
            if isinstance(action, GiveUp):
                return [action]
        members.ready(0)
    return []


@given(target=st.integers(1, 6), pace_s=st.floats(0.0, 60.0))
def test_it_gives_up_after_enough_faults_in_one_step(target: int, pace_s: float) -> None:
    assert deaths(ready_members(target), 3 * target - 1, pace_s, killed=False) == []
    (action,) = deaths(ready_members(target), 3 * target, pace_s, killed=False)
    assert f"{3 * target} worker processes died in step 5" in action.why and "died of it" in action.why


@given(target=st.integers(1, 6), count=st.integers(1, 500))
def test_a_storm_of_kills_is_no_reason_to_give_up(target: int, count: int) -> None:
    assert deaths(ready_members(target), count, 9.99 / count, killed=True) == []


@given(target=st.integers(1, 6), pace_s=st.floats(0.01, 5.0))
def test_kills_without_end_are(target: int, pace_s: float) -> None:
    """As by a system that is out of memory: it ends with the first death after ten seconds, or the last of enough."""
    enough = max(3 * target, math.ceil(10.0 / pace_s) + 2)
    (action,) = deaths(ready_members(target), enough, pace_s, killed=True)
    took_s = float(action.why.partition("within ")[2].partition(" s")[0])
    assert took_s <= max(10.0 + pace_s, 3 * target * pace_s) + 0.1


@given(target=st.integers(1, 6), faults=st.integers(0, 30), kills=st.integers(0, 200))
def test_kills_do_not_make_faults_worse(target: int, faults: int, kills: int) -> None:
    members = ready_members(target)
    assert deaths(members, kills, 9.99 / max(kills, 1), killed=True) == []
    assert bool(deaths(members, faults, 0.0, killed=False)) == (faults >= 3 * target)


@given(steps=st.lists(st.booleans(), max_size=200), pace_s=st.floats(0.0, 60.0))
def test_it_does_not_give_up_while_steps_get_done(steps: list[bool], pace_s: float) -> None:
    members = ready_members(1)
    for step, killed in enumerate(steps):
        actions = members.died(0, step, "died of it", step * pace_s, killed=killed)
        assert [type(action) for action in actions] == [Repair, Spawn]
        members.ready(0)


def test_one_that_leaves_is_no_reason_either() -> None:
    members = ready_members(1)
    assert deaths(members, 50, 0.1, killed=True) == []
    members.resize(2)
    members.ready(1)
    members.resize(1)
    assert members.died(1, 5, "left", 60.0, killed=False) == [Repair(1)]


def test_a_successor_sits_where_the_dead_one_sat() -> None:
    members = ready_members(3)
    assert Spawn(1) in members.died(1, 0, "killed", 0.0, killed=True)
    assert members.status == {0: "active", 1: "starting", 2: "active"}


def test_one_that_leaves_keeps_its_seat_until_no_plan_names_it() -> None:
    members = ready_members(3)
    assert members.resize(1) == [Propose()]
    assert members.active == [0]
    assert members.adopted({0, 2}) == [Release(1)]
    assert members.adopted({0}) == [Release(1), Release(2)]
    assert members.died(1, 0, "left", 0.0, killed=False) == [Repair(1)]
    assert members.seated == [0, 2]


def test_one_that_was_told_to_go_before_it_listened_is_told_again() -> None:
    members = ready_members(1)
    assert members.resize(2) == [Spawn(1)]
    assert members.resize(1) == [Release(1), Propose()]
    assert members.ready(1) == [Release(1)]
    assert members.active == [0]
