"""The synchronous step of a small model: one worker applies it for all.

Shared out, such a step would spend more on wake-ups than on its arithmetic. Whoever finishes the last lane applies the
whole step and commits it, so that a step has one wake-up instead of three. It needs nobody's leave: either its own lane
has no stamp yet, then nobody else can see all lanes done, or it takes the turn, a lock that the kernel takes back from
the dead.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manyhands.sync.allreduce import MARK, Stepper
from manyhands.sync.kept import Kept
from manyhands.sync.loose import Loose

__all__ = ["WholeStepper"]


class WholeStepper(Stepper):
    """Drives one worker through the steps of a run whose arena is applied whole."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self._kept is not None
        self._copy: Kept = self._kept
        self._loose: Loose | None = None

    def _units_to_apply(self) -> Sequence[int]:
        return range(len(self._arena.spec.units))

    def _stamp_lane(self, lane: int, loose: Loose | None) -> None:
        """The lane gets its stamp, unless it is the last one and its gradient need not be copied for anybody."""
        assert loose is not None
        last = self._role == "both" and self._is_last(lane)
        if last and (loose.complete or self._arena.spec.lanes == 1):
            self._loose = loose
            self._control.lane_done[lane] = 0  # it may bear a stamp from before the run went back
        else:
            loose.settle()
            self._control.lane_done[lane] = self.step + 1

    def _is_last(self, lane: int) -> bool:
        """Whether all other lanes of the step are done."""
        done: np.ndarray = self._control.lane_done == self.step + 1
        return int(done.sum()) == len(done) - (not done[lane])

    def finish(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """Take the step to its commit, or to where the run goes back to an earlier one. False when lanes of a dead
        worker came to us: compute them, call again."""
        control, step, lane_done = self._control, self.step, self._control.lane_done
        if self._loose is not None:
            self._settle()
            return True
        if self._role == "worker":
            self._ring_if_last(lane_done, step + 1)
        with self._fence:  # of two who stamp the last two lanes at the same moment, one sees both stamps
            pass
        while control.steps == step:
            self._refresh()
            if (lane_done == step + 1).all():
                if self._role != "worker" and self._take_turn():
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

    def _take_turn(self) -> bool:
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
            self._settle()
            return True
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN, 1)

    def _settle(self) -> None:
        """Reduce, apply and commit. From the mark on, a death leads back to the kept copy."""
        control, applier, stamp = self._control, self._applier, self.step + 1
        self.enter("reduce")
        self._copy.renew(self.step)
        self._words[MARK] = stamp
        if applier is not None and not (self._skip_bad and (control.lane_bad == stamp).any()):
            lanes = [lane for lane, rows in enumerate(self._rows(self.step)) if rows]
            applier.begin_step(self._hyper(self.step), lanes, self._loose)
            norm = 0.0
            if applier.needs_norm:
                for run in self._runs:
                    applier.norms(run, lanes)
                norm = applier.total_norm()
            for run in self._runs:
                applier.apply(run, lanes, self.step, norm, self._mend)
            applier.let_go()
        self._loose = None
        self._commit(stamp)
        self._words[MARK] = 0
