"""The synchronous step, as one worker lives it.

Nothing here remembers what was done: every decision is read off the stamps in the arena. A worker that joins in
the middle of a step, or inherits the work of a dead one, therefore runs the same code as everybody else:

    lanes of mine without a stamp?       compute them
    all lanes stamped?                   reduce and apply my units that have no stamp
    all units stamped, and I lead?       settle the buffers, commit
    otherwise                            wait for the bell

A death while units are changed is answered by an undo log (``sync/undo.py``), or, for a model that is not too large,
by going back to a copy of the state (``sync/kept.py``). The smallest models are applied whole (``sync/whole.py``).

A process may lose the processor between looking and acting. What it saw can only mislead it if the step was
committed meanwhile, for then the stamps may be those of the next step and the work somebody else's; so before it
acts it looks once more whether the step is still open. If it is, the step waits for that very work: nobody else
can do it, and the step cannot end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from manyhands.comm.arena import Arena
from manyhands.comm.control import SLOT_FIELDS
from manyhands.sync.apply import Applier, Mend
from manyhands.sync.buffers import settle_buffers
from manyhands.sync.demand import Demand
from manyhands.sync.kept import Kept
from manyhands.sync.loose import Loose
from manyhands.sync.pulse import AT, BEAT, LANE, Pulse, Stopped

__all__ = ["MARK", "Role", "Stepper"]

Role = Literal["both", "worker", "server"]

_WAIT_S = 0.1
MARK, _LANES_DONE, _LANE_NS = (SLOT_FIELDS.index(name) for name in ("undo_step", "lanes_done", "lane_ns"))
_SMOOTHING = 8  # a lane's time counts for an eighth of the smoothed time


class Stepper(Pulse):
    """Drives one worker through the steps of a run."""

    def __init__(
        self,
        arena: Arena,
        slot: int,
        applier: Applier | None,
        rows: Callable[[int], Sequence[int]],
        *,
        hyper: Callable[[int], np.ndarray] | None = None,
        skip_bad: bool = False,
        spin_s: float = 0.0,
        cores: int = 0,
        role: Role = "both",
        mend: Mend | None = None,
    ) -> None:
        """``rows(step)`` tells how many rows each lane has in a step, ``hyper(step)`` the optimizer's numbers.

        ``spin_s``: how long to wait awake, where there is a core for everybody who works. ``role``: where there are
        servers, they hold the units and workers the lanes. ``mend`` may change what the lanes add up to.
        """
        super().__init__(arena, slot)
        self._arena, self._control, self._slot, self._applier, self._rows = arena, arena.control, slot, applier, rows
        self._hyper = hyper or (lambda step: arena.hyper[step % arena.spec.ring])
        self._skip_bad = skip_bad
        self._wanted_spin_s, self._spin_s, self._cores = spin_s, 0.0, cores
        self._role, self.home, self._mend = role, None, mend
        self._bell = arena.control.counter if role == "server" else arena.control.bell
        self._demand = Demand(self._words)
        self._known: tuple[int, int] = (-1, -1)
        self._lane_start_ns = 0
        self.step = -1
        self.plan = -1
        self._my_lanes: list[int] = []
        self._my_units = np.empty(0, np.int64)
        self._runs: list[tuple[int, int]] = []
        self._alone, self._has_peers = True, False
        self._fence = threading.Lock()
        self._kept = Kept(arena) if arena.spec.keeps else None

    def _refresh(self) -> None:
        """Read which work is ours if the plan changed, or was repaired, since we last looked."""
        repairs = self._control.repairs
        if (self.plan, repairs) == self._known:
            return
        owners, unit_owners = self._control.lane_owner(self.plan), self._control.unit_owner(self.plan)
        self._my_lanes = np.flatnonzero(owners == self._slot).tolist()
        self._my_units = np.flatnonzero(unit_owners == self._slot)
        workers = len({*owners.tolist(), *unit_owners.tolist()})
        # Who does all the work is still not alone where another leads, as it may be after a death.
        self._alone = workers == 1 and self._my_lanes != [] and self._control.leader(self.plan) == self._slot
        self._spin_s = self._wanted_spin_s if 1 < workers <= self._cores else 0.0
        self._has_peers = self._role == "server" and len(set(unit_owners.tolist())) > 1  # they listen to another bell
        self._known = (self.plan, repairs)
        if self._applier is not None:
            self._applier.forget()
            self._runs = self._applier.batches(self._units_to_apply())

    def _units_to_apply(self) -> Sequence[int]:
        """The units that are ours to reduce and change."""
        units: list[int] = self._my_units.tolist()
        return units

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``, a repair, or an order to stop; or for a moment, then let the caller look again."""
        control = self._control
        self.enter("wait")
        repairs = control.repairs
        if self._spin_s:
            until = time.perf_counter() + self._spin_s
            while time.perf_counter() < until:
                if ready():
                    return
                os.sched_yield()
        count = self._bell.count
        if not ready() and control.repairs == repairs and not control.stop:
            self._bell.wait(count, _WAIT_S)
        if control.stop:
            raise Stopped

    def _ring_if_last(self, stamps: np.ndarray, stamp: int) -> None:
        """Wake the others if what they wait for is complete: waking them for every part of it costs more than the part.

        The lock orders our own stamps before the look at those of others, so that of two who finish at the same
        moment one sees both. Should a machine not keep that promise, whoever sleeps looks again by itself.
        """
        with self._fence:
            pass
        if not self._alone and (stamps == stamp).all():
            (self._control.bell if self._role == "both" else self._control.counter).ring()

    # -- the step -------------------------------------------------------------------------------------------
    def turn(self, end: int | None = None) -> Literal["step", "message", "over"]:
        """Wait for something to do: a step to take part in, or a message; "over" once ``end`` steps are committed.
        Raises Stopped at the end of the run."""
        control = self._control
        self.enter("idle")
        while True:
            count, spares = self._bell.count, control.spares.count
            if control.stop:
                raise Stopped
            if self._has_message():
                return "message"
            steps, self.plan = control.committed
            if end is not None and steps >= end:
                return "over"
            self._refresh()
            if control.committed != (steps, self.plan):
                continue
            # Whether the step is begun is decided once for all, by the leader with its commit. Were everybody to look
            # at the horizon, one that is lowered meanwhile would let some begin the step and others not.
            held = control.held == steps + 1
            spare = not (self._my_lanes or self._my_units.size or control.leader(self.plan) == self._slot)
            if not held and not spare:
                self.step = steps
                self._words[AT] = steps
                return "step"
            # Somebody without work is not to be woken by every commit.
            (control.spares if spare else self._bell).wait(spares if spare else count, _WAIT_S)
            self._words[BEAT] += 1

    def lanes(self) -> list[int]:
        """The lanes of ours that have no stamp in this step. Lanes without rows are stamped at once."""
        self._refresh()
        done, rows = self._control.lane_done, self._rows(self.step)
        missing = [lane for lane in self._my_lanes if done[lane] != self.step + 1]
        if self._control.steps != self.step:
            return []
        for lane in missing:
            if not rows[lane]:
                self._arena.carry_over(self.step, lane)
                done[lane] = self.step + 1
        return [lane for lane in missing if rows[lane]]

    def begin_lane(self, lane: int) -> None:
        """Data for the lane is about to be fetched."""
        self._words[LANE] = lane
        self._lane_start_ns = time.perf_counter_ns()
        self.enter("data")

    def report(self, batch: int, lane: int, stats: Sequence[float]) -> None:
        """The loss and the metrics of a lane's part of a batch."""
        self._arena.stats[batch % self._arena.spec.ring, lane] = stats

    @property
    def bank(self) -> int:
        """Which of the two banks a lane's memory is read from, as a step."""
        return self.step

    def limit(self) -> None:
        """It is the sum of the lanes that is clipped, when it is applied."""

    def end_lane(self, lane: int, *, bad: bool = False, loose: Loose | None = None) -> None:
        """The lane's buffers and numbers are in the arena, and so is its gradient unless it is ``loose``."""
        if bad:
            self._control.lane_bad[lane] = self.step + 1
        spent = time.perf_counter_ns() - self._lane_start_ns  # without the copy that the first lane may have to keep
        self._stamp_lane(lane, loose)
        self._words[LANE] = -1
        old = self._words[_LANE_NS]
        self._words[_LANE_NS] = spent if old == 0 else old + (spent - old) // _SMOOTHING
        self._words[_LANES_DONE] += 1
        self._demand.measure()

    def _stamp_lane(self, lane: int, loose: Loose | None) -> None:
        assert loose is None, "who shares a step out finds every gradient in the arena"
        if lane == 0 and self._kept is not None:
            self._kept.renew(self.step)  # as long as this lane has no stamp, nobody changes the state
        self._control.lane_done[lane] = self.step + 1

    @property
    def my_lanes(self) -> list[int]:
        """The lanes of ours, as last read from the plan."""
        return self._my_lanes

    def finish(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """Take the step to its commit. False when lanes of a dead worker came to us: compute them, call again.

        ``meanwhile`` is called once if there is time to spare, because others are still computing.
        """
        control, step, stamp = self._control, self.step, self.step + 1
        lane_done, unit_done = control.lane_done, control.unit_done
        self._ring_if_last(lane_done, stamp)
        while control.steps == step:
            self._refresh()
            if (lane_done == stamp).all():
                if self._work_on_units(stamp):
                    continue
                leads = control.leader(self.plan) == self._slot
                if leads and (unit_done == stamp).all():
                    if control.steps == step:  # else a leader committed it that is dead by now
                        self._commit(stamp)
                    break
                if leads:
                    self._wait(lambda: control.steps != step or bool((unit_done == stamp).all()))
                else:
                    self._wait(lambda: control.steps != step)
            elif self._my_lanes and (lane_done[self._my_lanes] != stamp).any() and self.lanes():
                return False
            elif meanwhile is not None:
                if self._applier is not None and self._runs and self._kept is None:
                    self._applier.save_ahead(self._runs[0], self.step)
                meanwhile()
                meanwhile = None
            else:
                self._wait(lambda: control.steps != step or bool((lane_done == stamp).all()))
        return True

    # -- shared out -----------------------------------------------------------------------------------------
    def _unstamped(self, stamps: np.ndarray, stamp: int) -> np.ndarray:
        """The units of ours without a stamp, as long as the step is open."""
        todo: np.ndarray = self._my_units[stamps[self._my_units] != stamp]
        return todo if self._control.steps == self.step else todo[:0]

    def _work_on_units(self, stamp: int) -> bool:
        """Do what can be done on our units now. True when something was done or waited for."""
        control, applier = self._control, self._applier
        if applier is None:
            return False
        if self._skip_bad and (control.lane_bad == stamp).any():
            todo = self._unstamped(control.unit_done, stamp)
            if self._kept is None:
                applier.drop_saved()
            control.unit_done[todo] = stamp
            self._ring_if_last(control.unit_done, stamp)
            return bool(todo.size)
        lanes = [lane for lane, rows in enumerate(self._rows(self.step)) if rows]
        norm = 0.0
        if applier.needs_norm:
            todo = self._unstamped(control.norm_done, stamp)
            if todo.size:
                self.enter("reduce")
                for run in applier.batches(todo.tolist()):
                    applier.norms(run, lanes)
                    control.norm_done[run[0] : run[1]] = stamp
                self._ring_if_last(control.norm_done, stamp)
            if not (control.norm_done == stamp).all():
                self._wait(lambda: control.steps != self.step or bool((control.norm_done == stamp).all()))
                return True
            norm = applier.total_norm()
        todo = self._unstamped(control.unit_done, stamp)
        if todo.size and self._begin_to_change(stamp):
            self.enter("reduce")
            applier.begin_step(self._hyper(self.step), lanes)
            for run in self._runs if todo.size == self._my_units.size else applier.batches(todo.tolist()):
                applier.apply(run, lanes, self.step, norm, self._mend)
                self._words[BEAT] += 1
            self.rebook("reduce", "compute", applier.products.take_spent_ns())
            if self._kept is not None:
                control.unit_done[todo] = stamp
                self._words[MARK] = 0
            self._ring_if_last(control.unit_done, stamp)
        return bool(todo.size)

    def _begin_to_change(self, stamp: int) -> bool:
        """Where a copy is kept: mark that we are changing units. From here on a death leads back to the copy.

        False when the caller is going back, or has: it waits for our mark to go, so we must look before we change.
        """
        if self._kept is None:
            return True
        control = self._control
        self._words[MARK] = stamp
        with self._fence:  # the caller sees the mark, or we see that it is going back
            pass
        if not control.going_back and control.steps == self.step and control.repairs == self._known[1]:
            return True
        self._words[MARK] = 0
        self._wait(lambda: not control.going_back)
        return False

    def _commit(self, stamp: int) -> None:
        """Settle the buffers and make the step final. Doing it twice changes nothing, so it may be inherited."""
        control = self._control
        if self._skip_bad and (control.lane_bad == stamp).any():  # nothing changes, so all lanes keep what they kept
            for lane in range(self._arena.spec.lanes):
                self._arena.carry_over(self.step, lane)
        elif self._arena.spec.buffers:
            settle_buffers(self._arena, self._rows(self.step))
        if control.first_commit_ns == 0:
            control.first_commit_ns = time.monotonic_ns()
        rests = stamp >= control.horizon
        if rests:  # written before the commit: nobody may see the step final and begin the next one
            control.held = stamp + 1
        plan = control.proposed
        control.commit(stamp, plan)
        if plan == self.plan and not self._has_peers:
            control.bell.ring()
        else:
            control.wake_everybody()
        if rests:
            control.desk.ring()
