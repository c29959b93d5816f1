"""One arena in one process, with as many appliers as a test wants, and torch's optimizer on whole tensors beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.sync.apply import Applier
from manyhands.sync.clip import Clip
from manyhands.sync.optimizer_state import hyper_row
from manyhands.train.state import ModelState

Factory = Callable[[Sequence[Any]], torch.optim.Optimizer]

# One that is cut into four units, one whose last unit has an odd tail, small ones, and other types.
SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((300, 400), torch.float32),
    ((33_001,), torch.float32),
    ((7, 3), torch.float32),
    ((1,), torch.float32),
    ((20_000,), torch.float64),
    ((5,), torch.float32),
]


def make_parameters(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in shapes]


class Rig:
    """``slots`` appliers over one arena, and the reference."""

    def __init__(
        self,
        factory: Factory,
        *,
        lanes: int = 2,
        slots: int = 1,
        clips: Sequence[Clip] = (),
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]] = SHAPES,
    ) -> None:
        self.model = nn.ParameterList(make_parameters(shapes))
        self.optimizer = factory(list(self.model.parameters()))
        self.state = ModelState(self.model, self.optimizer, lanes=lanes, samples=0, stats=1, ring=1)
        self.arena, self.lanes = self.state.arena, range(lanes)
        template = self.state.template
        assert template is not None
        self.keys = template.hyper
        self.appliers = [Applier(self.arena, template, clips, slot) for slot in range(slots)]
        self.owners = np.arange(len(self.arena.spec.units)) * slots // max(len(self.arena.spec.units), 1)
        self.plain = make_parameters(shapes)
        self.reference = factory(self.plain)
        self.random = torch.Generator().manual_seed(1)

    def fill_lanes(self, scale: float = 1.0) -> list[torch.Tensor]:
        """New gradients in every lane; returns their sum, in lane order, for each parameter."""
        total: list[torch.Tensor] = []
        for lane in self.lanes:
            for index, gradient in enumerate(self.arena.gradients(lane)):
                gradient.copy_(torch.randn(gradient.shape, generator=self.random) * scale)
                if lane == 0:
                    total.append(gradient.clone())
                else:
                    total[index].add_(gradient)
            self.arena.present[lane] = 1
        return total

    def apply(self, step: int) -> None:
        """The apply phase as the owners of the units would do it, the last one first."""
        lanes = list(self.lanes)
        norm = 0.0
        if self.appliers[0].needs_norm:
            for slot, applier in enumerate(self.appliers):
                for run in applier.batches(self.units_of(slot)):
                    applier.norms(run, lanes)
            norm = self.appliers[0].total_norm()
        for slot, applier in reversed(list(enumerate(self.appliers))):
            applier.begin_step(self.hyper(), lanes)
            for run in applier.batches(self.units_of(slot)):
                applier.apply(run, lanes, step, norm)

    def hyper(self) -> np.ndarray:
        """The learning rates and the like of the next step."""
        return np.array(hyper_row(self.optimizer, self.keys))

    def units_of(self, slot: int) -> list[int]:
        units: list[int] = np.flatnonzero(self.owners == slot).tolist()
        return units

    def give_away(self, owners: Sequence[int] | np.ndarray) -> None:
        """Other owners from now on."""
        self.owners = np.asarray(owners)
        for applier in self.appliers:
            applier.forget()

    def step_reference(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.plain, gradients, strict=True):
            parameter.grad = gradient
        self.reference.step()

    def values(self) -> list[torch.Tensor]:
        return self.arena.parameters()

    def image(self) -> dict[str, bytes]:
        """All bytes that the apply phase may change."""
        arena = self.arena
        found = {f"plane {i}": arena.plane(i).numpy().tobytes() for i in range(1 + len(arena.spec.planes))}
        found |= {f"extra {i}": arena.extra(i).numpy().tobytes() for i in range(len(arena.spec.extras))}
        found |= {"scalars": arena.scalars.tobytes(), "ready": arena.control.unit_ready.tobytes()}
        return found

    def close(self) -> None:
        self.arena.close()
