"""Looks for workers that are late with their shares, where the user has set a quorum."""

from __future__ import annotations

from collections.abc import Collection

from manyhands.comm.arena import Arena
from manyhands.core.lateness import Lateness

__all__ = ["late_workers"]


def late_workers(arena: Arena, active: Collection[int], lateness: Lateness, now: float) -> list[int]:
    """Those of the ``active`` slots that are late in the round in progress, if there is one."""
    control = arena.control
    steps, plan = control.committed
    done, owners = control.lane_done == steps + 1, control.lane_owner(plan)
    at_work, finished = dict[int, int](), dict[int, float]()
    for slot in active:
        missing = [lane for lane, owner in enumerate(owners.tolist()) if owner == slot and not done[lane]]
        lane, seconds = control.slot_value(slot, "lane"), control.slot_value(slot, "lane_ns") / 1e9
        if lane in missing:
            at_work[slot] = lane
        elif not missing and seconds:
            finished[slot] = seconds
    return lateness.late(steps, float(done.mean()), at_work, finished, now)
