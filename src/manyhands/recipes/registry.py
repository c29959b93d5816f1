"""What a recipe is, which ones are built in, and how a name, a file and ``key=value`` settings become one.

A recipe is made by a factory: a function whose keyword parameters are the recipe's settings. A file of the user's
defines such a factory under the name ``recipe``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.errors import UsageError, unknown_name

__all__ = ["BUILT_IN", "Recipe", "RecipeData", "get", "names", "with_settings"]

BUILT_IN: Mapping[str, tuple[str, str]] = {
    "linear": ("manyhands.recipes.linear", "linear"),
    "digits-mlp": ("manyhands.recipes.digits", "digits_mlp"),
    "digits-cnn": ("manyhands.recipes.digits", "digits_cnn"),
    "mnist-mlp": ("manyhands.recipes.mnist", "mnist_mlp"),
    "mnist-cnn": ("manyhands.recipes.mnist", "mnist_cnn"),
    "gpt": ("manyhands.recipes.gpt", "gpt"),
}
"""Name to (module, factory); imported when asked for, so that an absent extra harms only the recipe that needs it."""

_FIELD_SETTINGS = ("epochs", "batch_size")
"""Fields of every recipe that are settings too, whether or not its factory takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeData:
    """The three parts, each as ``Trainer.fit`` and ``Trainer.evaluate`` accept it; absent parts are None."""

    train: Any
    validation: Any = None
    test: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a run needs beside the machines: what to train, on what, and how."""

    name: str
    description: str
    model: Callable[[], nn.Module]
    """Builds the model with fresh weights from torch's global random state."""
    data: Callable[[], RecipeData]
    """Reads or makes the data; called once, in the caller's process, and never when recipes are only listed."""
    loss: Any
    optimizer: Any
    metrics: Sequence[Any] = ()
    epochs: int = 1
    batch_size: int = 64
    """The global batch."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The effective settings: the factory's parameters, and the fields that ``with_settings`` replaced."""
    factory: Callable[..., Recipe] | None = dataclasses.field(default=None, repr=False, compare=False)
    """What ``with_settings`` calls again; set by ``get``."""
    source: str = ""
    """What ``get`` was asked for, as an absolute path if it is a file: enough to find the recipe again."""

    def __post_init__(self) -> None:
        for field in ("epochs", "batch_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(
                    f"recipe {self.name!r}: {field} is {value!r}; valid: a whole number of at least 1. "
                    f"Set it with --set {field}=8 or in the recipe."
                )


def names() -> list[str]:
    """The built-in names, in the order in which they are listed."""
    return list(BUILT_IN)


def get(name_or_path: str | Path) -> Recipe:
    """The recipe of a built-in name, or of a ``.py`` file that defines ``recipe()``, with its default settings."""
    text = str(name_or_path)
    if text in BUILT_IN:
        module_name, function = BUILT_IN[text]
        factory = getattr(importlib.import_module(module_name), function)
        return _build(factory, {}, source=text)
    path = Path(text).expanduser()
    if path.suffix == ".py" or len(path.parts) > 1:
        return _build(_factory_of_file(path), {}, source=str(path.resolve()))
    known = unknown_name("recipe", text, BUILT_IN)
    raise UsageError(f"{known} Or give the path of a .py file that defines recipe().")


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe made again with ``settings``; text values are read as the type of the setting they name."""
    if not settings:
        return recipe
    kinds = _setting_types(recipe.factory)
    unknown = [key for key in settings if key not in kinds]
    if unknown:
        raise unknown_name(f"setting of recipe {recipe.name!r}", unknown[0], kinds)
    parsed = {key: _parse(key, value, kinds[key]) for key, value in settings.items()}
    fields = {key: parsed.pop(key) for key in _FIELD_SETTINGS if key in parsed and not _takes(recipe.factory, key)}
    if recipe.factory is not None and parsed:
        before = {key: value for key, value in recipe.options.items() if _takes(recipe.factory, key)}
        fields = {key: recipe.options[key] for key in _FIELD_SETTINGS if key in recipe.options.keys() - before} | fields
        recipe = _build(recipe.factory, {**before, **parsed}, source=recipe.source)
    return dataclasses.replace(recipe, **fields, options={**recipe.options, **fields})


def _build(factory: Callable[..., Recipe], values: Mapping[str, Any], *, source: str) -> Recipe:
    made = factory(**values)
    if not isinstance(made, Recipe):
        raise UsageError(
            f"recipe() of {source} returned a {type(made).__name__}; valid: a manyhands.recipes.Recipe. "
            "End the function with: return Recipe(name=..., model=..., data=..., ...)"
        )
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return dataclasses.replace(made, options={**made.options, **defaults, **values}, factory=factory, source=source)


def _factory_of_file(path: Path) -> Callable[..., Recipe]:
    if path.suffix != ".py" or not path.is_file():
        found = "is not a Python file" if path.is_file() else "does not exist"
        raise UsageError(
            f"recipe file {str(path)!r} {found}; valid: a .py file that defines recipe(), "
            f"or a built-in name: {', '.join(BUILT_IN)}."
        )
    # A name of its own: a user's file called `torch.py` must not hide the real module.
    module_name = f"manyhands_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python file.py` does, so that the recipe can import its neighbours
    sys.modules[module_name] = module  # dataclasses look their module up while they are made
    try:
        spec.loader.exec_module(module)
    finally:
        # Workers cannot import this file by a name: what it defines travels by value only if the name leads nowhere.
        del sys.modules[module_name]
    factory = getattr(module, "recipe", None)
    if not callable(factory):
        what = "defines no recipe()" if factory is None else f"defines recipe as a {type(factory).__name__}"
        raise UsageError(f"{path} {what}; valid: a function recipe() that returns a manyhands.recipes.Recipe.")
    required = [
        name
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC
    ]
    if required:
        raise UsageError(
            f"recipe() in {path} has parameters without a default: {', '.join(required)}. "
            "Each parameter is a setting and needs a default value, such as lr: float = 0.01."
        )
    return typing.cast("Callable[..., Recipe]", factory)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _takes(factory: Callable[..., Recipe] | None, key: str) -> bool:
    return factory is not None and key in inspect.signature(factory).parameters


def _setting_types(factory: Callable[..., Recipe] | None) -> dict[str, Any]:
    """Setting name to its type: the annotation, or else the type of the default."""
    kinds: dict[str, Any] = dict.fromkeys(_FIELD_SETTINGS, int)
    if factory is None:
        return kinds
    hints = typing.get_type_hints(factory)
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind in _VARIADIC:
            continue
        by_default = str if parameter.default is None else type(parameter.default)
        kinds[name] = hints.get(name, by_default)
    return kinds


_WORDS_OF_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _parse(key: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, str):
        return value
    choices = typing.get_args(kind) if _is_union(kind) else (kind,)
    if type(None) in choices and value.lower() == "none":
        return None
    for choice in choices:
        try:
            if choice is bool:
                return _WORDS_OF_TRUTH[value.lower()]
            if choice in (int, float, str, Path):
                return choice(value)
        except (ValueError, KeyError):
            continue
    expected = " or ".join(getattr(choice, "__name__", str(choice)) for choice in choices)
    raise UsageError(f"setting {key}={value!r} is not valid: {key} takes a value of type {expected}.")


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)
