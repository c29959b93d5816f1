"""The course of a fit (which batch takes which rows, which round takes which batches) and the schedule of its rates.

The schedule lives in the caller alone, on the caller's optimizer; its numbers are written into the arena ahead of
the steps, and workers read them there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

from manyhands.comm.arena import Arena
from manyhands.core.order import lane_slice, steps_per_epoch
from manyhands.core.rounds import agreed_before, due
from manyhands.errors import UsageError, unknown_name
from manyhands.sync.optimizer_state import HyperKey, hyper_row

__all__ = ["Course", "PerEpoch", "Schedule", "resolve_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Batches, rounds, lanes and rows of a fit, numbered from the beginning of the run.

    A round is what must be complete before the copies agree: ``every`` batches, fewer at the end of an epoch. Workers
    take it as one step of theirs; files, callbacks and people count batches.
    """

    samples: int
    batch_size: int
    lanes: int
    drop_last: bool = False
    every: int = 1
    span: int = 1
    """Batches that a worker takes at once where it works on its own: step hooks run after so many."""
    fragments: int = 1
    """Into how many the parameters are cut that are agreed on in turns, one after each round."""
    begun: int = 0
    """Batches done before this fit. They may end within a round (it was another way of agreeing that did them); the
    first round is then what is left of that one."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return steps_per_epoch(self.samples, self.batch_size, self.drop_last)

    # -- rounds ---------------------------------------------------------------------------------------------
    def done(self, rounds: int) -> int:
        """Batches that are done once ``rounds`` rounds are."""
        return max(self._first(rounds), self.begun)

    def _first(self, number: int) -> int:
        """The first batch of a round, had nothing been done before this fit."""
        if self.every == 1:
            return number
        epoch, within = divmod(number, self.rounds_per_epoch)
        return epoch * self.steps_per_epoch + within * self.every

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds of an epoch; the last may be shorter."""
        return -(-self.steps_per_epoch // self.every)

    def round_of(self, batch: int) -> int:
        """The round that ``batch`` is in."""
        epoch, within = divmod(batch, self.steps_per_epoch)
        return epoch * self.rounds_per_epoch + within // self.every

    def rounds_to(self, batch: int) -> int:
        """How many rounds it takes until ``batch`` batches are done."""
        return self.round_of(batch) + (self.done(self.round_of(batch)) < batch)

    def batches(self, number: int) -> range:
        """The batches of a round."""
        return range(self.done(number), self.done(number + 1))

    def due(self, number: int) -> range:
        """The fragments that are agreed on after a round."""
        return due(number % self.rounds_per_epoch, self.rounds_per_epoch, self.fragments)

    def lane_rows(self, number: int) -> list[int]:
        """Rows of every lane that are agreed on after a round: those since its fragments were agreed on before."""
        within, rows = number % self.rounds_per_epoch, [0] * self.lanes
        before = min(agreed_before(within, fragment, self.fragments) for fragment in self.due(number))
        first = self.done(number) if before == within else self._first(number - within + before)
        for batch in range(first, self.done(number + 1)):
            size, bigger = divmod(self.batch_rows(batch), self.lanes)
            rows = [count + size + (lane < bigger) for lane, count in enumerate(rows)]
        return rows

    def after(self, rounds: int) -> int:
        """The rounds that are done once the next step of a worker is; it ends with the epoch."""
        per_epoch = self.round_of(self.steps_per_epoch)
        return min(rounds + self.span, (rounds // per_epoch + 1) * per_epoch)

    # -- batches --------------------------------------------------------------------------------------------
    def positions(self, order: np.ndarray, batch: int, lane: int) -> np.ndarray:
        """The rows of a lane. ``order`` holds the order of even epochs in its first row, of odd ones in its second."""
        epoch, within = divmod(batch, self.steps_per_epoch)
        start, stop = lane_slice(within, lane, samples=self.samples, batch_size=self.batch_size, lanes=self.lanes)
        rows: np.ndarray = order[epoch % 2, start:stop]
        return rows

    def batch_rows(self, batch: int) -> int:
        """Rows of the whole batch."""
        return min(self.batch_size, self.samples - batch % self.steps_per_epoch * self.batch_size)

    def rows_of(self, batches: np.ndarray) -> np.ndarray:
        """Rows of each of these batches."""
        rows: np.ndarray = self.samples - batches % self.steps_per_epoch * self.batch_size
        return rows.clip(max=self.batch_size)


@dataclass(frozen=True, slots=True)
class PerEpoch:
    """A scheduler (or ``optimizer -> scheduler``) that is stepped once per epoch instead of once per step."""

    scheduler: Any


_NAMES = ("constant", "cosine", "linear", "onecycle")


def _named(name: str, optimizer: torch.optim.Optimizer, total: int) -> Any:
    total = max(total, 1)
    if name == "constant":
        return lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=1)
    if name == "cosine":
        return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step / total, 1))))
    if name == "linear":
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - min(step / total, 1))
    if name == "onecycle":
        peaks = [group.get("max_lr", group["lr"]) for group in optimizer.param_groups]  # a second fit has the same peak
        return lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=total)
    raise unknown_name("schedule", name, _NAMES)


class Schedule:
    """A torch scheduler, and the record of the numbers it gave."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any = None, per_epoch: bool = False) -> None:
        self._optimizer, self._scheduler, self._per_epoch = optimizer, scheduler, per_epoch
        self.keys: list[HyperKey] = []
        """Which numbers of the optimizer the workers are told; known once its state is laid out."""
        self._plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        self._factor = 1.0
        self._filled = 0

    def advance_to(self, step: int, steps_per_epoch: int, losses: list[float]) -> None:
        """Replay the schedule up to ``step``: it is a function of the steps (and the losses per epoch) alone."""
        for number in range(step):
            self._before(number, steps_per_epoch, losses)
            self._after(number, steps_per_epoch)
        self._filled = step

    def fill(self, arena: Arena, upto: int, steps_per_epoch: int, losses: list[float]) -> None:
        """Write the numbers of the steps below ``upto`` that are not written yet."""
        while self._filled < upto:
            self._before(self._filled, steps_per_epoch, losses)
            arena.hyper[self._filled % arena.spec.ring, : len(self.keys)] = self._row()
            self._after(self._filled, steps_per_epoch)
            self._filled += 1

    def _row(self) -> list[float]:
        row = hyper_row(self._optimizer, self.keys)
        if self._factor != 1.0:
            row = [v * self._factor if k.key == "lr" else v for v, k in zip(row, self.keys, strict=True)]
        return row

    def _before(self, step: int, steps_per_epoch: int, losses: list[float]) -> None:
        """A plateau is judged when the next epoch begins: numbers are written ahead, but no loss is known ahead."""
        if self._plateau and step and step % steps_per_epoch == 0:
            self._scheduler.step(losses[step // steps_per_epoch - 1])

    def _after(self, step: int, steps_per_epoch: int) -> None:
        if self._scheduler is None or self._plateau:
            return
        if not self._per_epoch or (step + 1) % steps_per_epoch == 0:
            self._scheduler.step()

    def rates(self) -> list[float]:
        """The learning rates as they are now."""
        return [float(group["lr"]) * self._factor for group in self._optimizer.param_groups]

    def set_rate(self, rate: float) -> None:
        """Set the learning rate by hand: groups keep their proportion, a schedule goes on from there."""
        first = float(self._optimizer.param_groups[0]["lr"])
        if self._scheduler is not None and first > 0:
            self._factor = rate / first
            return
        for group in self._optimizer.param_groups:
            own = float(group["lr"])
            group["lr"] = rate if first <= 0 or own == first else own * rate / first  # exactly what was asked for

    def state(self) -> dict[str, Any]:
        """What was set by hand, for a checkpoint; all else is replayed."""
        return {"factor": self._factor, "rates": [float(g["lr"]) for g in self._optimizer.param_groups]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Set by hand what was set by hand before the checkpoint."""
        self._factor = state["factor"]
        if self._scheduler is None:
            for group, rate in zip(self._optimizer.param_groups, state["rates"], strict=True):
                group["lr"] = rate


def resolve_schedule(schedule: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> Schedule:
    """A name, a scheduler bound to ``optimizer``, a function ``optimizer -> scheduler``, or ``PerEpoch`` of these."""
    per_epoch = isinstance(schedule, PerEpoch)
    inner = schedule.scheduler if per_epoch else schedule
    if isinstance(inner, str):
        inner = _named(inner, optimizer, total_steps)
    elif inner is not None and not hasattr(inner, "step") and callable(inner):
        inner = _call(inner, optimizer, total_steps)
    if inner is None:
        return Schedule(optimizer)
    if not hasattr(inner, "step") or not hasattr(inner, "optimizer"):
        raise UsageError(
            f"schedule received {schedule!r}; valid: {', '.join(_NAMES)}, a torch scheduler bound to the optimizer, "
            "a function optimizer -> scheduler, or mh.PerEpoch(...) of one of these"
        )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # it is the workers that step it
    if inner.optimizer is not optimizer:
        raise UsageError("the scheduler is bound to another optimizer; pass that optimizer to the Trainer as well")
    return Schedule(optimizer, inner, per_epoch)


def _call(factory: Callable[..., Any], optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    """A factory may ask for the number of steps as its second argument."""
    takes_steps = len(inspect.signature(factory).parameters) > 1
    return factory(optimizer, total_steps) if takes_steps else factory(optimizer)
