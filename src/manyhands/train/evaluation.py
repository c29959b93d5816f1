"""Evaluate and predict on all workers: every row once, in order, the same on any number of them.

Rows are cut into fixed batches, so what a worker computes does not depend on who else computes; sums are added in
the order of the rows. A chunk of batches that a dying worker took along is given to another.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from manyhands.comm import ship
from manyhands.core.order import stream_seed
from manyhands.data.source import Source, call_model
from manyhands.engine.channel import Message
from manyhands.errors import ModelError, RunError
from manyhands.train.lane import Job, set_seed
from manyhands.train.losses import check_scalar
from manyhands.train.metrics import Metric
from manyhands.train.supervisor import Supervisor

__all__ = ["Dispatch", "evaluate_batch", "predict_batch"]

_CHUNKS_PER_WORKER = 8
_STALL_S = 600.0


# -- in the worker ------------------------------------------------------------------------------------------
def _forward(job: Job, source: Source, rows: np.ndarray) -> tuple[Any, Any]:
    set_seed(stream_seed(job.seed, "infer", int(rows[0])))
    inputs, target = source.fetch(rows)
    with torch.no_grad(), job.autocast():
        return call_model(job.model, inputs), target


def evaluate_batch(job: Job, source: Source, rows: np.ndarray) -> dict[str, Any]:
    """The sums of one batch: the loss, then those of the metrics."""
    output, target = _forward(job, source, rows)
    with torch.no_grad():
        sums = [float(check_scalar(job.loss(output, target))) * len(rows)]
        for metric in job.metrics:
            sums += [float(value) for value in metric.update(output, target)]
    return {"sums": sums}


def predict_batch(job: Job, source: Source, rows: np.ndarray) -> dict[str, Any]:
    """The output rows of one batch as bytes."""
    output, _ = _forward(job, source, rows)
    if not isinstance(output, torch.Tensor) or output.shape[:1] != (len(rows),):
        received = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ModelError(
            f"predict: the model returned {received} for {len(rows)} rows; valid is a tensor with a row for each"
        )
    raw = output.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return {"rows": raw, "shape": list(output.shape), "dtype": str(output.dtype).removeprefix("torch.")}


# -- in the caller ------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Dispatch:
    """Hands chunks of rows to the workers of a session and collects what comes back."""

    supervisor: Supervisor
    source: Source
    batch: int
    kind: str
    heard: queue.SimpleQueue[tuple[int, Message | None]]
    check: Callable[[], None]
    number: int
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    _todo: deque[tuple[int, int]] = field(default_factory=deque)
    _held: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _told: dict[int, int] = field(default_factory=dict)  # slot -> pid of the process that has the source

    def run(self) -> list[dict[str, Any]]:
        """The results of all batches in the order of the rows."""
        parcel = ship.pack(self.source, "the data set")
        try:
            return self._collect(parcel)
        finally:
            parcel.close()

    def _collect(self, parcel: ship.Parcel) -> list[dict[str, Any]]:
        rows = len(self.source)
        workers = max(len(self.supervisor.membership.active), 1)
        chunk = max(rows // (workers * _CHUNKS_PER_WORKER * self.batch), 1) * self.batch
        self._todo.extend((first, min(first + chunk, rows)) for first in range(0, rows, chunk))
        wanted = -(-rows // self.batch)
        deadline = time.monotonic() + _STALL_S
        while len(self.results) < wanted:
            self.check()
            for slot in self.supervisor.membership.active:
                self._feed(slot, parcel)
            try:
                slot, message = self.heard.get(timeout=0.05)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise RunError(f"{self.kind}: no batch was finished within {_STALL_S:.0f} s") from None
                continue
            deadline = time.monotonic() + _STALL_S
            self._take(slot, message)
        return [self.results[first] for first in sorted(self.results)]

    def _feed(self, slot: int, parcel: ship.Parcel) -> None:
        """Keep two chunks with every worker: one at work, one waiting."""
        seat = self.supervisor.seats.get(slot)
        # In this order: a successor that cannot listen yet has had another status since before it had the seat.
        if seat is None or self.supervisor.membership.status.get(slot) != "active":
            return
        held = self._held.setdefault(slot, [])
        if self._told.get(slot) != seat.process.pid:  # also a successor of one whose end we have not heard of yet
            self._told[slot] = seat.process.pid
            self._todo.extendleft(reversed(held))
            held.clear()
            body = {"source": self.number, "code": parcel.code, "sizes_bytes": parcel.sizes_bytes}
            self.supervisor.send(slot, "source", body, parcel.fds)
        while self._todo and len(held) < 2:
            first, stop = self._todo.popleft()
            body = {"source": self.number, "rows": [first, stop], "batch": self.batch, "task": self.number}
            if not self.supervisor.send(slot, self.kind, body):
                self._todo.appendleft((first, stop))
                return
            held.append((first, stop))

    def _take(self, slot: int, message: Message | None) -> None:
        if message is None:  # the worker is gone: others do what it held
            self._todo.extendleft(reversed(self._held.pop(slot, [])))
            return
        if message.body.get("task") != self.number:
            return
        first = message.body["first"]
        self.results[first] = message.body
        self.supervisor.progress += 1
        held = self._held.get(slot, [])
        self._held[slot] = [c for c in held if not (c[0] <= first < c[1] and first + message.body["count"] >= c[1])]


def add_up(results: list[dict[str, Any]], metrics: list[Metric]) -> dict[str, float]:
    """Loss and metrics from the sums of the batches, added in row order."""
    count = sum(result["count"] for result in results)
    sums = [0.0] * (1 + sum(metric.width for metric in metrics))
    for result in results:
        for index, value in enumerate(result["sums"]):
            sums[index] += value
    values = {"loss": sums[0] / count}
    at = 1
    for metric in metrics:
        values[metric.name] = metric.result(sums[at : at + metric.width], count)
        at += metric.width
    return values
