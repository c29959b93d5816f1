"""Local steps: the user's optimizer at work on a share's own copy of the parameters.

A round is a step of the arena, a share is a lane, and the outer optimizer is the one that is applied: a share leaves
in its lane how far it moved the agreed parameters, where all-reduce leaves a gradient. So the sum in lane order, the
repair of a death, plans and commits are those of ``sync/allreduce.py``. What is new is here: the steps within a share,
and what it keeps from round to round: the state of its optimizer and, where a round agrees on a fragment of the
parameters alone, its own values of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from manyhands.comm.arena import Arena
from manyhands.sync.clip import Clip
from manyhands.sync.optimizer_state import StateLayout, Template, row_sparse

__all__ = ["OWN", "Inner", "ShareMemory", "memory_of"]

_INNER, OWN = "inner/", "own"
_COUNTS = 3


def memory_of(layout: StateLayout, parameters: int, *, own: bool = False) -> tuple[list[str], int]:
    """The planes and the count of single numbers that a share keeps, under an optimizer with this state; ``own``: with
    parameters of its own."""
    planes = [_INNER + key for key in layout.planes] + [OWN] * own
    return planes, parameters * (1 + len(layout.scalars) + _COUNTS)


class ShareMemory:
    """What every share keeps, in what the lanes of an arena do.

    The single numbers of a share are two tables: for each parameter 1 once it has state, then those that the optimizer
    keeps for it; and the counts since it was agreed on.
    """

    def __init__(self, arena: Arena, scalars: Sequence[str]) -> None:
        self._arena, self._scalars = arena, list(scalars)
        self._planes = [name.removeprefix(_INNER) for name in arena.spec.memory if name.startswith(_INNER)]

    def _table(self, step: int, lane: int) -> np.ndarray:
        numbers = self._arena.memory_numbers(step, lane)
        return numbers[: len(self._arena.spec.parameters) * (1 + len(self._scalars))].reshape(
            -1, 1 + len(self._scalars)
        )

    def counts(self, step: int, lane: int) -> np.ndarray:
        """For each parameter, since it was agreed on and as it is before ``step``: 1 if it had a gradient, the rows of
        the share, and those of all shares; a writable view."""
        numbers = self._arena.memory_numbers(step, lane)
        return numbers[len(self._arena.spec.parameters) * (1 + len(self._scalars)) :].reshape(-1, _COUNTS)

    def own(self, step: int, lane: int) -> list[torch.Tensor] | None:
        """The share's values of the parameters before ``step``, where it keeps any."""
        return self._arena.memory(step, lane).get(OWN)

    def read(self, step: int, lane: int) -> list[dict[str, torch.Tensor]]:
        """The state of each parameter as it is before ``step``, empty where there is none. Planes are views."""
        planes, states = self._arena.memory(step, lane), list[dict[str, torch.Tensor]]()
        for index, (ready, *numbers) in enumerate(self._table(step, lane).tolist()):
            state = {key: planes[_INNER + key][index] for key in self._planes if ready}
            if ready:
                pairs = zip(self._scalars, numbers, strict=True)
                state |= {key: torch.tensor(number, dtype=torch.float32) for key, number in pairs}
            states.append(state)
        return states

    @torch.no_grad()
    def write(self, step: int, lane: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Keep ``states`` as those before ``step``; what is in its place already is not copied."""
        planes, table = self._arena.memory(step, lane), self._table(step, lane)
        for index, state in enumerate(states):
            table[index] = 0
            if not state:
                continue
            for key in self._planes:
                home, value = planes[_INNER + key][index], state.get(key)
                if value is None:
                    home.zero_()
                elif value.data_ptr() != home.data_ptr():
                    home.copy_(value)
            table[index] = [1, *(float(state.get(key) or 0) for key in self._scalars)]


class Inner:
    """The parameters and the optimizer of the share that a worker computes."""

    def __init__(
        self,
        arena: Arena,
        template: Template,
        scalars: Sequence[str],
        clips: Sequence[Clip],
        begin_with: Sequence[torch.Tensor],
    ) -> None:
        """``begin_with``: the parameters that a share starts from, as they lie in the arena."""
        self._template, self._clips, self._step = template, tuple(clips), template.step
        self._memory = ShareMemory(arena, scalars)
        self._begun = begin_with
        self.parameters = [torch.empty_like(tensor) for tensor in begin_with]
        members = [(template.group_of[index], tensor) for index, tensor in enumerate(self.parameters)]
        self._optimizer = template.build(members)
        if template.kind is torch.optim.SGD:  # fused, it fails on a parameter that has its first gradient after others
            for group in self._optimizer.param_groups:
                group["fused"] = False
        self.touched = [False] * len(self.parameters)
        """Which parameters have had a gradient since they were agreed on."""
        self._counts = np.zeros((len(self.parameters), _COUNTS))
        self._row = b""

    @torch.no_grad()
    def begin(self, step: int, lane: int, agreed: Sequence[bool] | None = None) -> None:
        """Start a round from the state of the share and the agreed parameters; from its own values of those that the
        round before has not ``agreed`` on."""
        # Changed in the bank after the step: should this process die, the bank before it is as it was.
        self._memory.write(step + 1, lane, self._memory.read(step, lane))
        kept = None if agreed is None else self._memory.own(step, lane)
        self._counts = self._memory.counts(step, lane).copy()
        for index, state in enumerate(self._memory.read(step + 1, lane)):
            own = self.parameters[index]
            if kept is None or agreed is None or agreed[index]:
                own.copy_(self._begun[index])
                self._counts[index] = 0
            else:
                own.copy_(kept[index])
            own.grad = None
            self._optimizer.state[own] = state
        self.touched = self._counts[:, 0].astype(bool).tolist()

    @torch.no_grad()
    def step(self, row: np.ndarray, gradients: Sequence[torch.Tensor | None]) -> None:
        """One step of the user's optimizer with the numbers of ``row``. The gradients may be clipped in place."""
        if row.tobytes() != self._row:
            self._row = row.tobytes()
            self._template.set_hyper(self._optimizer, row.tolist())
        present = [gradient for gradient in gradients if gradient is not None]
        norm = _norm(present) if any(clip.needs_norm for clip in self._clips) else 0.0
        for clip in self._clips:
            for gradient in present:
                clip(gradient, norm)
        for index, (own, given) in enumerate(zip(self.parameters, gradients, strict=True)):
            self.touched[index] |= given is not None
            own.grad = row_sparse(given) if self._template.wants_sparse and given is not None else given
        self._step(self._optimizer)

    @torch.no_grad()
    def end(self, step: int, lane: int, rows: int, total: int) -> None:
        """The round is over, with ``rows`` of the ``total`` that all shares had in it: keep what the next one needs."""
        self._memory.write(step + 1, lane, [self._optimizer.state[own] for own in self.parameters])
        self._counts += [0, rows, total]
        self._counts[:, 0] = self.touched
        self._memory.counts(step + 1, lane)[:] = self._counts
        for kept, own in zip(self._memory.own(step + 1, lane) or (), self.parameters, strict=False):
            kept.copy_(own)

    @torch.no_grad()
    def change(self, index: int, out: torch.Tensor) -> None:
        """Write how far a parameter was moved, weighted by rows. Like a gradient, it points away from the aim."""
        _, rows, total = self._counts[index].tolist()
        torch.sub(self._begun[index], self.parameters[index], out=out).mul_(rows / total)


def _norm(gradients: Sequence[torch.Tensor]) -> float:
    total = 0.0
    for gradient in gradients:
        total += float(torch.linalg.vector_norm(gradient)) ** 2
    return float(total**0.5)
