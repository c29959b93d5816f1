"""Gradients of large linear layers, computed straight into the lane's buffer.

Autograd makes a new tensor for every gradient, and that of a large matrix is then copied into the lane: three passes
over memory for nothing, where memory is what a large model waits for. Here the backward of such a layer hands the two
factors of the gradient to whoever collects it, to have the product written where it belongs, or made later
(``sync/factors.py``). The products are those that torch computes itself, with the same kernels: the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

__all__ = ["Collector", "large_linears", "straighten"]

_LARGE_BYTES = 1 << 19


class Collector(Protocol):
    """Where gradients of the lane in progress go."""

    @property
    def collecting(self) -> bool:
        """Whether the backward pass of the lane is going on; user code may run others within its loss."""

    def take_product(self, index: int, of_outputs: torch.Tensor, inputs: torch.Tensor) -> bool:
        """Take the gradient of parameter ``index``, as factors over the same samples; False if there is one already."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, into: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.into, ctx.has_bias = into, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        collector, index = ctx.into
        flat = gradient.reshape(-1, gradient.shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        of_x = (flat @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        of_bias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            plain = torch.is_grad_enabled() or not collector.collecting  # somebody wants the gradient itself
            if plain or not collector.take_product(index, flat, rows):
                of_weight = flat.t() @ rows
        return of_x, of_weight, of_bias, None


def straighten(model: nn.Module, names: Sequence[str], collector: Collector) -> None:
    """Let the large linear layers of ``model`` hand the gradients of their weights to ``collector``.

    ``names``: of the parameters, by their number.
    """
    for index, module in large_linears(model, names).items():
        module.forward = _forward(module, (collector, index))  # type: ignore[method-assign]


def large_linears(model: nn.Module, names: Sequence[str]) -> dict[int, nn.Linear]:
    """The large linear layers by the number of their weight among ``names``.

    A layer of another class, a weight that is shared or has a hook, or a forward that somebody has replaced is left as
    it is.
    """
    position = {name: index for index, name in enumerate(names)}
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    found: dict[int, nn.Linear] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        index = position.get(f"{name}.weight" if name else "weight")
        if type(module) is not nn.Linear or index is None or "forward" in vars(module) or weight is None:
            continue
        usual = users[id(weight)] == 1 and weight.dtype == torch.float32 and not weight._backward_hooks
        if usual and weight.nbytes >= _LARGE_BYTES:
            found[index] = module
    return found


def _forward(module: nn.Linear, into: tuple[Collector, int]) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or torch.is_autocast_enabled("cpu") or _is_transformed():
            return functional.linear(x, module.weight, module.bias)
        out: torch.Tensor = _Linear.apply(x, module.weight, module.bias, into)  # type: ignore[no-untyped-call]
        return out

    return forward


def _is_transformed() -> bool:
    """Whether the call is under torch.func or forward-mode differentiation, which know the plain layer."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0
