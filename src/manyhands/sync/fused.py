"""The fused Adam step without the way to it.

``torch.optim.Adam(fused=True)`` spends as long on sorting its tensors into lists, in every step, as its kernel takes
for a small model. The lists of a batch do not change between steps; here the same kernel gets them directly, so the
bits are the same. Anything unusual (the first step, a parameter without a gradient, amsgrad) goes through torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from manyhands.sync.optimizer_state import Template

__all__ = ["FusedAdam", "fused_adam"]


class FusedAdam:
    """The step of one batch, whose tensors all have state and a gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], steps: np.ndarray) -> None:
        """``steps``: the column of single numbers that the optimizer's ``step`` tensors are views of."""
        self._steps = steps
        self._groups: list[tuple[dict[str, Any], list[int], list[list[torch.Tensor]]]] = []
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if id(p) in numbers]
            if parameters:
                states = [optimizer.state[p] for p in parameters]
                averages = [[s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step")]
                self._groups.append((group, [numbers[id(p)] for p in parameters], [parameters, *averages]))

    def __call__(self, gradients: Sequence[torch.Tensor]) -> None:
        """``gradients``: one for each of the tensors."""
        self._steps += 1
        for group, members, (parameters, averages, squares, steps) in self._groups:
            kernel = torch._fused_adamw_ if group.get("decoupled_weight_decay") else torch._fused_adam_
            kernel(
                parameters, [gradients[number] for number in members], averages, squares, [], steps,
                lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
                eps=group["eps"], amsgrad=False, maximize=group["maximize"],
            )  # fmt: skip


def fused_adam(template: Template) -> bool:
    """Whether the template's optimizer is one that this module can step."""
    known = template.kind in (torch.optim.Adam, torch.optim.AdamW)
    modern = template.kind is torch.optim.Adam or all("decoupled_weight_decay" in group for group in template.groups)
    plain = all(group.get("fused") and not group.get("amsgrad") for group in template.groups)
    return known and modern and plain
