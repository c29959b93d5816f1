"""How a model is built, as plain data: so that a saved model can be loaded without running a pickle.

The arguments of a module's constructor are read back from its attributes of the same names, as torch's own layers
keep them; its parts are described in turn. A description is only used if the model it builds is the same as the
original, part by part. Classes are looked up among modules that are already imported, never imported for a file.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn

from manyhands.errors import CheckpointError

__all__ = ["build", "describe"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def describe(model: nn.Module) -> dict[str, Any] | None:
    """The description of ``model``, or None when it cannot be built from its attributes."""
    try:
        description = _describe(model)
        twin = build(description)
    except (CheckpointError, TypeError, ValueError, AttributeError, RuntimeError):
        return None
    return description if _alike(model, twin) else None


def _alike(one: nn.Module, other: nn.Module) -> bool:
    mine, yours = one.state_dict(), other.state_dict()
    shapes = [(k, v.shape, v.dtype) for k, v in mine.items() if isinstance(v, torch.Tensor)]
    return repr(one) == repr(other) and shapes == [
        (k, v.shape, v.dtype) for k, v in yours.items() if isinstance(v, torch.Tensor)
    ]


def _describe(module: nn.Module) -> dict[str, Any]:
    kind = type(module)
    described: dict[str, Any] = {"class": f"{kind.__module__}:{kind.__qualname__}"}
    if kind in _CONTAINERS:
        described["parts"] = [[name, _describe(part)] for name, part in module.named_children()]
        return described
    arguments = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in ("device", "dtype"):
            continue
        if hasattr(module, name):
            arguments[name] = _plain(getattr(module, name), name)
        elif parameter.default is parameter.empty:
            raise CheckpointError(f"{kind.__name__} does not keep its argument {name!r} as an attribute")
    described["arguments"] = arguments
    return described


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) or (value is None and name == "bias"):
        return value is not None  # a layer keeps bias=True as the bias itself
    if isinstance(value, nn.Module):
        return {"module": _describe(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"the argument {name!r} is a {type(value).__name__}, which is not plain data")


def build(description: dict[str, Any]) -> nn.Module:
    """A new model from its description."""
    module, _, name = str(description["class"]).partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise CheckpointError(
            f"the saved model is a {name} of {module}, which is not imported here; import it first, or give the model: "
            "mh.load(path, model=YourModel(...))"
        )
    if "parts" in description:
        parts = [(key, build(part)) for key, part in description["parts"]]
        if found is nn.ModuleList:
            return found(part for _, part in parts)
        container = found()
        for key, child in parts:
            container.add_module(key, child)
        return container
    built = found(**{key: _value(value) for key, value in description["arguments"].items()})
    assert isinstance(built, nn.Module)
    return built


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return build(value["module"])
    if isinstance(value, list):
        return tuple(_value(item) for item in value)
    return value
