"""Plans in a real arena: owners are the living, and work of the dead is nobody's until somebody is ready."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manyhands.comm.arena import Arena, ArenaSpec, Entry, Unit
from manyhands.comm.control import BANKS
from manyhands.core.membership import Membership
from manyhands.train.plans import Plans

LANES = 6


@pytest.fixture
def plans() -> Iterator[Plans]:
    """Three active workers, a plan in force."""
    units = [Unit(0, 64 * index, 64 * index + 64) for index in range(9)]
    parameters = [Entry("weight", (144,), "float32", 0)]
    arena = Arena(ArenaSpec(parameters=parameters, fixed=[], buffers=[], units=units, lanes=LANES, slots=8))
    members = Membership(target=3, slots=8)
    members.start()
    for slot in range(3):
        members.ready(slot)
    plans = Plans(arena, members)
    plans.propose()
    arena.control.commit(0, 1)
    yield plans
    del plans
    arena.close()


def owners(plans: Plans, plan: int) -> list[int]:
    control = plans.arena.control
    return [*control.lane_owner(plan).tolist(), *control.unit_owner(plan).tolist()]


def test_work_is_shared_among_the_active(plans: Plans) -> None:
    assert sorted(plans.arena.control.lane_owner(1).tolist()) == [0, 0, 1, 1, 2, 2]
    assert plans.arena.control.unit_owner(1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert plans.owners(1) == {0, 1, 2}
    assert plans.arena.control.leader(1) == 0


def test_repair_moves_the_work_of_the_dead_alone(plans: Plans) -> None:
    before, repairs = owners(plans, 1), plans.arena.control.repairs
    plans.membership.died(0, 0, "killed", 0.0, killed=True)
    plans.repair()
    after = owners(plans, 1)
    assert plans.arena.control.repairs == repairs + 1
    assert set(after) == {1, 2}
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 0)
    assert plans.arena.control.leader(1) == 1
    plans.repair()
    assert plans.arena.control.repairs == repairs + 1, "there was nothing left to repair"


def test_a_plan_that_is_not_yet_adopted_is_repaired_as_well(plans: Plans) -> None:
    for _ in range(2):
        plans.propose()
    plans.membership.died(2, 0, "killed", 0.0, killed=True)
    plans.repair()
    for plan in (1, 2, 3):
        assert 2 not in owners(plans, plan)


def test_nobody_owns_anything_until_a_successor_is_known_to_be_ready(plans: Plans) -> None:
    for slot in (2, 1, 0):
        plans.membership.died(slot, 0, "killed", 0.0, killed=True)
        plans.repair()
    assert set(owners(plans, 1)) == {-1}
    assert plans.arena.control.leader(1) == -1
    assert plans.propose() is None
    plans.membership.ready(1)
    plans.repair()
    assert set(owners(plans, 1)) == {1}
    assert plans.arena.control.leader(1) == 1


def test_one_that_leaves_keeps_its_work_until_the_next_plan(plans: Plans) -> None:
    plans.membership.resize(1)
    plans.repair()
    assert plans.owners(1) == {0, 1, 2}
    assert plans.propose() == [0] * LANES
    assert plans.owners(2) == {0}


def test_a_bank_is_not_written_while_its_plan_may_be_in_use(plans: Plans) -> None:
    written = [plans.propose() for _ in range(2 * BANKS)]
    assert 2 <= written.index(None) < BANKS
    assert sorted(plans.arena.control.lane_owner(1).tolist()) == [0, 0, 1, 1, 2, 2]
    plans.arena.control.commit(1, plans.arena.control.proposed)
    assert plans.propose() is not None


def test_better_waits_until_everybody_is_measured(plans: Plans) -> None:
    control = plans.arena.control
    control.set_slot_value(0, "lane_ns", 4_000_000)
    control.set_slot_value(1, "lane_ns", 1_000_000)
    assert plans.better() is None
    control.set_slot_value(2, "lane_ns", 1_000_000)
    better = plans.better()
    assert better is not None
    assert better.count(0) == 0


def test_a_worker_without_lanes_gets_another_chance(plans: Plans) -> None:
    control = plans.arena.control
    for slot, time_ns in enumerate((4_000_000, 1_000_000, 1_000_000)):
        control.set_slot_value(slot, "lane_ns", time_ns)
    plans.propose(plans.better())
    control.commit(1, control.proposed)
    assert plans.arena.control.lane_owner(2).tolist().count(0) == 0
    chances = [plans.better() for _ in range(200)]
    assert chances[0] is None
    assert any(better is not None and 0 in better for better in chances)


def test_a_first_plan_is_made_however_many_were_proposed_meanwhile(plans: Plans) -> None:
    """Every worker that comes in is a reason for a plan; there are more of them than banks."""
    control = plans.arena.control
    control.commit(0, 0)
    while plans.propose() is not None:
        pass
    assert plans.propose(first=True) is not None
    assert sorted(set(control.lane_owner(control.proposed).tolist())) == [0, 1, 2]
