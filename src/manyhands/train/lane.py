"""Computes one lane of one step: forward, backward, and everything that makes it a function of (seed, step, lane).

Random streams are bound to the lane: whoever computes it draws the same numbers.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.comm.codec import Codec
from manyhands.core.order import lane_seed, stream_seed
from manyhands.core.policies import Policy
from manyhands.core.rates import Rates
from manyhands.data.source import Batch, ColumnSource, Source, call_model
from manyhands.errors import NotFinite
from manyhands.sync.allreduce import Stepper
from manyhands.sync.client import Courier, GivenUp
from manyhands.sync.clip import Clip
from manyhands.sync.compress import Compressor
from manyhands.sync.optimizer_state import Template
from manyhands.train.metrics import Metric
from manyhands.train.replica import Replica
from manyhands.train.schedule import Course

__all__ = ["Job", "LaneRunner", "set_seed"]


@dataclass(slots=True, kw_only=True)
class Job:
    """What a worker is given once: the model and all that is needed to train or evaluate it."""

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    metrics: Sequence[Metric]
    source: Source | None = None
    template: Template | None = None
    clips: tuple[Clip, ...] = ()
    course: Course | None = None
    seed: int = 0
    threads: int = 1
    precision: str = "fp32"
    accumulate: int = 1
    nan: str = "stop"
    policy: Policy | None = None
    predict: bool = False
    rates: Rates | None = None
    ramp: int | None = 0
    codec: Codec | None = None
    pull_codec: Codec | None = None
    runner: Callable[[Arena, Job, Stepper | Courier], LaneRunner] | None = None
    """Who computes lanes, in a job that trains."""
    settings: dict[str, Any] = field(default_factory=dict)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self.precision == "bf16":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()


def set_seed(seed: int) -> None:
    """Start every random stream that user code may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


class LaneRunner:
    """Computes lanes with one replica of the model, whose parameters lie in the arena."""

    def __init__(self, arena: Arena, job: Job, stepper: Stepper | Courier) -> None:
        assert job.source is not None
        assert job.course is not None
        self._arena, self._job, self._stepper, self._course = arena, job, stepper, job.course
        self._source = job.source
        self._source_draws = not isinstance(job.source, ColumnSource)  # it runs user code, which may draw numbers
        self._data_stream, self._lane_stream = stream_seed(job.seed, "data"), stream_seed(job.seed, "lane")
        self._ahead: dict[tuple[int, int], Batch] = {}
        self._home = stepper.home  # of the parameters, where they are our own
        courier = stepper if isinstance(stepper, Courier) else None
        fetch, places = (courier.fetch_rows, courier.places) if courier is not None else (None, None)
        # A norm is taken of the gradient before it is applied, and pieces of a batch are added up: both need it whole.
        factors = job.accumulate == 1 and not any(clip.needs_norm for clip in job.clips)
        self._replica = Replica(
            arena, job.model, ours=True, home=stepper.home, places=places, fetch=fetch, factors=factors
        )
        encodes = job.codec is not None and not stepper.encodes
        self._compressor = Compressor(arena, job.codec, stepper.slot) if encodes and job.codec is not None else None
        self.batch = 0
        """The batch that is computed, or was last."""

    def begin_step(self) -> None:
        """The worker takes part in the stepper's step, with or without lanes."""
        if self._compressor is not None:
            self._compressor.begin_step()

    def before_inference(self) -> None:
        """The model is about to be evaluated: let it have the agreed parameters."""
        if self._arena.spec.ahead:
            self._replica.read_agreed()
        elif self._home is not None:
            self._arena.pull(self._home).copy_(self._arena.plane(0))

    def run(self, lane: int) -> None:
        """Compute the lane in the stepper's step and stamp it."""
        step, stepper = self._stepper.step, self._stepper
        stepper.begin_lane(lane)
        home = stepper.place if isinstance(stepper, Courier) else lane
        if isinstance(stepper, Courier) and stepper.window is not None:
            self._replica.read_window(stepper.window)
        self._replica.begin(home)
        try:
            bad = not self._run_batch(step, lane, self._course.batch_rows(step))
        except GivenUp:
            assert self._replica.rows is not None
            self._replica.rows.give_up()
            raise
        loose = self._replica.end(home)
        if self._replica.rows is not None:
            assert isinstance(stepper, Courier), "tables are held by row where there are servers"
            stepper.report_rows(*self._replica.rows.moved)
        if not bad:
            stepper.limit()
            self._send(home)
        stepper.end_lane(lane, bad=bad, loose=loose)

    def _run_batch(self, batch: int, lane: int, total: int) -> bool:
        """Forward and backward for the lane's rows of a batch, out of ``total``; False when the loss is not finite."""
        self.batch = batch
        positions = self._course.positions(self._arena.order, batch, lane)
        stats = [0.0] * self._arena.spec.stats
        count = min(self._job.accumulate, len(positions))
        pieces = [positions] if count == 1 else np.array_split(positions, count)
        for number, rows in enumerate(pieces):
            self._run_piece(batch, lane, number, rows, total, stats)
        self._stepper.report(batch, lane, stats)
        bad = not math.isfinite(stats[1])
        if bad and self._job.nan == "stop":
            raise self._not_finite(batch, lane, positions)
        return not bad

    def _send(self, lane: int) -> None:
        """The lane has what it contributes to the step: replace it by what arrives of it, under a codec."""
        if self._compressor is not None:
            self._stepper.enter("reduce")
            self._compressor.run(self._stepper.bank, lane)

    def _fetch(self, step: int, lane: int, number: int, rows: np.ndarray) -> Batch:
        if self._source_draws:
            set_seed(lane_seed(self._data_stream, step, lane, number))
        return self._source.fetch(rows)

    def fetch_ahead(self) -> None:
        """Fetch the first batches of the next step while others still compute this one."""
        step = self._course.done(self._stepper.step + 1)
        self._ahead.clear()
        if step % self._course.steps_per_epoch == 0 or self._job.accumulate > 1:
            return  # the order of the next epoch is not known yet; pieces of a batch are fetched one by one
        self._stepper.enter("data")
        for lane in self._stepper.my_lanes:
            rows = self._course.positions(self._arena.order, step, lane)
            if len(rows):
                # What fails here fails again in its own step, where the error can be told properly.
                with contextlib.suppress(Exception):
                    self._ahead[step, lane] = self._fetch(step, lane, 0, rows)

    def _run_piece(self, step: int, lane: int, number: int, rows: np.ndarray, total: int, stats: list[float]) -> None:
        job = self._job
        self._stepper.enter("data")
        ahead = self._ahead.pop((step, lane), None)
        inputs, target = self._fetch(step, lane, number, rows) if ahead is None else ahead
        self._stepper.enter("compute")
        set_seed(lane_seed(self._lane_stream, step, lane, number))
        with job.autocast():
            output = call_model(job.model, inputs)
            loss = job.loss(output, target)
        self._replica.backward(loss, len(rows) / total)
        stats[0] += len(rows)
        stats[1] += float(loss.detach()) * len(rows)
        at = 2
        with torch.no_grad():
            for metric in job.metrics:
                for offset, value in enumerate(metric.update(_detached(output), target)):
                    stats[at + offset] += float(value)
                at += metric.width

    def _not_finite(self, step: int, lane: int, positions: np.ndarray) -> NotFinite:
        """The error that names the samples whose loss is not finite."""
        culprits = [int(p) for p in positions if not self._is_finite(np.array([p]))]
        shown = culprits[:10] or [int(p) for p in positions[:10]]
        which = "sample" + ("s" if len(shown) > 1 else "") if culprits else "none alone; the batch has samples"
        return NotFinite(
            f"the loss is not finite in step {step}, lane {lane}: {which} {', '.join(map(str, shown))}"
            f"{' …' if max(len(culprits), len(positions) if not culprits else 0) > len(shown) else ''}. "
            "Clean the data, lower the learning rate or clip the gradient; nan='skip' leaves such steps out."
        )

    def _is_finite(self, row: np.ndarray) -> bool:
        inputs, target = self._source.fetch(row)
        model = self._job.model.eval()
        try:
            with torch.no_grad(), self._job.autocast():
                return math.isfinite(float(self._job.loss(call_model(model, inputs), target)))
        except Exception:
            return True  # a model that cannot take a single row says nothing about the row
        finally:
            model.train()


def _detached(output: Any) -> Any:
    return output.detach() if isinstance(output, torch.Tensor) else output
