"""Delayed Nesterov: the outer optimizer for changes that come one by one (2401.09135).

Momentum that is updated with every change, each of them computed before the others were known, overshoots. Here a
change moves the parameters by its N-th part at once; what N of them add up to then updates the momentum, which moves
the parameters. If all N had come together, this would be the step of Nesterov with their mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["DelayedNesterov"]


class DelayedNesterov(torch.optim.Optimizer):
    """Works element by element; its state is that of the momentum, what has been gathered for it, and of how many."""

    def __init__(self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, delay: int = 1) -> None:
        """``delay``: changes from one update of the momentum to the next."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one change, where all optimizers have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._take(parameter, group["lr"], group["momentum"], group["delay"])

    def _take(self, parameter: torch.Tensor, rate: float, momentum: float, delay: int) -> None:
        state, change = self.state[parameter], parameter.grad
        assert change is not None
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["momentum_buffer"] = torch.zeros_like(parameter)
            state["gathered"] = torch.zeros_like(parameter)
        buffer, gathered, step = state["momentum_buffer"], state["gathered"], state["step"]
        gathered.add_(change, alpha=1 / delay)
        parameter.add_(change, alpha=-rate / delay)
        step.add_(1)
        if step >= delay:
            buffer.mul_(momentum).add_(gathered)
            parameter.add_(buffer, alpha=-rate * momentum)
            gathered.zero_()
            step.zero_()
