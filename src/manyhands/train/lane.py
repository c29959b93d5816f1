"""Computes one lane of one step: forward, backward, and everything that makes it a function of (seed, step, lane).

The gradient goes into the lane's buffer as autograd produces it, parameter by parameter, so no second copy of the
gradients ever exists. Random streams are bound to the lane: whoever computes it draws the same numbers.
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
from manyhands.core.order import stream_seed
from manyhands.data.source import Source, call_model
from manyhands.errors import ModelError, NotFinite
from manyhands.sync.allreduce import Stepper
from manyhands.sync.clip import Clip
from manyhands.sync.optimizer_state import Template
from manyhands.train.metrics import Metric
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
    spin_s: float = 0.0
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

    def __init__(self, arena: Arena, job: Job, stepper: Stepper) -> None:
        assert job.source is not None
        assert job.course is not None
        self._arena, self._job, self._stepper, self._course = arena, job, stepper, job.course
        self._source = job.source
        self._agreed = arena.buffers()
        self._lane_buffers = [arena.buffers(lane) for lane in range(arena.spec.lanes)]
        self._gradients = [arena.gradients(lane) for lane in range(arena.spec.lanes)]
        self._targets: list[torch.Tensor] = []
        self._written = bytearray(len(arena.spec.parameters))
        self._holders = _buffer_holders(job.model, [entry.name for entry in arena.spec.buffers])
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        """Move every gradient to its place the moment autograd has it."""
        position = {entry.name: index for index, entry in enumerate(self._arena.spec.parameters)}
        for name, parameter in self._job.model.named_parameters():
            index = position.get(name)
            if index is not None:
                parameter.register_post_accumulate_grad_hook(self._collector(index))
            elif parameter.requires_grad:  # the optimizer does not hold it: nobody will use the gradient
                parameter.requires_grad_(False)

    def _collector(self, index: int) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if self._written[index]:
                self._targets[index].add_(gradient)
            else:
                self._targets[index].copy_(gradient)
                self._written[index] = 1
            parameter.grad = None

        return collect

    def run(self, lane: int) -> None:
        """Compute the lane in the stepper's step and stamp it."""
        step, stepper = self._stepper.step, self._stepper
        stepper.begin_lane(lane)
        positions = self._course.positions(self._arena.order, step, lane)
        total = self._course.batch_rows(step)
        self._targets = self._gradients[lane]
        self._written[:] = bytes(len(self._written))
        for buffer, agreed in zip(self._buffers(), self._agreed, strict=True):
            buffer.copy_(agreed)
        stats = [0.0] * self._arena.spec.stats
        pieces = np.array_split(positions, min(self._job.accumulate, len(positions)))
        for number, rows in enumerate(pieces):
            self._run_piece(step, lane, number, rows, total, stats)
        self._fill_missing(lane)
        for buffer, kept in zip(self._buffers(), self._lane_buffers[lane] if self._agreed else (), strict=True):
            kept.copy_(buffer)
        self._arena.stats[step % self._arena.spec.ring, lane] = stats
        bad = not math.isfinite(stats[1])
        if bad and self._job.nan == "stop":
            raise self._not_finite(step, lane, positions)
        stepper.end_lane(lane, bad=bad)

    def _run_piece(self, step: int, lane: int, number: int, rows: np.ndarray, total: int, stats: list[float]) -> None:
        job = self._job
        self._stepper.enter("data")
        set_seed(stream_seed(job.seed, "data", step, lane, number))
        inputs, target = self._source.fetch(rows)
        self._stepper.enter("compute")
        set_seed(stream_seed(job.seed, "lane", step, lane, number))
        with job.autocast():
            output = call_model(job.model, inputs)
            loss = job.loss(output, target)
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            received = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ModelError(f"the loss returned {received}; valid is a scalar tensor, the mean over the batch")
        # Weighted here, the lanes need only be added up: the sum is the gradient of the mean over the global batch.
        weight = len(rows) / total
        (loss if weight == 1 else loss * weight).backward()  # type: ignore[no-untyped-call]
        stats[0] += len(rows)
        stats[1] += float(loss.detach()) * len(rows)
        at = 2
        with torch.no_grad():
            for metric in job.metrics:
                for offset, value in enumerate(metric.update(_detached(output), target)):
                    stats[at + offset] += float(value)
                at += metric.width

    def _fill_missing(self, lane: int) -> None:
        present = self._arena.present[lane]
        if 0 not in self._written:
            present[:] = 1
            return
        for index, written in enumerate(self._written):
            present[index] = written
            if not written:
                self._targets[index].zero_()

    def _buffers(self) -> list[torch.Tensor]:
        return [holder._buffers[name] for holder, name in self._holders]  # type: ignore[misc]

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


def _buffer_holders(model: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """Module and attribute of each buffer: looked up anew each time, because a module may replace its buffer."""
    holders = []
    for name in names:
        path, _, attribute = name.rpartition(".")
        holders.append((model.get_submodule(path), attribute))
    return holders
