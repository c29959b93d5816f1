"""What extra workers buy: the same job measured at several worker counts, with the bill of where the time went.

Lanes are the same at every count, so every count does the same mathematics; the digest of the weights shows it.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from manyhands.train.strategy import resolve_sync
from manyhands.train.team import worker_range
from manyhands.train.trainer import Trainer

__all__ = ["Measurement", "Plan", "Workload", "check_plot", "choose_lanes", "measure", "plot"]

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
    """Timed steps of each repeat, rounded up to whole epochs; one epoch more to warm up."""
    repeats: int = 3
    layout: str = "whole"
    engine: str = "local"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "repeats", "lanes"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)}: valid: a whole number of at least 1.")
        for sync in self.syncs:  # all of it now, and not when half of it is measured
            resolve_sync(sync)
        for count in self.workers:
            worker_range(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of the table."""

    sync: str
    workers: int
    steps: int
    """Timed steps of each repeat."""
    samples_per_s: float
    """The median of the repeats."""
    samples_per_s_range: tuple[float, float]
    """The slowest and the fastest repeat."""
    speedup: float
    """Against the first row, by medians."""
    latency_p50_ms: float
    latency_p95_ms: float
    """From the beginning of a step to its commit as the caller sees it, in a run of its own, one step at a time."""
    bill: Mapping[str, float]
    """Seconds of all workers together, by phase, over all repeats."""
    updates: Mapping[str, int]
    """Of asynchronous servers, in the last repeat: applied, dropped, and how stale."""
    bytes: Mapping[str, int]
    """With a codec, in the last repeat: sent, received, and over how many samples."""
    digest: str

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class _Case:
    """A sync and a worker count, with what its repeats gave."""

    sync: str
    workers: int
    rates: list[float] = field(default_factory=list)
    bill: Counter[str] = field(default_factory=Counter)
    updates: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    latencies_ms: list[float] = field(default_factory=list)


def choose_lanes(workers: Sequence[int], batch_size: int) -> int:
    """A number of lanes that every worker count can share evenly, where it stays small."""
    even = math.lcm(*workers)
    return even if even <= min(MOST_LANES, batch_size) else max(workers)


def measure(workload: Workload, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> list[Measurement]:
    """A measurement for each sync and worker count; ``tell`` hears of each repeat.

    The cases take turns, so that a machine which is busy for a while harms them alike.
    """
    adapted = adapt(workload.data().train)
    rows = min(len(adapted.source), plan.steps * workload.batch_size)
    data = SelectedSource(adapted.source, np.arange(rows))
    epochs = math.ceil(plan.steps / math.ceil(rows / workload.batch_size))
    cases = [_Case(sync=sync, workers=workers) for sync in plan.syncs for workers in plan.workers]
    for repeat in range(plan.repeats):
        for case in cases:
            _measure_throughput(workload, plan, data, epochs, case)
            tell(f"repeat {repeat + 1}: {case.sync} with {case.workers}: {case.rates[-1]:,.0f} samples/s")
    for case in cases:
        case.latencies_ms = _latencies_ms(workload, plan, data, case)
    first = statistics.median(cases[0].rates)
    return [
        Measurement(
            sync=case.sync,
            workers=case.workers,
            steps=epochs * math.ceil(rows / workload.batch_size),
            samples_per_s=statistics.median(case.rates),
            samples_per_s_range=(min(case.rates), max(case.rates)),
            speedup=statistics.median(case.rates) / first,
            latency_p50_ms=float(np.percentile(case.latencies_ms, 50)),
            latency_p95_ms=float(np.percentile(case.latencies_ms, 95)),
            bill=dict(case.bill),
            updates=case.updates,
            bytes=case.bytes,
            digest=case.digest,
        )
        for case in cases
    ]


def _measure_throughput(workload: Workload, plan: Plan, data: SelectedSource, epochs: int, case: _Case) -> None:
    stopwatch = _Stopwatch()
    trainer = _trainer(workload, plan, case)
    history = trainer.fit(
        data,
        epochs=1 + epochs,
        batch_size=workload.batch_size,
        lanes=plan.lanes,
        callbacks=[stopwatch],
        run_dir=False,
        progress="quiet",
    )
    case.rates.append(epochs * len(data) / stopwatch.seconds)
    case.bill.update(history.bill)
    case.updates, case.bytes = history.updates, history.bytes
    case.digest = digest(trainer.model)


def _latencies_ms(workload: Workload, plan: Plan, data: SelectedSource, case: _Case) -> list[float]:
    """Measured apart from the throughput: a caller that looks at every step holds the workers up."""
    watch = _StepWatch(min(LATENCY_STEPS, plan.steps))
    _trainer(workload, plan, case).fit(
        data,
        epochs=math.ceil(2 * watch.wanted * workload.batch_size / len(data)) + 1,
        batch_size=workload.batch_size,
        lanes=plan.lanes,
        callbacks=[watch],
        run_dir=False,
        progress="quiet",
    )
    return watch.latencies_ms


def _trainer(workload: Workload, plan: Plan, case: _Case) -> Trainer:
    torch.manual_seed(plan.seed)
    return Trainer(
        workload.model(),
        loss=workload.loss,
        optimizer=workload.optimizer,
        metrics=list(workload.metrics),
        workers=case.workers,
        sync=case.sync,
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
    """The time of single steps, for ``wanted`` batches after as many to warm up; then it ends the run."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.latencies_ms: list[float] = []
        self._started = 0.0

    def on_step_begin(self, state: State) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, state: State) -> None:
        elapsed_ms = 1e3 * (time.perf_counter() - self._started)
        if state.step > self.wanted:
            self.latencies_ms.append(elapsed_ms)
        if state.step >= 2 * self.wanted:
            state.stop("measured")


def check_plot() -> None:
    """Refuse a plot that could not be drawn, before anything is measured for it."""
    _pyplot()


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingExtra("--plot", "plot") from error


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """Speed-up with the ideal line, throughput, latency, and the bill, as a picture."""
    pyplot = _pyplot()
    figure, ((speedup, rate), (latency, bill)) = pyplot.subplots(2, 2, figsize=(10, 7))
    for sync in dict.fromkeys(row.sync for row in measurements):
        rows = [row for row in measurements if row.sync == sync]
        counts, rates = [row.workers for row in rows], [row.samples_per_s for row in rows]
        around = [[abs(end - rate) for end, rate in zip(ends, rates, strict=True)] for ends in _ranges(rows)]
        speedup.plot(counts, [row.speedup for row in rows], marker="o", label=sync)
        rate.errorbar(counts, rates, yerr=around, marker="o", capsize=3, label=sync)
        line = latency.plot(counts, [row.latency_p50_ms for row in rows], marker="o", label=f"{sync}, p50")[0]
        latency.plot(counts, [row.latency_p95_ms for row in rows], "--", color=line.get_color(), label=f"{sync}, p95")
    counts = sorted({row.workers for row in measurements})
    base = measurements[0].workers
    speedup.plot(counts, [count / base for count in counts], ":", color="gray", label="ideal")
    for axes, label in ((speedup, "speed-up"), (rate, "samples/s"), (latency, "step (ms)")):
        axes.set(xlabel="workers", ylabel=label, xticks=counts, ylim=(0, None))
        axes.legend()
    _draw_bill(bill, measurements)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _ranges(rows: Sequence[Measurement]) -> list[list[float]]:
    """The slowest repeats, and the fastest."""
    return [[row.samples_per_s_range[end] for row in rows] for end in (0, 1)]


def _draw_bill(axes: Any, measurements: Sequence[Measurement]) -> None:
    names = [f"{row.sync}\n{row.workers}" for row in measurements]
    below = np.zeros(len(measurements))
    for phase in dict.fromkeys(phase for row in measurements for phase in row.bill):
        totals = [sum(row.bill.values()) or 1.0 for row in measurements]
        shares = np.array(
            [100 * row.bill.get(phase, 0.0) / total for row, total in zip(measurements, totals, strict=True)]
        )
        axes.bar(names, shares, bottom=below, label=phase)
        below += shares
    axes.set(ylabel="share of worker time (%)")
    axes.tick_params(axis="x", labelsize="small")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
