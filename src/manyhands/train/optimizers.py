"""Optimizers by name: torch's own, with the fastest implementation that torch has for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from manyhands.errors import ModelError, unknown_name
from manyhands.sync.optimizer_state import NO_LBFGS, without_compiler

__all__ = ["NAMES", "optimizer", "resolve_optimizer"]

Factory = Callable[[Iterable[Any]], torch.optim.Optimizer]

_FUSED = ("sgd", "adam", "adamw", "adagrad")  # one pass over memory instead of one per operation
_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
_CLASSES.pop("lbfgs", None)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "momentum": {"lr": 0.01, "momentum": 0.9},
    "nesterov": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "sgd": {"lr": 0.01},
}
NAMES = tuple(sorted({*_CLASSES, *_DEFAULTS}))


def optimizer(name: str, **options: Any) -> Factory:
    """``mh.optimizer("adamw", lr=1e-3, weight_decay=0.01)``: a recipe that builds torch's optimizer of that name.

    Besides the classes of ``torch.optim``: ``momentum`` and ``nesterov`` are SGD with momentum 0.9.
    """
    if isinstance(name, str) and name.lower() == "lbfgs":
        raise ModelError(NO_LBFGS)
    if not isinstance(name, str) or name.lower() not in NAMES:
        raise unknown_name("optimizer", name, NAMES)
    key = name.lower()
    kind = _CLASSES.get(key, torch.optim.SGD)
    settings = {**_DEFAULTS.get(key, {}), **options}
    if (key in _FUSED or key in _DEFAULTS) and "fused" not in settings and "foreach" not in settings:
        settings["fused"] = True

    def build(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        try:
            return kind(parameters, **settings)
        except (TypeError, ValueError) as error:
            raise ModelError(f"the optimizer {name!r} cannot be built with {options}: {error}") from error

    return build


def resolve_optimizer(item: Any, model: nn.Module) -> torch.optim.Optimizer:
    """A name, a torch.optim instance built on the model's parameters, or a function params -> optimizer."""
    if isinstance(item, torch.optim.Optimizer):
        return item
    if isinstance(item, str):
        item = optimizer(item)
    if not callable(item):
        raise ModelError(
            f"optimizer received {item!r}; valid: a name ({', '.join(NAMES)}), a torch.optim instance built on "
            "model.parameters(), or a function params -> optimizer"
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ModelError(f"{type(model).__name__} has no trainable parameters; set requires_grad on some")
    with without_compiler():
        built = item(trainable)
    if not isinstance(built, torch.optim.Optimizer):
        raise ModelError(f"the optimizer function returned {type(built).__name__}; valid is a torch.optim.Optimizer")
    return built
