"""Placement against brute force and against what it must never do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.placement import FINE, busy, finish_time, heirs, place_lanes, place_rows, place_units, rebalance

speeds_of_slots = st.dictionaries(st.integers(0, 20), st.floats(0.1, 100.0), min_size=1, max_size=6)
few_speeds = st.dictionaries(st.integers(0, 5), st.floats(0.1, 10.0), min_size=1, max_size=3)
lane_counts = st.integers(0, 40)


def best_finish_time(lanes: int, speeds: Mapping[int, float]) -> float:
    every = itertools.product(speeds, repeat=lanes)
    return min((finish_time(owners, speeds) for owners in every), default=0.0)


@given(st.integers(0, 6), few_speeds)
def test_no_placement_finishes_earlier(lanes: int, speeds: dict[int, float]) -> None:
    owners = place_lanes(lanes, speeds)
    assert finish_time(owners, speeds) == pytest.approx(best_finish_time(lanes, speeds))


@given(speeds_of_slots)
def test_with_fine_lanes_nobody_waits_long(speeds: dict[int, float]) -> None:
    lanes = FINE * len(speeds)
    assert finish_time(place_lanes(lanes, speeds), speeds) <= 1.25 * lanes / sum(speeds.values())


@given(lane_counts, speeds_of_slots)
def test_every_lane_has_one_living_owner(lanes: int, speeds: dict[int, float]) -> None:
    owners = place_lanes(lanes, speeds)
    assert len(owners) == lanes
    assert set(owners) <= speeds.keys()


@given(lane_counts, st.integers(1, 6))
def test_equal_speeds_give_equal_shares(lanes: int, slots: int) -> None:
    counts = Counter(place_lanes(lanes, dict.fromkeys(range(slots), 2.5)))
    assert max(counts.values(), default=0) - min(counts[slot] for slot in range(slots)) <= 1


@given(lane_counts, speeds_of_slots, st.data())
def test_a_lane_moves_only_when_its_owner_must_give_it_up(
    lanes: int, speeds: dict[int, float], data: st.DataObject
) -> None:
    current = data.draw(st.lists(st.integers(-1, 20), min_size=lanes, max_size=lanes))
    fresh, kept = Counter(place_lanes(lanes, speeds)), place_lanes(lanes, speeds, current)
    assert Counter(kept) == fresh, "what lanes were before must not change the shares"
    for slot in speeds:
        stays = sum(1 for old, new in zip(current, kept, strict=True) if old == new == slot)
        assert stays == min(current.count(slot), fresh[slot])


def test_lanes_cannot_be_placed_on_nobody() -> None:
    with pytest.raises(ValueError, match="no slots"):
        place_lanes(4, {})


@given(speeds_of_slots, st.floats(0.0, 0.5), st.data())
def test_rebalance_moves_only_for_a_gain(speeds: dict[int, float], gain: float, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.sampled_from(sorted(speeds)), min_size=1, max_size=24))
    better = rebalance(owners, speeds, gain)
    reachable = finish_time(place_lanes(len(owners), speeds), speeds)
    if better is None:
        assert reachable >= (1 - gain) * finish_time(owners, speeds)
    else:
        assert finish_time(better, speeds) < (1 - gain) * finish_time(owners, speeds)
        assert rebalance(better, speeds, gain) is None, "lanes would move to and fro"


@given(speeds_of_slots, st.data())
def test_heirs_take_all_of_the_dead_and_nothing_of_the_living(speeds: dict[int, float], data: st.DataObject) -> None:
    dead = data.draw(st.integers(-1, 30).filter(lambda slot: slot not in speeds))
    owners = data.draw(st.lists(st.sampled_from([dead, 99, *speeds]), max_size=24))
    taken = heirs(owners, dead, speeds)
    assert taken.keys() == {item for item, owner in enumerate(owners) if owner == dead}
    assert set(taken.values()) <= speeds.keys()


@given(few_speeds, st.data())
def test_heirs_finish_as_early_as_the_living_allow(speeds: dict[int, float], data: st.DataObject) -> None:
    dead = 9
    owners = data.draw(st.lists(st.sampled_from([dead, *speeds]), max_size=6))
    taken = heirs(owners, dead, speeds)
    after = [taken.get(item, owner) for item, owner in enumerate(owners)]
    orphans = [item for item, owner in enumerate(owners) if owner == dead]
    best = min(
        finish_time([dict(zip(orphans, choice, strict=True)).get(i, o) for i, o in enumerate(owners)], speeds)
        for choice in itertools.product(speeds, repeat=len(orphans))
    )
    assert finish_time(after, speeds) == pytest.approx(best)


@given(st.lists(st.integers(1, 1000), max_size=60), speeds_of_slots)
def test_units_lie_in_runs_whose_bytes_follow_the_speeds(sizes: list[int], speeds: dict[int, float]) -> None:
    owners = place_units(sizes, speeds)
    assert len(owners) == len(sizes)
    assert owners == sorted(owners), "the units of a slot are not one run"
    assert set(owners) <= speeds.keys()
    for slot, speed in speeds.items():
        due = sum(sizes) * speed / sum(speeds.values())
        held = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == slot)
        assert abs(held - due) <= max(sizes, default=0) + 1e-6 * sum(sizes)


slots = st.sets(st.integers(0, 20), min_size=1, max_size=8)


@given(slots, slots, st.dictionaries(st.integers(0, 20), st.floats(0.001, 4.0)), st.integers(1, 16))
def test_somebody_is_always_busy_and_nobody_else_than_the_living(
    active: set[int], owners: set[int], demands: dict[int, float], cores: int
) -> None:
    chosen = busy(active, owners, demands, cores)
    assert chosen
    assert set(chosen) <= active
    assert len(chosen) >= min(len(active), cores) or max(demands.get(slot, 0.0) for slot in owners & active) > 1


@pytest.mark.parametrize(
    "demand, count", [(1.0, 2), (0.85, 2), (0.66, 3), (0.5, 4), (0.01, 6), (2.0, 1)], ids=lambda value: str(value)
)
def test_as_many_are_busy_as_two_cores_can_feed(demand: float, count: int) -> None:
    everybody = range(6)
    assert busy(everybody, {0, 1, 2, 3}, dict.fromkeys(everybody, demand), 2) == list(range(count))


def test_those_who_work_go_on_working() -> None:
    assert busy([0, 1, 2, 3], {2, 3}, {2: 1.0, 3: 1.0}, 2) == [2, 3]


def test_nobody_stands_by_before_those_who_work_are_measured() -> None:
    assert busy([0, 1, 2, 3], {0, 1, 2, 3}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0}, 2) == [0, 1, 2, 3]
    assert busy([0, 1, 2, 3], set(), {}, 2) == [0, 1, 2, 3]


def test_there_is_a_core_for_everybody() -> None:
    assert busy([4, 2], {2, 4}, {2: 1.0, 4: 1.0}, 2) == [2, 4]


BATCHES = {  # distinct row numbers of a batch
    "in a row": np.arange(4000),
    "all even": np.arange(0, 8000, 2),
    "multiples of 4096": np.arange(2000) * 4096,
    "large": 2**40 + np.arange(0, 40_000, 10),
    "skewed": np.unique(np.random.default_rng(0).zipf(1.2, 20_000) % 10_000_000),
}


@pytest.mark.parametrize("servers", [1, 2, 3, 16])
@pytest.mark.parametrize("name", BATCHES)
def test_no_server_has_much_more_rows_than_another(name: str, servers: int) -> None:
    ids = BATCHES[name]
    owners = place_rows(ids, servers)
    counts = np.bincount(owners, minlength=servers)
    assert len(counts) == servers
    fair = len(ids) / servers
    assert counts.max() <= fair + 4 * np.sqrt(fair)  # as even as by chance, or better
    assert (owners == place_rows(ids.copy(), servers)).all()
