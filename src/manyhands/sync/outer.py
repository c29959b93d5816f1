"""The outer optimizer of local rounds: makes the next agreed parameters of the mean change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from manyhands.core.rounds import warm_momentum

__all__ = ["WarmNesterov"]


class WarmNesterov(torch.optim.Optimizer):
    """SGD with Nesterov's momentum, which begins at 0 and grows to ``momentum`` as agreements are made."""

    def __init__(self, parameters: Iterable[Any], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Every parameter counts the agreements that it took part in."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"], state["step"] = torch.zeros_like(parameter), torch.tensor(0.0)
                state["step"] += 1
                momentum = warm_momentum(int(state["step"]), group["momentum"])
                buffer = state["momentum_buffer"].mul_(momentum).add_(parameter.grad)
                parameter.add_(parameter.grad.add(buffer, alpha=momentum), alpha=-group["lr"])
