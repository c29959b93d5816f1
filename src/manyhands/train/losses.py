"""Losses by name, and the checks that a loss of the user's own must pass.

A loss is a callable ``(output, target) -> scalar``, the mean over the rows of the batch: lanes are weighted by their
rows, so only a mean adds up to the same gradient whatever the lanes are. The named losses also guard against the two
silent mistakes of plain torch: a target of shape (rows,) that is broadcast against an output of shape (rows, 1), and
an integer target in a regression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.errors import ModelError, unknown_name

__all__ = ["Loss", "check_scalar", "match_shape", "resolve_loss"]

Loss = Callable[[Any, Any], Tensor]


def match_shape(output: Tensor, target: Tensor) -> Tensor:
    """The target in the shape and floating type of the output; only dimensions of size 1 may differ."""
    if output.shape != target.shape:
        if [size for size in output.shape if size != 1] != [size for size in target.shape if size != 1]:
            raise ModelError(
                f"the output has shape {tuple(output.shape)} and the target {tuple(target.shape)}; valid: the same "
                "shape, up to dimensions of size 1. Change the last layer or the target"
            )
        target = target.reshape(output.shape)
    # Doubles are what NumPy makes of numbers; not every torch can take a loss between the two types back.
    return target if target.is_floating_point() and target.dtype != torch.float64 else target.to(output.dtype)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Logits with the classes in dimension 1, against class numbers or class probabilities."""
    return functional.cross_entropy(output, target)


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Logits with the classes in the last dimension (rows, tokens, classes), against class numbers (rows, tokens)."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def nll(output: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities against class numbers."""
    return functional.nll_loss(output, target)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Squared difference."""
    return functional.mse_loss(output, match_shape(output, target))


def l1(output: Tensor, target: Tensor) -> Tensor:
    """Absolute difference."""
    return functional.l1_loss(output, match_shape(output, target))


def huber(output: Tensor, target: Tensor) -> Tensor:
    """Squared for differences below 1, absolute beyond."""
    return functional.huber_loss(output, match_shape(output, target).to(output.dtype))


def bce(output: Tensor, target: Tensor) -> Tensor:
    """Probabilities against 0 and 1."""
    return functional.binary_cross_entropy(output, match_shape(output, target).to(output.dtype))


def bce_with_logits(output: Tensor, target: Tensor) -> Tensor:
    """Logits against 0 and 1."""
    return functional.binary_cross_entropy_with_logits(output, match_shape(output, target))


def poisson_nll(output: Tensor, target: Tensor) -> Tensor:
    """Logarithms of rates against counts."""
    return functional.poisson_nll_loss(output, match_shape(output, target))


def kl_div(output: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities against probabilities, summed over a row and averaged over rows."""
    return functional.kl_div(output, match_shape(output, target), reduction="batchmean")


LOSSES: dict[str, Loss] = {
    "bce": bce,
    "bce_with_logits": bce_with_logits,
    "cross_entropy": cross_entropy,
    "huber": huber,
    "kl_div": kl_div,
    "l1": l1,
    "mae": l1,
    "mse": mse,
    "nll": nll,
    "poisson_nll": poisson_nll,
    "token_cross_entropy": token_cross_entropy,
}


def resolve_loss(item: str | Loss) -> tuple[str, Loss]:
    """The name and the function of a loss given by name, as a function, or as a torch loss module."""
    if isinstance(item, str):
        if item not in LOSSES:
            raise unknown_name("loss", item, LOSSES)
        return item, LOSSES[item]
    if isinstance(item, type):
        raise ModelError(f"loss is the class {item.__name__}; valid: an instance of it, {item.__name__}()")
    if not callable(item):
        raise ModelError(
            f"loss is {item!r} of type {type(item).__name__}; valid: a callable (output, target) -> scalar mean, or "
            f"one of {', '.join(LOSSES)}"
        )
    if isinstance(item, nn.Module):
        _check_module(item)
        return type(item).__name__, item
    name = getattr(item, "__name__", type(item).__name__)
    return ("loss" if name == "<lambda>" else name), item


def _check_module(loss: nn.Module) -> None:
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise ModelError(
            f"{type(loss).__name__} has reduction={reduction!r}; valid: 'mean', since lanes are weighted by their rows"
        )
    trained = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    if trained:
        raise ModelError(
            f"{type(loss).__name__} has trainable parameters ({', '.join(trained)}), which no optimizer would update; "
            "valid: a loss without them. Move them into the model"
        )


def check_scalar(value: object) -> Tensor:
    """What a loss returned, if it is one number that a gradient can start from."""
    if not isinstance(value, Tensor) or value.dim() != 0 or not torch.is_floating_point(value):
        received = repr(value)
        if isinstance(value, Tensor):
            received = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
        raise ModelError(
            f"the loss returned {received}; valid is a scalar tensor, the mean over the batch: call .mean() on it"
        )
    return value
