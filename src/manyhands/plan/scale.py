"""What extra workers buy: the same job measured at several worker counts, with the bill of where the time went.

Lanes are the same at every count, so every count does the same mathematics; the digest of the weights shows it.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from manyhands.data.adapt import adapt
from manyhands.data.source import SelectedSource
from manyhands.errors import MissingExtra, UsageError
from manyhands.train.callbacks import Callback, State
from manyhands.train.export import digest
from manyhands.train.trainer import Trainer

__all__ = ["Measurement", "Plan", "Workload", "choose_lanes", "cores", "measure", "plot"]

MOST_LANES = 16
LATENCY_STEPS = 100


class Workload(Protocol):
    """What is measured; a recipe is one."""

    @property
    def model(self) -> Callable[[], nn.Module]: ...
    @property
    def data(self) -> Callable[[], Any]: ...
    @property
    def loss(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def metrics(self) -> Sequence[Any]: ...
    @property
    def batch_size(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, and how long."""

    workers: Sequence[int]
    syncs: Sequence[str] = ("allreduce",)
    lanes: int
    steps: int = 200
    """Timed steps at each count, rounded up to whole epochs; as many more to warm up, at most one epoch."""
    layout: str = "whole"
    engine: str = "local"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: valid: a whole number of at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of the table."""

    sync: str
    workers: int
    steps: int
    seconds: float
    samples_per_s: float
    speedup: float
    """Against the first row."""
    latency_p50_ms: float
    latency_p95_ms: float
    """From the beginning of a step to its commit, as the caller sees it with one step at a time."""
    bill: Mapping[str, float]
    """Seconds of all workers together, by phase."""
    digest: str

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def choose_lanes(workers: Sequence[int], batch_size: int) -> int:
    """A number of lanes that every worker count can share evenly, where it stays small."""
    even = math.lcm(*workers)
    return even if even <= min(MOST_LANES, batch_size) else max(workers)


def measure(workload: Workload, plan: Plan) -> Iterator[Measurement]:
    """A measurement for each sync and worker count, as soon as it is there."""
    adapted = adapt(workload.data().train)
    rows = min(len(adapted.source), plan.steps * workload.batch_size)
    data = SelectedSource(adapted.source, np.arange(rows))
    first: float | None = None
    for sync in plan.syncs:
        for workers in plan.workers:
            made = _measure_one(workload, plan, data, sync, workers, first)
            first = first or made.samples_per_s
            yield made


def _measure_one(
    workload: Workload, plan: Plan, data: SelectedSource, sync: str, workers: int, first: float | None
) -> Measurement:
    steps_per_epoch = math.ceil(len(data) / workload.batch_size)
    timed_epochs = math.ceil(plan.steps / steps_per_epoch)
    stopwatch = _Stopwatch()
    trainer = _trainer(workload, plan, sync, workers)
    history = trainer.fit(
        data,
        epochs=1 + timed_epochs,
        batch_size=workload.batch_size,
        lanes=plan.lanes,
        callbacks=[stopwatch],
        run_dir=False,
        progress="quiet",
    )
    latencies_ms = _latencies_ms(workload, plan, data, sync, workers)
    rate = timed_epochs * len(data) / stopwatch.seconds
    return Measurement(
        sync=sync,
        workers=workers,
        steps=timed_epochs * steps_per_epoch,
        seconds=stopwatch.seconds,
        samples_per_s=rate,
        speedup=rate / (first or rate),
        latency_p50_ms=float(np.percentile(latencies_ms, 50)),
        latency_p95_ms=float(np.percentile(latencies_ms, 95)),
        bill=dict(history.bill),
        digest=digest(trainer.model),
    )


def _latencies_ms(workload: Workload, plan: Plan, data: SelectedSource, sync: str, workers: int) -> list[float]:
    """Measured apart from the throughput: a caller that looks at every step holds the workers up."""
    watch = _StepWatch(min(LATENCY_STEPS, plan.steps))
    trainer = _trainer(workload, plan, sync, workers)
    trainer.fit(
        data,
        epochs=math.ceil(2 * watch.wanted * workload.batch_size / len(data)) + 1,
        batch_size=workload.batch_size,
        lanes=plan.lanes,
        callbacks=[watch],
        run_dir=False,
        progress="quiet",
    )
    return watch.latencies_ms


def _trainer(workload: Workload, plan: Plan, sync: str, workers: int) -> Trainer:
    torch.manual_seed(plan.seed)
    return Trainer(
        workload.model(),
        loss=workload.loss,
        optimizer=workload.optimizer,
        metrics=list(workload.metrics),
        workers=workers,
        sync=sync,
        layout=plan.layout,
        engine=plan.engine,
        seed=plan.seed,
    )


class _Stopwatch(Callback):
    """The time from the beginning of the second epoch to the end of the last; the first one warms up."""

    def __init__(self) -> None:
        self.started = 0.0
        self.seconds = 0.0

    def on_epoch_begin(self, state: State) -> None:
        if state.epoch == 1:
            self.started = time.perf_counter()

    def on_epoch_end(self, state: State) -> None:
        self.seconds = time.perf_counter() - self.started


class _StepWatch(Callback):
    """The time of single steps, after as many steps to warm up; ends the run when there are enough."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.latencies_ms: list[float] = []
        self._seen = 0
        self._started = 0.0

    def on_step_begin(self, state: State) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, state: State) -> None:
        elapsed_ms = 1e3 * (time.perf_counter() - self._started)
        self._seen += 1
        if self._seen > self.wanted:
            self.latencies_ms.append(elapsed_ms)
        if len(self.latencies_ms) == self.wanted:
            state.stop("measured")


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """Throughput over workers with the ideal line, and the bill beside it, as a picture."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingExtra("--plot", "plot") from error
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for sync in dict.fromkeys(row.sync for row in measurements):
        rows = [row for row in measurements if row.sync == sync]
        left.plot([row.workers for row in rows], [row.speedup for row in rows], marker="o", label=sync)
    counts = sorted({row.workers for row in measurements})
    base = measurements[0].workers
    left.plot(counts, [count / base for count in counts], ":", color="gray", label="ideal")
    left.set(xlabel="workers", ylabel="speed-up", xticks=counts)
    left.legend()
    names = [f"{row.sync} {row.workers}" for row in measurements]
    below = np.zeros(len(measurements))
    for phase in dict.fromkeys(phase for row in measurements for phase in row.bill):
        totals = [sum(row.bill.values()) or 1.0 for row in measurements]
        shares = np.array(
            [100 * row.bill.get(phase, 0.0) / total for row, total in zip(measurements, totals, strict=True)]
        )
        right.bar(names, shares, bottom=below, label=phase)
        below += shares
    right.set(ylabel="share of worker time (%)")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
