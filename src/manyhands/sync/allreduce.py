"""The synchronous step, as one worker lives it.

Nothing here remembers what was done: every decision is read off the stamps in the arena. A worker that joins in
the middle of a step, or inherits the work of a dead one, therefore runs the same code as everybody else:

    lanes of mine without a stamp?       compute them
    all lanes stamped?                   reduce and apply my units that have no stamp
    all units stamped, and I lead?       settle the buffers, commit
    otherwise                            wait for the bell

A small model is not shared out: whoever finishes the last lane applies the whole step and commits it, so that a step
has one wake-up instead of three. It needs nobody's leave: either its own lane has no stamp yet, then nobody else can
see all lanes done, or it takes the turn, a lock that the kernel takes back from the dead.

A process may lose the processor between looking and acting. What it saw can only mislead it if the step was
committed meanwhile, for then the stamps may be those of the next step and the work somebody else's; so before it
acts it looks once more whether the step is still open. If it is, the step waits for that very work: nobody else
can do it, and the step cannot end.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from manyhands.comm.arena import Arena
from manyhands.comm.control import PHASES
from manyhands.sync.apply import Applier
from manyhands.sync.demand import Demand
from manyhands.sync.kept import Kept
from manyhands.sync.loose import Loose

__all__ = ["Stepper", "Stopped"]

_WAIT_S = 0.1
_BEAT, _PHASE, _AT, _LANE, _INBOX, _MARK = range(6)
_TIMES = {"data": 8, "compute": 9, "wait": 10, "reduce": 11}
_LANES_DONE, _LANE_NS = 12, 13
_SMOOTHING = 8  # a lane's time counts for an eighth of the smoothed time


class Stopped(Exception):
    """The run ends; the worker should leave."""


class Stepper:
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
    ) -> None:
        """``rows(step)`` tells how many rows each lane has in a step, ``hyper(step)`` the optimizer's numbers.

        ``spin_s``: how long to wait awake, where there is a core for everybody who works.
        """
        self._arena, self._control, self._slot, self._applier, self._rows = arena, arena.control, slot, applier, rows
        self._hyper = hyper or (lambda step: arena.hyper[step % arena.spec.ring])
        self._skip_bad = skip_bad
        self._wanted_spin_s, self._spin_s, self._cores = spin_s, 0.0, cores
        self._words = arena.control.slot(slot)
        self._demand = Demand(self._words)
        self._seen_inbox = self._words[_INBOX]
        self._known: tuple[int, int] = (-1, -1)
        self._mark_ns = time.perf_counter_ns()
        self._phase_name = "idle"
        self._lane_start_ns = 0
        self.step = -1
        self.plan = -1
        self._my_lanes: list[int] = []
        self._my_units = np.empty(0, np.int64)
        self._runs: list[tuple[int, int]] = []
        self._alone = True
        self._fence = threading.Lock()
        self._kept = Kept(arena) if arena.spec.keeps else None
        self._loose: Loose | None = None
        self.enter("idle")

    # -- bookkeeping ----------------------------------------------------------------------------------------
    def enter(self, phase: str) -> None:
        """Book the time since the last change to the old phase and show a sign of life."""
        now = time.perf_counter_ns()
        if (word := _TIMES.get(self._phase_name)) is not None:
            self._words[word] += now - self._mark_ns
        self._mark_ns, self._phase_name = now, phase
        self._words[_PHASE] = PHASES.index(phase)
        self._words[_BEAT] += 1

    def _refresh(self) -> None:
        """Read which work is ours if the plan changed, or was repaired, since we last looked."""
        repairs = self._control.repairs
        if (self.plan, repairs) == self._known:
            return
        owners, unit_owners = self._control.lane_owner(self.plan), self._control.unit_owner(self.plan)
        self._my_lanes = np.flatnonzero(owners == self._slot).tolist()
        self._my_units = np.flatnonzero(unit_owners == self._slot)
        self._alone = len(self._my_lanes) == len(owners) and len(self._my_units) == len(unit_owners)
        workers = len({*owners.tolist(), *unit_owners.tolist()})
        self._spin_s = self._wanted_spin_s if 1 < workers <= self._cores else 0.0
        self._known = (self.plan, repairs)
        if self._applier is not None:
            self._applier.forget()
            whole = self._kept is not None
            self._runs = self._applier.batches(range(len(unit_owners)) if whole else self._my_units.tolist())

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
        count = control.bell.count
        if not ready() and control.repairs == repairs and not control.stop:
            control.bell.wait(count, _WAIT_S)
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
            self._control.bell.ring()

    # -- the step -------------------------------------------------------------------------------------------
    def turn(self, end: int | None = None) -> Literal["step", "message", "over"]:
        """Wait for something to do: a step to take part in, or a message; "over" once ``end`` steps are committed.
        Raises Stopped at the end of the run."""
        control = self._control
        self.enter("idle")
        while True:
            count, spares = control.bell.count, control.spares.count
            if control.stop:
                raise Stopped
            if self._words[_INBOX] != self._seen_inbox:
                self._seen_inbox = self._words[_INBOX]
                self.enter("message")
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
                self._words[_AT] = steps
                return "step"
            # Somebody without work is not to be woken by every commit.
            (control.spares if spare else control.bell).wait(spares if spare else count, _WAIT_S)
            self._words[_BEAT] += 1

    def lanes(self) -> list[int]:
        """The lanes of ours that have no stamp in this step. Lanes without rows are stamped at once."""
        self._refresh()
        done, rows = self._control.lane_done, self._rows(self.step)
        missing = [lane for lane in self._my_lanes if done[lane] != self.step + 1]
        if self._control.steps > self.step:
            return []
        for lane in missing:
            if not rows[lane]:
                done[lane] = self.step + 1
        return [lane for lane in missing if rows[lane]]

    def begin_lane(self, lane: int) -> None:
        """Data for the lane is about to be fetched."""
        self._words[_LANE] = lane
        self._lane_start_ns = time.perf_counter_ns()
        self.enter("data")

    def end_lane(self, lane: int, *, bad: bool = False, loose: Loose | None = None) -> None:
        """The lane's buffers and numbers are in the arena, and so is its gradient unless it is ``loose``."""
        if bad:
            self._control.lane_bad[lane] = self.step + 1
        if loose is not None and self._is_last(lane) and (loose.complete or self._arena.spec.lanes == 1):
            self._loose = loose
            self._control.lane_done[lane] = 0  # it may bear a stamp from before the run went back
        else:
            if loose is not None:
                loose.settle()
            self._control.lane_done[lane] = self.step + 1
        self._words[_LANE] = -1
        spent = time.perf_counter_ns() - self._lane_start_ns
        old = self._words[_LANE_NS]
        self._words[_LANE_NS] = spent if old == 0 else old + (spent - old) // _SMOOTHING
        self._words[_LANES_DONE] += 1
        self._demand.measure()

    def _is_last(self, lane: int) -> bool:
        """Whether all other lanes of the step are done."""
        done: np.ndarray = self._control.lane_done == self.step + 1
        return int(done.sum()) == len(done) - (not done[lane])

    @property
    def my_lanes(self) -> list[int]:
        """The lanes of ours, as last read from the plan."""
        return self._my_lanes

    def finish(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """Take the step to its commit. False when lanes of a dead worker came to us: compute them, call again.

        ``meanwhile`` is called once if there is time to spare, because others are still computing.
        """
        if self._kept is not None:
            return self._finish_alone(self._kept, meanwhile)
        control, stamp = self._control, self.step + 1
        lane_done, unit_done = control.lane_done, control.unit_done
        self._ring_if_last(lane_done, stamp)
        while control.steps < stamp:
            self._refresh()
            if (lane_done == stamp).all():
                if self._work_on_units(stamp):
                    continue
                leads = control.leader(self.plan) == self._slot
                if leads and (unit_done == stamp).all():
                    if control.steps < stamp:  # else a leader committed it that is dead by now
                        self._commit(stamp)
                    break
                if leads:
                    self._wait(lambda: control.steps >= stamp or bool((unit_done == stamp).all()))
                else:
                    self._wait(lambda: control.steps >= stamp)
            elif self._my_lanes and (lane_done[self._my_lanes] != stamp).any() and self.lanes():
                return False
            elif meanwhile is not None:
                if self._applier is not None and self._runs:
                    self._applier.save_ahead(self._runs[0], self.step)
                meanwhile()
                meanwhile = None
            else:
                self._wait(lambda: control.steps >= stamp or bool((lane_done == stamp).all()))
        return True

    # -- one for all ----------------------------------------------------------------------------------------
    def _finish_alone(self, kept: Kept, meanwhile: Callable[[], None] | None) -> bool:
        """The same for a model that is applied whole. The step may also end by going back to an earlier one."""
        control, step, lane_done = self._control, self.step, self._control.lane_done
        if self._loose is not None:
            self._settle(kept)
            return True
        with self._fence:  # of two who stamp the last two lanes at the same moment, one sees both stamps
            pass
        while control.steps == step:
            self._refresh()
            if (lane_done == step + 1).all():
                if self._take_turn(kept):
                    return True
                self._wait(lambda: control.steps != step)
            elif self._my_lanes and (lane_done[self._my_lanes] != step + 1).any() and self.lanes():
                return False
            elif meanwhile is not None:
                meanwhile()
                meanwhile = None
            else:
                self._wait(lambda: control.steps != step or bool((lane_done == step + 1).all()))
        return True

    def _take_turn(self, kept: Kept) -> bool:
        """Apply the step if nobody else does, or died over it."""
        fd = self._arena.segment.fd
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return False
        try:
            # The mark first: who clears it has committed before, so that one of the two is always seen.
            if self._control.marked(self.step + 1) or self._control.steps != self.step:
                return False
            self._settle(kept)
            return True
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN, 1)

    def _settle(self, kept: Kept) -> None:
        """Reduce, apply and commit. From the mark on, a death leads back to the kept copy."""
        control, applier, stamp = self._control, self._applier, self.step + 1
        self.enter("reduce")
        kept.renew(self.step)
        self._words[_MARK] = stamp
        if applier is not None and not (self._skip_bad and (control.lane_bad == stamp).any()):
            lanes = [lane for lane, rows in enumerate(self._rows(self.step)) if rows]
            applier.begin_step(self._hyper(self.step), lanes, self._loose)
            norm = 0.0
            if applier.needs_norm:
                for run in self._runs:
                    applier.norms(run, lanes)
                norm = applier.total_norm()
            for run in self._runs:
                applier.apply(run, lanes, self.step, norm)
            applier.let_go()
        self._loose = None
        self._commit(stamp)
        self._words[_MARK] = 0

    # -- shared out -----------------------------------------------------------------------------------------
    def _unstamped(self, stamps: np.ndarray, stamp: int) -> np.ndarray:
        """The units of ours without a stamp, as long as the step is open."""
        todo: np.ndarray = self._my_units[stamps[self._my_units] != stamp]
        return todo if self._control.steps < stamp else todo[:0]

    def _work_on_units(self, stamp: int) -> bool:
        """Do what can be done on our units now. True when something was done or waited for."""
        control, applier = self._control, self._applier
        if applier is None:
            return False
        if self._skip_bad and (control.lane_bad == stamp).any():
            todo = self._unstamped(control.unit_done, stamp)
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
                self._wait(lambda: control.steps >= stamp or bool((control.norm_done == stamp).all()))
                return True
            norm = applier.total_norm()
        todo = self._unstamped(control.unit_done, stamp)
        if todo.size:
            self.enter("reduce")
            applier.begin_step(self._hyper(self.step), lanes)
            for run in self._runs if todo.size == self._my_units.size else applier.batches(todo.tolist()):
                applier.apply(run, lanes, self.step, norm)
                self._words[_BEAT] += 1
            self._ring_if_last(control.unit_done, stamp)
        return bool(todo.size)

    def _commit(self, stamp: int) -> None:
        """Settle the buffers and make the step final. Doing it twice changes nothing, so it may be inherited."""
        control = self._control
        if self._arena.spec.buffers and not (self._skip_bad and (control.lane_bad == stamp).any()):
            self._settle_buffers()
        if control.first_commit_ns == 0:
            control.first_commit_ns = time.monotonic_ns()
        rests = stamp >= control.horizon
        if rests:  # written before the commit: nobody may see the step final and begin the next one
            control.held = stamp + 1
        plan = control.proposed
        control.commit(stamp, plan)
        if plan == self.plan:
            control.bell.ring()
        else:
            control.wake_everybody()
        if rests:
            control.desk.ring()

    def _settle_buffers(self) -> None:
        """The mean of the lanes' buffers, by rows and in lane order; whole numbers are those of the first lane."""
        rows = self._rows(self.step)
        lanes = [lane for lane, count in enumerate(rows) if count]
        total = sum(rows)
        columns = zip(self._arena.buffers(), *(self._arena.buffers(lane) for lane in lanes), strict=True)
        for agreed, *copies in columns:
            if len(copies) == 1 or not (agreed.is_floating_point() or agreed.is_complex()):
                agreed.copy_(copies[0])
                continue
            mean = torch.zeros_like(agreed)
            for lane, copy in zip(lanes, copies, strict=True):
                mean.add_(copy, alpha=rows[lane] / total)
            agreed.copy_(mean)
