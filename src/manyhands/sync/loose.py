"""The gradient of a lane that has not been copied into the arena.

Whoever finishes a step last needs no copy of its own gradient to add the others to it. As long as it has none, its lane
has no stamp: should it die, the lane is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Loose"]


@dataclass(slots=True)
class Loose:
    """The gradient of ``lane``, by the number of the parameter; None where the lane did not touch it."""

    lane: int
    gradients: Sequence[torch.Tensor | None]
    homes: Sequence[torch.Tensor]

    @property
    def complete(self) -> bool:
        """Whether every parameter has a gradient."""
        return all(gradient is not None for gradient in self.gradients)

    @torch.no_grad()
    def settle(self) -> None:
        """Copy it into the arena."""
        for home, gradient in zip(self.homes, self.gradients, strict=True):
            if gradient is None:
                home.zero_()
            else:
                home.copy_(gradient)
