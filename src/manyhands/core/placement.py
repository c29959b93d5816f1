"""Who computes which lane, who applies which unit. Pure: speeds in, owners out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

__all__ = ["FINE", "busy", "finish_time", "heirs", "place_lanes", "place_rows", "place_units", "rebalance"]

FINE = 4
"""Lanes per worker with which a step takes at most a quarter longer than were work cut without end, for any speeds."""
_SCATTER = np.uint64(0x9E3779B97F4A7C15)  # odd, and without a pattern: neighbours land far from each other


def _shares(lanes: int, speeds: Mapping[int, float]) -> dict[int, int]:
    """How many lanes each slot gets, so that the slowest finishes as early as whole lanes allow."""
    counts = dict.fromkeys(sorted(speeds), 0)
    for _ in range(lanes):
        slot = min(counts, key=lambda s: ((counts[s] + 1) / speeds[s], counts[s], s))
        counts[slot] += 1
    return counts


def place_lanes(lanes: int, speeds: Mapping[int, float], current: Sequence[int] = ()) -> list[int]:
    """The owner of each lane, shares by speed; a lane stays with its ``current`` owner where the share allows.

    Speeds are lanes per second; every slot in ``speeds`` is alive. The result is indexed by lane.
    """
    if not speeds:
        raise ValueError("lanes cannot be placed on no slots")
    room = _shares(lanes, speeds)
    owners = [-1] * lanes
    for lane, owner in enumerate(current):
        if room.get(owner, 0) > 0:
            owners[lane] = owner
            room[owner] -= 1
    free = [slot for slot, count in room.items() for _ in range(count)]
    for lane in range(lanes):
        if owners[lane] < 0:
            owners[lane] = free.pop(0)
    return owners


def busy(active: Collection[int], owners: Collection[int], demands: Mapping[int, float], cores: int) -> list[int]:
    """The slots that get work: as many as the cores can feed. The others stand by.

    ``demands``: how many cores a slot keeps busy while it works. Nobody is held back before those who work
    (``owners``) are measured, or because of work that mostly sleeps.
    """
    working = [slot for slot in active if slot in owners]
    if len(active) <= cores or not working or not all(demands.get(slot) for slot in working):
        return sorted(active)
    demand = sum(demands[slot] for slot in working) / len(working)
    count = max(round(cores / demand), 1)
    return sorted(sorted(active, key=lambda slot: (slot not in owners, slot))[:count])


def finish_time(owners: Sequence[int], speeds: Mapping[int, float]) -> float:
    """When the last lane of a step is done."""
    return max((count / speeds[slot] for slot, count in Counter(owners).items()), default=0.0)


def rebalance(owners: Sequence[int], speeds: Mapping[int, float], gain: float = 0.1) -> list[int] | None:
    """Better owners for the measured speeds, or None when the gain is not worth a change.

    The threshold is what keeps noise in the measurement from moving lanes to and fro.
    """
    better = place_lanes(len(owners), speeds, owners)
    if finish_time(better, speeds) < (1 - gain) * finish_time(owners, speeds):
        return better
    return None


def heirs(owners: Sequence[int], dead: int, speeds: Mapping[int, float]) -> dict[int, int]:
    """Who takes which item of a dead slot: {item: slot}. Nothing moves between the living, so the change is safe
    in the middle of a step. Items go to whoever finishes earliest with them."""
    load = {slot: sum(1 for owner in owners if owner == slot) for slot in speeds}
    taken = {}
    for item, owner in enumerate(owners):
        if owner == dead:
            slot = min(load, key=lambda s: ((load[s] + 1) / speeds[s], s))
            load[slot] += 1
            taken[item] = slot
    return taken


def place_units(sizes: Sequence[int], speeds: Mapping[int, float]) -> list[int]:
    """The owner of each unit: contiguous runs whose bytes are in proportion to the speeds."""
    slots = sorted(speeds)
    whole, strength = sum(sizes), sum(speeds.values())
    owners, index, done, bound = [], 0, 0, 0.0
    bound = whole * speeds[slots[0]] / strength if sizes else 0.0
    for size in sizes:
        while index < len(slots) - 1 and done + size / 2 > bound:
            index += 1
            bound += whole * speeds[slots[index]] / strength
        owners.append(slots[index])
        done += size
    return owners


def place_rows(ids: np.ndarray, servers: int) -> np.ndarray:
    """The server of each row of a table, by a hash of its number (int64).

    Not by ranges: numbers are often given out by frequency, and the range with the frequent ones would have most of the
    work. Not by the remainder alone: numbers may have a pattern, such as being all even.
    """
    half = np.uint64(32)  # the upper bits of the product are the ones that every bit of the number has a say in
    owners: np.ndarray = ((ids.astype(np.uint64) * _SCATTER >> half) * np.uint64(servers) >> half).astype(np.int64)
    return owners
