"""Writes who does what into the arena: repairs after a death, and plans for those who are there.

What a good placement is, ``core/placement.py`` decides; this is the only code that writes owners.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from manyhands.comm.arena import MOST_WORKERS, Arena
from manyhands.comm.control import BANKS
from manyhands.core import placement
from manyhands.core.membership import Membership
from manyhands.engine.local import cores

__all__ = ["Plans"]

_NOBODY = -1
_FORGET = 0.97  # the time of a seat that has no lanes, and so is not measured, shrinks by this at every look
_USUAL_LANE_NS = 1e6  # before anything is measured; only ratios count


@dataclass(slots=True)
class Plans:
    """The plans of one arena. Used by one thread, the supervisor's."""

    arena: Arena
    membership: Membership
    servers: Membership | None = None
    """Where there are servers, they hold the units, and the first of them leads."""
    cores: int = field(default_factory=cores)

    def _lanes_of_seats(self) -> list[int]:
        """Where workers bring updates on their own, each seat has its own lane, or two."""
        active = set(self.membership.active)
        seats = [lane % MOST_WORKERS for lane in range(self.arena.spec.lanes)]
        return [seat if seat in active else _NOBODY for seat in seats]

    def _holders(self) -> dict[int, float]:
        """Who may hold units, with their speeds."""
        return self.speeds() if self.servers is None else dict.fromkeys(self.servers.active, 1.0)

    def speeds(self) -> dict[int, float]:
        """Lanes per second of the active seats; a seat without a measurement counts as average."""
        times = {slot: self.arena.control.slot_value(slot, "lane_ns") for slot in self.membership.active}
        known = [t for t in times.values() if t > 0]
        usual = sum(known) / len(known) if known else _USUAL_LANE_NS
        return {slot: 1e9 / (t if t > 0 else usual) for slot, t in times.items()}

    def working_speeds(self, plan: int) -> dict[int, float]:
        """The speeds of those that should have work, by what is known of those that have it under ``plan``."""
        control, active = self.arena.control, self.membership.active
        demands = {slot: control.slot_value(slot, "demand") / 1000 for slot in active}
        chosen = placement.busy(active, set(control.lane_owner(plan).tolist()), demands, self.cores)
        return {slot: speed for slot, speed in self.speeds().items() if slot in chosen}

    def repair(self) -> None:
        """Give every lane and unit whose owner is gone to somebody who lives, in every plan that may be in use.

        Where nobody lives they become nobody's: a successor that is still starting must find nothing to do before
        the supervisor knows of it, or two processes would do the same work.
        """
        speeds, holders, control = self.speeds(), self._holders(), self.arena.control
        living = {slot for slot, status in self.membership.status.items() if status != "starting"}
        if self.servers is not None:
            living |= {slot for slot, status in self.servers.status.items() if status != "starting"}
        changed = False
        # All of them: the leader may just be committing one that is no longer the newest.
        for plan in range(control.committed[1], control.proposed + 1):
            for owners, able in ((control.lane_owner(plan), speeds), (control.unit_owner(plan), holders)):
                for dead in set(owners.tolist()) - living:
                    changed = True
                    if not able or (self.arena.spec.exchange and able is speeds):
                        owners[owners == dead] = _NOBODY
                        continue
                    for item, heir in placement.heirs(owners.tolist(), dead, able).items():
                        owners[item] = heir
            if control.leader(plan) not in living:
                changed = True
                control.set_leader(plan, min(holders, default=_NOBODY))
        if changed:
            control.repairs += 1
            control.wake_everybody()

    def propose(self, lanes: list[int] | None = None, *, first: bool = False) -> list[int] | None:
        """Write a plan for the active seats; the leader adopts it with its next commit.

        Returns the owners of the lanes; None when there is nobody, or no bank is free until a plan is adopted. Before
        the ``first`` plan is in force nobody reads any: those that were proposed while workers came in may go.
        """
        control = self.arena.control
        speeds = self.working_speeds(control.proposed)
        holders = speeds if self.servers is None else self._holders()
        full = control.proposed + 2 - control.committed[1] >= BANKS and not first
        if not speeds or not holders or full:
            return None
        if self.arena.spec.exchange:
            lanes = self._lanes_of_seats()
        current = control.lane_owner(control.proposed).tolist()
        lanes = lanes or placement.place_lanes(len(current), speeds, current)
        sizes = [unit.stop - unit.start for unit in self.arena.spec.units]
        units = np.array(placement.place_units(sizes, holders), np.int64)
        control.write_plan(control.proposed + 1, min(holders), lanes, units)
        control.proposed += 1
        return lanes

    def better(self) -> list[int] | None:
        """Owners that would finish a step markedly earlier by the measured speeds, if there are."""
        control, active = self.arena.control, self.membership.active
        plan = control.committed[1]
        owners = control.lane_owner(plan).tolist()
        measured = all(control.slot_value(slot, "lane_ns") for slot in set(owners) & set(active))
        if (
            self.arena.spec.exchange
            or len(active) < 2
            or plan != control.proposed
            or not measured
            or not set(owners) <= set(active)
        ):
            return None
        speeds = self.working_speeds(plan)
        for slot in speeds.keys() - set(owners):  # or a worker that was slow once would stay idle for ever
            control.set_slot_value(slot, "lane_ns", int(control.slot_value(slot, "lane_ns") * _FORGET))
        if not set(owners) <= speeds.keys():
            return placement.place_lanes(len(owners), speeds, owners)
        return placement.rebalance(owners, speeds)

    def owners(self, plan: int) -> set[int]:
        """Every seat that ``plan`` names."""
        control = self.arena.control
        return {*control.lane_owner(plan).tolist(), *control.unit_owner(plan).tolist(), control.leader(plan)}
