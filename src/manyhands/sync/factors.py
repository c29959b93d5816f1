"""Gradients of large linear layers, kept as the two factors that they are the product of.

The gradient of a weight is a product: what came back to the outputs, times what went in. For a batch of a few rows the
factors are a small part of it. A lane that leaves these instead writes, and the others read, a hundredth of the memory.
Whoever applies a unit makes the products of its rows, where they are needed and while they are in the cache, and adds
them up in the order of the lanes as ever.

Where a weight is cut depends on its shape alone, and each cut is one product of a lane. So the bits are the same
whoever applies what. They are also those of lanes that leave their gradients whole, as other ways of agreeing and
``mh.launch`` have them: a product over few samples is added to the sum as one rounded number, not piece by piece.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from manyhands.comm.arena import Arena

__all__ = ["FACTORED_BYTES", "Products", "factors_in", "pay", "put_factors", "rows_together"]

FACTORED_BYTES = 2 << 20
"""The smallest weight for which it pays."""
_LEAST_BYTES, _MOST_BYTES = 128 * 1024, 1 << 20  # of a product that is made at once: what the cache holds
_ROWS, _LEAST_ROWS = 16, 32  # a cut is at a multiple of these; fewer make a product slow
# Of a product that kernels finish before they add it to what there is. One over a single sample they may add unrounded.
_LEAST_SAMPLES, _MOST_SAMPLES = 2, 128
_ALIGNED = 16  # numbers


def rows_together(shape: Sequence[int]) -> int:
    """How many rows of a weight are one product; 0 where the rows are too long for it."""
    outputs, inputs = shape
    size = min(max(outputs * inputs * 4 // 16, _LEAST_BYTES), _MOST_BYTES)
    rows = size // (inputs * 4) // _ROWS * _ROWS
    return rows if rows >= _LEAST_ROWS else 0


def pay(shape: Sequence[int], samples: int) -> bool:
    """Whether to leave factors: they are over few ``samples``, and take less than half of the gradient's room."""
    outputs, inputs = shape
    small = 2 * (samples * (outputs + inputs) + _ALIGNED) <= outputs * inputs
    return small and _LEAST_SAMPLES <= samples <= _MOST_SAMPLES


def factors_in(home: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors, (samples, outputs) and (samples, inputs), that lie where a gradient would."""
    (outputs, inputs), flat = home.shape, home.view(-1)
    second = -(-samples * outputs // _ALIGNED) * _ALIGNED
    first = flat[: samples * outputs].view(samples, outputs)
    return first, flat[second : second + samples * inputs].view(samples, inputs)


def put_factors(home: torch.Tensor, of_outputs: torch.Tensor, inputs: torch.Tensor) -> None:
    """Leave the factors where the gradient would lie."""
    for place, factor in zip(factors_in(home, len(inputs)), (of_outputs, inputs), strict=True):
        place.copy_(factor)


class Products:
    """Adds up over lanes what some of them have left as factors."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._homes: dict[tuple[int, int], torch.Tensor] = {}
        self._spent_ns = 0

    def wanted(self, parameter: int, lanes: Sequence[int]) -> bool:
        """Whether any of ``lanes`` has left the gradient of ``parameter`` as factors."""
        return bool(self._arena.factor_rows[lanes, parameter].any())

    def add_up(self, total: torch.Tensor, parameter: int, start: int, lanes: Sequence[int]) -> torch.Tensor:
        """The sum over ``lanes`` in their order, of rows from byte ``start`` of a lane on, as long as ``total``."""
        begun, entry = time.perf_counter_ns(), self._arena.spec.parameters[parameter]
        rows = total.view(-1, entry.shape[1])
        first = (start - entry.offset) // (rows.shape[1] * rows.element_size())
        for number, lane in enumerate(lanes):
            home, anew = self._home(lane, parameter), number == 0
            if samples := int(self._arena.factor_rows[lane, parameter]):
                of_outputs, inputs = factors_in(home, samples)
                ours = of_outputs[:, first : first + len(rows)].t()
                torch.mm(ours, inputs, out=rows) if anew else rows.addmm_(ours, inputs)
                continue
            own = home[first : first + len(rows)]
            rows.copy_(own) if anew else rows.add_(own)
        self._spent_ns += time.perf_counter_ns() - begun
        return total

    def take_spent_ns(self) -> int:
        """How long products took since the last call: this is the backward pass of lanes, put off until now."""
        spent, self._spent_ns = self._spent_ns, 0
        return spent

    def _home(self, lane: int, parameter: int) -> torch.Tensor:
        """Where the gradient of a parameter lies in a lane, or its factors."""
        if (lane, parameter) not in self._homes:
            self._homes[lane, parameter] = self._arena.gradients(lane)[parameter]
        return self._homes[lane, parameter]
