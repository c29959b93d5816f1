"""The life of a server to which workers bring updates one by one.

The first server leads: it judges every update by the policy, writes what becomes of it into the log, and leases chunks.
All servers apply the log, in its order, to their own part of the parameters, and hand their part to whoever was granted
a chunk. A server remembers nothing that cannot be read off the words of the exchange and the stamps of the units: its
successor finds the entry that the dead one was applying, completes it, and goes on.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from manyhands.comm.arena import Arena
from manyhands.comm.exchange import LOG
from manyhands.core.placement import place_units
from manyhands.core.policies import Mixing, Policy
from manyhands.core.rates import Rates
from manyhands.engine.precedence import go_first
from manyhands.sync.apply import Applier, Mend
from manyhands.sync.lead import Lead
from manyhands.sync.mixing import mix_with
from manyhands.sync.optimizer_state import Template
from manyhands.sync.prediction import Prediction, momentum_reach
from manyhands.sync.pulse import Pulse, Stopped
from manyhands.sync.rows import RowApplier
from manyhands.sync.windows import Desk, Windows

__all__ = ["Service"]

_WAIT_S = 0.1
_EAGER_S = 0.005  # while somebody has nothing to do because others still compute


class Service(Pulse):
    """One server. ``turn`` serves until there is a message to read."""

    def __init__(
        self,
        arena: Arena,
        slot: int,
        index: int,
        template: Template,
        policy: Policy,
        predict: bool = False,
        rates: Rates | None = None,
        ramp: int = 0,
    ) -> None:
        """``index``: which of the servers this is; 0 leads. ``predict``: see ``sync/prediction.py``. ``rates``: what
        the learning rate is multiplied by, by worker. ``ramp``: updates after which one worker more takes part."""
        super().__init__(arena, slot)
        self._arena, self._control, self._exchange = arena, arena.control, arena.exchange()
        self._index, self._policy = index, policy
        self._mixes = isinstance(policy, Mixing)  # workers then keep parameters of their own
        self._applier = Applier(arena, template, (), slot)
        self._rates = [number for number, key in enumerate(template.hyper) if key.key == "lr"]
        units = arena.spec.units
        owners = place_units([u.stop - u.start for u in units], dict.fromkeys(range(arena.spec.exchange), 1.0))
        mine = [number for number, owner in enumerate(owners) if owner == index]
        self._runs = self._applier.batches(mine)
        self._bytes = slice(units[mine[0]].start, units[mine[-1]].stop) if mine else slice(0, 0)
        self._part = arena.plane(0)[self._bytes]
        self._pulls: dict[int, torch.Tensor] = {}
        self._rows = RowApplier(arena, index, template, self.beat) if arena.spec.tables else None
        reach = momentum_reach(template) if predict else 0.0
        # Who serves alone writes what a worker gets while it applies that worker's update, from the cache.
        self._alone = arena.spec.exchange == 1 and not self._mixes and not arena.spec.ahead
        self._windows = Windows(arena, self._applier) if arena.spec.ahead else None
        self._desks: dict[tuple[int, tuple[int, int]], Desk] = {}
        self._prepared: dict[int, tuple[int, float]] = {}
        own = reach and not self._alone and not arena.spec.ahead
        self._prediction = Prediction(arena, self._runs) if own else None
        self._lead = Lead(arena, policy, reach, rates, ramp) if index == 0 else None
        self.step = arena.control.steps
        if arena.spec.ahead:
            go_first()

    def turn(self, end: int | None = None) -> Literal["step", "message", "over"]:
        """Serve. Returns when there is a message; raises Stopped at the end of the run."""
        control = self._control
        while True:
            count = control.counter.count
            if control.stop:
                raise Stopped
            if self._has_message():
                return "message"
            if not self._serve() or self._is_quiet(count):
                self.enter("wait")
                eager = self._lead is not None and self._lead.somebody_waits
                control.counter.wait(count, _EAGER_S if eager else _WAIT_S)

    def _is_quiet(self, count: int) -> bool:
        """Whether nothing has come since the bell was at ``count``, and nothing was left for a second look."""
        undecided = self._lead is not None and self._lead.undecided
        return self._control.counter.count == count and not undecided

    def _serve(self) -> bool:
        """Do what can be done now; whether there was something."""
        done = self._lead is not None and self._lead.judge()
        while True:
            applied = self._apply_log(1 if self._alone else LOG)
            if applied and self._exchange.shape.servers > 1:
                self._control.counter.ring()  # the lead waits until everybody has applied an entry
            if self._lead is not None:
                done = self._lead.settle() or done
                resting = self._lead.resting
                if self._windows is not None:
                    self._windows.look(resting)
                granted = self._lead.grant(resting)
                done = granted or done
                if granted and self._arena.spec.ahead:
                    self._control.bell.ring()
            done = (not self._arena.spec.ahead and self._deliver()) or applied or done
            if not (applied and self._is_behind(int(self._exchange.applied[self._index]))):
                return done

    # -- the log --------------------------------------------------------------------------------------------
    def _is_behind(self, number: int) -> bool:
        """Whether there is an entry of that number."""
        return bool(self._exchange.stamp[number % LOG] == number + 1)

    def _apply_log(self, most: int) -> bool:
        exchange, begun = self._exchange, int(self._exchange.applied[self._index])
        number = begun
        while self._is_behind(number) and number - begun < most:
            self.enter("reduce")
            self._apply(number)
            number += 1
            exchange.applied[self._index] = number
        return number > begun

    def _apply(self, number: int) -> None:
        """Apply one entry to our units; those that a predecessor has finished bear its stamp."""
        exchange, control, at = self._exchange, self._control, number % LOG
        members = exchange.members(at)
        row = self._arena.hyper[int(exchange.number[at]) % self._arena.spec.ring]
        if exchange.rate[at] != 1:
            row = row.copy()
            row[self._rates] *= exchange.rate[at]
        self._applier.begin_step(row, members)
        factor, compensation = float(exchange.factor[at]), float(exchange.compensation[at])
        mend: Mend | None = None
        if self._mixes:
            mend = mix_with(self._arena, members[0], float(exchange.rate[at]))
        elif factor != 1 or compensation:
            mend = _Mend(self._arena, members[0], factor, compensation)
        if self._prediction is not None and exchange.ahead.any():
            self._prediction.begin()
        mine = [run for run in self._runs if control.unit_done[run[0]] != number + 1]
        for run in mine:
            if self._prediction is not None:
                self._prediction.keep(run)
            self._applier.apply(run, members, number, 0.0, mend)
            if self._windows is not None:
                self._windows.write(run, float(exchange.ahead[members[-1]]))
            elif self._alone:
                for slot in members:
                    self._desk(slot, run).write(float(exchange.ahead[slot]))
            self.beat()
        if self._windows is not None:
            self._windows.show(number + 1, complete=len(mine) == len(self._runs))
        if self._alone and len(mine) == len(self._runs):
            self._prepared.update({slot: (number + 1, float(exchange.ahead[slot])) for slot in members})
        if self._rows is not None:
            self._rows.apply(number, members, row, factor, compensation)
        if self._index == 0:
            for slot in members:
                self._settle_buffers(slot)

    def _settle_buffers(self, slot: int) -> None:
        """The buffers are those of whoever brought the last update. Done twice, it changes nothing."""
        for agreed, brought in zip(self._arena.buffers(), self._arena.buffers(slot), strict=True):
            agreed.copy_(brought)

    def _deliver(self) -> bool:
        """Hand our part of the parameters to those who were granted a chunk."""
        exchange, mine = self._exchange, self._exchange.delivered[self._index]
        waiting = np.flatnonzero((mine != exchange.granted) & (exchange.grant > 0))
        done = False
        for slot in waiting.tolist():
            if exchange.applied[self._index] < exchange.grant_version[slot]:
                continue
            request = int(exchange.granted[slot])
            if not (self._mixes and mine[slot]):
                self._hand_over(slot)
            if self._index == 0:
                for agreed, theirs in zip(self._arena.buffers(), self._arena.pulled_buffers(slot), strict=True):
                    theirs.copy_(agreed)
            mine[slot] = request
            done = True
        if done:
            self._control.bell.ring()
        return done

    def _desk(self, slot: int, run: tuple[int, int]) -> Desk:
        if (slot, run) not in self._desks:
            self._desks[slot, run] = Desk(self._arena, self._applier, self._arena.pull(slot), run)
        return self._desks[slot, run]

    def _hand_over(self, slot: int) -> None:
        """Give a worker our part of the parameters as they are, or as they will be when its update arrives."""
        ahead, version = float(self._exchange.ahead[slot]), int(self._exchange.applied[self._index])
        if self._prepared.pop(slot, None) == (version, ahead):
            return
        if ahead and self._prediction is not None and self._prediction.write(self._arena.pull(slot), ahead):
            return
        if slot not in self._pulls:
            self._pulls[slot] = self._arena.pull(slot)[self._bytes]
        self._pulls[slot].copy_(self._part)


class _Mend:
    """Scales a gradient, or corrects it for how far the parameters have moved since they were read."""

    def __init__(self, arena: Arena, slot: int, factor: float, compensation: float) -> None:
        self._live, self._read = arena.plane(0), arena.pull(slot)
        self._factor, self._compensation = factor, compensation

    def __call__(self, gradient: torch.Tensor, start: int, present: np.ndarray) -> None:
        if self._factor != 1:
            gradient.mul_(self._factor)
        if self._compensation:
            part = slice(start, start + gradient.nbytes)
            moved = self._live[part].view(gradient.dtype) - self._read[part].view(gradient.dtype)
            gradient.addcmul_(gradient * gradient, moved, value=self._compensation)
