"""The worker's side of ``mh.launch``: the ``me`` that a user's own loop works with.

The loop body runs once for each lane that this worker holds; how many that are may change at any step. What a lane
computes depends on the lane alone, so neither the body nor the result notices. A worker that starts late, or again,
runs the function from its beginning, and its loader passes over the steps that are already committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.core.order import epoch_order, lane_seed, stream_seed
from manyhands.data.adapt import adapt
from manyhands.data.source import Source
from manyhands.engine.channel import Channel
from manyhands.errors import UsageError
from manyhands.sync.allreduce import Stepper
from manyhands.sync.apply import Applier
from manyhands.sync.clip import Clip
from manyhands.sync.optimizer_state import Template, hyper_row, template_of
from manyhands.sync.pulse import Stopped
from manyhands.train.lane import set_seed
from manyhands.train.replica import Replica
from manyhands.train.schedule import Course
from manyhands.train.state import ModelState
from manyhands.train.trainable import check_model

__all__ = ["Hand", "LaunchJob"]


@dataclass(slots=True, kw_only=True)
class LaunchJob:
    """What a worker of ``mh.launch`` is given."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    lanes: int
    seed: int
    threads: int
    clips: tuple[Clip, ...]


class Hand:
    """One worker, as its user's function sees it: the ``me`` of ``def train(me): ...``."""

    def __init__(self, channel: Channel, arena: Arena | None, job: LaunchJob, slot: int) -> None:
        self._channel, self._arena, self._job = channel, arena, job
        self.slot = slot
        """The number of this worker. Results must not depend on it; printing may."""
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Any = None
        self._stepper: Stepper | None = None
        self._replica: Replica | None = None
        self._course: Course | None = None
        self._weight = 0.0
        self._lane: int | None = None
        self._stepped = -1
        self._data_stream, self._lane_stream = stream_seed(job.seed, "data"), stream_seed(job.seed, "lane")
        set_seed(stream_seed(job.seed, "launch"))  # every worker builds the same model

    @property
    def steps(self) -> int:
        """Steps committed so far."""
        return 0 if self._arena is None else self._arena.control.steps

    @property
    def first(self) -> bool:
        """True in one worker: for printing, so that a line appears once."""
        control = None if self._arena is None else self._arena.control
        return control is not None and control.leader(control.committed[1]) == self.slot

    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any = None) -> None:
        """Train ``model`` together. ``schedule``: a torch scheduler of the optimizer, stepped once per global step."""
        check_model(model, optimizer)
        self._model, self._optimizer, self._schedule = model, optimizer, schedule

    def loader(self, data: Any, batch_size: int = 32, *, shuffle: bool | None = None) -> _Loader:
        """This worker's part of every global batch of ``batch_size``; one iteration is one epoch."""
        adapted = adapt(data)
        course = Course(
            samples=len(adapted.source), batch_size=batch_size, lanes=self._job.lanes, drop_last=adapted.drop_last
        )
        if batch_size < course.lanes:
            raise UsageError(f"batch_size={batch_size} is smaller than lanes={course.lanes}; take a larger batch")
        return _Loader(self, adapted.source, course, adapted.shuffle if shuffle is None else shuffle)

    def backward(self, loss: torch.Tensor) -> None:
        """In place of ``loss.backward()``; the loss is the mean over the rows that the loader gave."""
        if self._replica is None or self._lane is None:
            raise UsageError("me.backward was called outside of a loop over me.loader(...)")
        self._replica.backward(loss, self._weight)

    def step(self) -> None:
        """In place of ``optimizer.step()`` and ``optimizer.zero_grad()``."""
        if self._replica is None or self._lane is None or self._stepper is None:
            raise UsageError("me.step was called outside of a loop over me.loader(...), or twice for one batch")
        self._replica.end(self._lane)
        self._stepper.end_lane(self._lane)
        self._lane = None

    # -- for the loader -------------------------------------------------------------------------------------
    def _enter(self, course: Course) -> Stepper:
        """Attach to the arena when the first loop begins."""
        if self._stepper is not None:
            if course != self._course:
                raise UsageError("a launch has one training loader; use a torch DataLoader for other data")
            return self._stepper
        model, optimizer = self._model, self._optimizer
        if model is None or optimizer is None:
            raise UsageError("call me.join(model, optimizer) before the loop over me.loader(...)")
        if self._arena is None:
            self._deliver_arena(model, optimizer, course)
        assert self._arena is not None
        trained = _bind(model, self._arena)
        template = template_of(optimizer, trained)
        self._replica = Replica(self._arena, model, ours=False)
        applier = Applier(self._arena, template, self._job.clips, self.slot)
        self._stepper = Stepper(self._arena, self.slot, applier, course.lane_rows, hyper=self._hyper(template))
        self._course, self._stepped = course, 0
        self._channel.send("ready")
        return self._stepper

    def _deliver_arena(self, model: nn.Module, optimizer: torch.optim.Optimizer, course: Course) -> None:
        """In the process that was started to find out: build the arena, hand it to the caller, end."""
        state = ModelState(model, optimizer, lanes=course.lanes, samples=0, stats=1, ring=1)
        self._channel.send("arena", {"spec": msgspec.to_builtins(state.arena.spec)}, [state.arena.segment.fd])
        raise Stopped

    def _hyper(self, template: Template) -> Callable[[int], np.ndarray]:
        """The optimizer's numbers in a step: the schedule is brought to that step, also in a worker that came late."""

        def row(step: int) -> np.ndarray:
            assert self._optimizer is not None
            while self._schedule is not None and self._stepped < step:
                self._optimizer._opt_called = True  # type: ignore[attr-defined]
                self._schedule.step()
                self._stepped += 1
            return np.array(hyper_row(self._optimizer, template.hyper))

        return row

    def _begin(self, stepper: Stepper, source: Source, positions: np.ndarray, lane: int, weight: float) -> Any:
        assert self._replica is not None
        stepper.begin_lane(lane)
        self._lane, self._weight = lane, weight
        self._replica.begin(lane)
        set_seed(lane_seed(self._data_stream, stepper.step, lane))
        batch = source.fetch(positions)
        stepper.enter("compute")
        set_seed(lane_seed(self._lane_stream, stepper.step, lane))
        return batch


class _Loader:
    """Yields (inputs, target) of this worker's lanes, step by step."""

    def __init__(self, hand: Hand, source: Source, course: Course, shuffle: bool) -> None:
        self._hand, self._source, self._course, self._shuffle = hand, source, course, shuffle
        self._epoch = 0

    def __len__(self) -> int:
        """Global steps in an epoch."""
        return self._course.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        hand, course = self._hand, self._course
        stepper = hand._enter(course)
        epoch, self._epoch = self._epoch, self._epoch + 1
        order = epoch_order(hand._job.seed, epoch, course.samples, self._shuffle)
        both = np.stack([order, order])
        end = (epoch + 1) * course.steps_per_epoch
        while True:
            match stepper.turn(end):
                case "over":
                    stepper.enter("outside")
                    return
                case "message":  # the only message to a worker of a launch is that it may leave
                    raise Stopped
            done = False
            while not done:
                for lane in stepper.lanes():
                    positions = course.positions(both, stepper.step, lane)
                    weight = len(positions) / course.batch_rows(stepper.step)
                    yield hand._begin(stepper, self._source, positions, lane, weight)
                    if hand._lane is not None:
                        raise UsageError("the loop body did not call me.step(); call it once for every batch")
                done = stepper.finish()


def _bind(model: nn.Module, arena: Arena) -> list[torch.Tensor]:
    """Let the model's parameters be views of the arena; returns the trained ones in arena order."""
    named = dict(model.named_parameters())
    for entries, views in ((arena.spec.parameters, arena.parameters()), (arena.spec.fixed, arena.fixed())):
        for entry, view in zip(entries, views, strict=True):
            named[entry.name].data = view
    return [named[entry.name] for entry in arena.spec.parameters]
