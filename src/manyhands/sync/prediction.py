"""Weight prediction: a worker is given the parameters as they will probably be when its update arrives (1809.02839).

A stale update does harm because it was computed with parameters that are gone by then. The steps of an optimizer with
momentum are alike: the next ones go about where the last one went. So a worker whose updates come s steps behind is
given w + s · (w − w before the last step), with s at most as far as the momentum reaches. Nothing of this is part of
the state: what a server keeps of the last step dies with it, and its successor predicts again as soon as it has taken a
step of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from manyhands.comm.arena import Arena, dtype_of
from manyhands.sync.optimizer_state import Template

__all__ = ["Prediction", "momentum_reach"]

Run = tuple[int, int]


def momentum_reach(template: Template) -> float:
    """For how many steps a gradient goes on to count, in the group where they are fewest; 0 without momentum.

    Further steps are not like the last one, which without momentum is mostly noise: it must not be multiplied.
    """
    return min(_momentum(group) / (1 - _momentum(group)) for group in template.groups)


def _momentum(group: Mapping[str, Any]) -> float:
    value = group.get("momentum") or group.get("betas")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first if isinstance(first, float) and 0 <= first < 1 else 0.0


class Prediction:
    """The parameters of some runs of units, before their last step. Costs a copy of them, once it is of use."""

    def __init__(self, arena: Arena, runs: Sequence[Run]) -> None:
        self._arena, self._runs = arena, list(runs)
        self._places: dict[Run, tuple[slice, torch.dtype]] = {}
        for first, stop in runs:
            head, last = arena.spec.units[first], arena.spec.units[stop - 1]
            dtype = dtype_of(arena.spec.parameters[head.parameter].dtype)
            self._places[first, stop] = slice(head.start, last.stop), dtype
        self._live: dict[Run, torch.Tensor] = {}
        self._earlier: dict[Run, torch.Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """From here on every step is watched."""
        if not self._earlier:
            self._live = {run: self._part(run, self._arena.plane(0)) for run in self._runs}
            self._earlier = {run: live.clone() for run, live in self._live.items()}

    @torch.no_grad()
    def keep(self, run: Run) -> None:
        """The units of the run are about to make a step."""
        if self._earlier:
            self._earlier[run].copy_(self._live[run])

    def forget(self) -> None:
        """The parameters have changed by something else than a step."""
        self._earlier.clear()

    @torch.no_grad()
    def write(self, place: torch.Tensor, steps: float) -> bool:
        """Write into a plane what the parameters will be after so many steps; False when nothing is known."""
        for run, earlier in self._earlier.items():
            torch.lerp(earlier, self._live[run], 1 + steps, out=self._part(run, place))
        return bool(self._earlier)

    def _part(self, run: Run, plane: torch.Tensor) -> torch.Tensor:
        part, dtype = self._places[run]
        return plane[part].view(dtype)
