"""What one measured training run is told and what it reports, in the same words for every side.

A side is one process tree: `python -m benchmarks.ours ...` or `python -m benchmarks.peers ...`. It takes the options of
`Job` and `Clock`, and reports one JSON object. This module does not import torch, so that a launcher stays light.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

Mark = tuple[float, int]  # (unix time, step that was final at that time)
Fields = TypeVar("Fields")
WINDOW_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained and on how many processes; options of every side."""

    model: str = "mlp"
    rows: int = 12_800
    batch_size: int = 128
    workers: int = 1
    threads: int = 1
    storage: str = "memory"  # "memory", "shared" for shared memory, or "file" for a memory-mapped array
    slow_slot: int = -1  # the worker that is four times slower (model "sleeper" only); -1: none


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How long a side runs and where its report goes."""

    seconds: float = 6.0  # measured time, after the warm-up
    warm_s: float = 1.0  # counted from the first step, not measured
    steps: int = 0  # run exactly this many steps instead (ours: rounded up to whole epochs)
    started: float = 0.0  # unix time just before the side was started; 0: this process's own start
    output: str = ""  # also write the report to this file

    def start_time(self) -> float:
        return self.started or psutil.Process().create_time()


def add_options(parser: argparse.ArgumentParser, record: type[Any]) -> None:
    """One option per field of the dataclass, typed by the field's default."""
    for field in dataclasses.fields(record):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, dest=field.name, type=type(field.default), default=field.default)


def read_options(namespace: argparse.Namespace, record: type[Fields]) -> Fields:
    names = [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]
    return record(**{name: getattr(namespace, name) for name in names})


def as_options(record: Any) -> list[str]:
    """The command-line options that rebuild the record in another process."""
    pairs = [("--" + field.name.replace("_", "-"), getattr(record, field.name)) for field in dataclasses.fields(record)]
    return [f"{option}={value}" for option, value in pairs]


def window_rates(marks: Sequence[Mark], *, batch_size: int, warm_s: float, window_s: float = WINDOW_S) -> list[float]:
    """Samples per second in each full window after the warm-up; windows begin and end on marks."""
    rates: list[float] = []
    start: Mark | None = None
    for mark in marks:
        if mark[0] < marks[0][0] + warm_s:
            continue
        if start is None:
            start = mark
        elif mark[0] - start[0] >= window_s:
            rates.append((mark[1] - start[1]) * batch_size / (mark[0] - start[0]))
            start = mark
    return rates


def mean_rate(marks: Sequence[Mark], *, batch_size: int, warm_s: float) -> float | None:
    """Samples per second over everything after the warm-up: includes rare costs, which a median of windows hides."""
    steady = [mark for mark in marks if mark[0] >= marks[0][0] + warm_s]
    if len(steady) < 2 or steady[-1][0] <= steady[0][0]:
        return None
    return (steady[-1][1] - steady[0][1]) * batch_size / (steady[-1][0] - steady[0][0])


def report(job: Job, clock: Clock, marks: Sequence[Mark], *, first_step_time: float, **more: object) -> None:
    """Prints the side's JSON line, and writes it to `clock.output` if one was given."""
    rates = window_rates(marks, batch_size=job.batch_size, warm_s=clock.warm_s)
    mean = mean_rate(marks, batch_size=job.batch_size, warm_s=clock.warm_s)
    line = json.dumps(
        {
            **dataclasses.asdict(job),
            "samples_per_s": statistics.median(rates) if rates else mean,
            "mean_samples_per_s": mean,
            "windows": len(rates),
            "steps": marks[-1][1],
            "start_to_first_step_s": first_step_time - clock.start_time(),
            **more,
        }
    )
    if clock.output:
        Path(clock.output).write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)


def now() -> float:
    """Unix time: the only clock that every process of a side shares with the one that started it."""
    return time.time()
