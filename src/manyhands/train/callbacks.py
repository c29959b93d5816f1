"""Callbacks: code of the user's that runs once per event, in the caller's process, and may steer the run.

A hook gets the ``State``; what it asks for (another learning rate, a stop, more workers) goes through ``Controls``,
which the trainer implements. A callback with a memory gives it as ``state_dict``, so that it survives a resume.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from manyhands.errors import UsageError, unknown_name
from manyhands.train.history import History

__all__ = [
    "CSVLogger",
    "Callback",
    "CallbackList",
    "Checkpoint",
    "Controls",
    "EarlyStopping",
    "Lambda",
    "ReduceOnPlateau",
    "Schedule",
    "State",
    "wants_steps",
]

EPOCH_HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end")
STEP_HOOKS = ("on_step_begin", "on_step_end")

_SCORES = ("auc", "f1", "precision", "r2", "recall", "top")  # these should grow, like accuracies


class Controls(Protocol):
    """What a callback can ask of the run."""

    def current_model(self) -> nn.Module:
        """The model with the weights of the last committed step."""
        ...

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group, from the next step on."""
        ...

    def stop(self, reason: str) -> None:
        """End the run after the current step or epoch."""
        ...

    def resize(self, workers: int) -> None:
        """Go on with another number of workers."""
        ...

    def checkpoint(self) -> None:
        """Save the state of the run."""
        ...


@dataclass(slots=True)
class State:
    """Where the run stands; the trainer keeps it up to date, a hook reads it and asks through it."""

    controls: Controls = field(repr=False)
    epochs: int = 0
    steps_per_epoch: int = 0
    epoch: int = 0
    """The current epoch, from 0."""
    step: int = 0
    """Steps committed since the beginning of the run."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest values; at the end of an epoch, those that the history got for it."""
    history: History = field(default_factory=History, repr=False)

    @property
    def model(self) -> nn.Module:
        """The model with the weights of the last committed step."""
        return self.controls.current_model()

    @property
    def lr(self) -> float:
        """The learning rate (of the first parameter group); setting it sets that of every group."""
        return self.controls.get_lr()[0]

    @lr.setter
    def lr(self, value: float) -> None:
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise UsageError(f"the learning rate is {value!r}; valid: a finite number of at least 0")
        self.controls.set_lr(float(value))

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after this step or epoch."""
        self.controls.stop(reason)

    def resize(self, workers: int) -> None:
        """Go on with another number of workers; the result stays the same."""
        self.controls.resize(workers)

    def save(self) -> None:
        """Save a checkpoint now."""
        self.controls.checkpoint()


class Callback:
    """Subclass it and override the hooks you need. Step hooks slow a run down, the others do not."""

    def on_train_begin(self, state: State) -> None:
        """Before the first step."""

    def on_train_end(self, state: State) -> None:
        """After the last step, also when the run was stopped."""

    def on_epoch_begin(self, state: State) -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self, state: State) -> None:
        """After the last step of an epoch and its validation; the history has the epoch already."""

    def on_step_begin(self, state: State) -> None:
        """Before a step."""

    def on_step_end(self, state: State) -> None:
        """After a step was committed."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume, in types that JSON can hold."""
        return {}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""


def wants_steps(callbacks: Iterable[Callback]) -> bool:
    """Whether any callback overrides a step hook; if none does, workers need not wait for the caller between steps."""
    return any(
        getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
        for callback in callbacks
        for hook in STEP_HOOKS
    )


class CallbackList(Callback):
    """Calls each hook of each callback, in order."""

    def __init__(self, callbacks: Callback | Iterable[Callback] = ()) -> None:
        self.callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise UsageError(
                    f"a callback is {callback!r}; valid: an instance of a subclass of Callback, or "
                    "Lambda(on_epoch_end=function)"
                )

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def on_train_begin(self, state: State) -> None:
        for callback in self.callbacks:
            callback.on_train_begin(state)

    def on_train_end(self, state: State) -> None:
        for callback in self.callbacks:
            callback.on_train_end(state)

    def on_epoch_begin(self, state: State) -> None:
        for callback in self.callbacks:
            callback.on_epoch_begin(state)

    def on_epoch_end(self, state: State) -> None:
        for callback in self.callbacks:
            callback.on_epoch_end(state)

    def on_step_begin(self, state: State) -> None:
        for callback in self.callbacks:
            callback.on_step_begin(state)

    def on_step_end(self, state: State) -> None:
        for callback in self.callbacks:
            callback.on_step_end(state)

    def state_dict(self) -> dict[str, Any]:
        return {key: values for key, callback in self._keys().items() if (values := callback.state_dict())}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """A resume may bring other callbacks: those that were not there before start afresh."""
        for key, callback in self._keys().items():
            if key in values:
                callback.load_state_dict(values[key])

    def _keys(self) -> dict[str, Callback]:
        """Each callback by its class and its place among those of that class."""
        keys: dict[str, Callback] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            place = sum(key.partition("#")[0] == name for key in keys)
            keys[f"{name}#{place}"] = callback
        return keys


class _Watch(Callback):
    """Watches one value for epochs without progress; the base of what reacts to a plateau."""

    def __init__(self, monitor: str, patience: int, min_delta: float, mode: str) -> None:
        if mode not in ("auto", "max", "min"):
            raise unknown_name("mode", mode, ("auto", "max", "min"))
        if patience < 1 or min_delta < 0:
            raise UsageError(
                f"patience={patience}, min_delta={min_delta}; valid: patience 1 or more, min_delta 0 or more"
            )
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        is_score = monitor.endswith("accuracy") or monitor.removeprefix("val_").startswith(_SCORES)
        self.sign = -1.0 if mode == "max" or (mode == "auto" and is_score) else 1.0
        self.best: float | None = None
        self.waited = 0

    def has_stalled(self, state: State) -> bool:
        """Take in this epoch's value; true when there was no progress for ``patience`` epochs."""
        if self.monitor not in state.metrics:
            hint = " Give fit validation=..." if self.monitor.startswith("val_") else ""
            raise UsageError(
                f"{type(self).__name__} watches {self.monitor!r}, which this run does not measure; valid: "
                f"{', '.join(sorted(state.metrics))}.{hint}"
            )
        value = state.metrics[self.monitor]
        if math.isfinite(value) and (self.best is None or self.sign * (self.best - value) > self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self.best, self.waited = values["best"], values["waited"]


class EarlyStopping(_Watch):
    """Stops the run when a value made no progress for ``patience`` epochs.

    Progress is a change by more than ``min_delta``; ``mode="auto"`` knows that accuracies should grow and losses fall.
    """

    def __init__(
        self, monitor: str = "val_loss", patience: int = 3, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        super().__init__(monitor, patience, min_delta, mode)

    def on_epoch_end(self, state: State) -> None:
        if self.has_stalled(state):
            best = "no finite value" if self.best is None else f"best {self.best:.6g}"
            state.stop(f"{self.monitor} made no progress for {self.waited} epochs ({best})")


class ReduceOnPlateau(_Watch):
    """Multiplies the learning rate by ``factor`` whenever a value made no progress for ``patience`` epochs."""

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 3,
        factor: float = 0.1,
        min_lr: float = 0.0,
        min_delta: float = 0.0,
        mode: str = "auto",
    ) -> None:
        super().__init__(monitor, patience, min_delta, mode)
        if not 0 < factor < 1:
            raise UsageError(f"factor is {factor}; valid: between 0 and 1")
        self.factor = factor
        self.min_lr = min_lr

    def on_epoch_end(self, state: State) -> None:
        if self.has_stalled(state):
            self.waited = 0
            state.lr = max(state.lr * self.factor, self.min_lr)


class Schedule(Callback):
    """Sets the learning rate at the beginning of each epoch, counted from 0: ``function(epoch) -> lr``."""

    def __init__(self, function: Callable[[int], float]) -> None:
        self.function = function

    def on_epoch_begin(self, state: State) -> None:
        state.lr = self.function(state.epoch)


class Checkpoint(Callback):
    """Saves a checkpoint at the end of every ``every_epochs``-th epoch."""

    def __init__(self, every_epochs: int = 1) -> None:
        if every_epochs < 1:
            raise UsageError(f"every_epochs is {every_epochs}; valid: 1 or more")
        self.every_epochs = every_epochs

    def on_epoch_end(self, state: State) -> None:
        if (state.epoch + 1) % self.every_epochs == 0:
            state.save()


class CSVLogger(Callback):
    """Writes the history to a CSV file after each epoch; the whole of it, so that a resume leaves no gap or repeat."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_epoch_end(self, state: State) -> None:
        try:
            state.history.to_csv(self.path)
        except OSError as error:  # a full disk must not end the training
            warnings.warn(f"CSVLogger cannot write {self.path}: {error}; the training goes on", stacklevel=2)


class Lambda(Callback):
    """A callback from functions: ``Lambda(on_epoch_end=lambda state: print(state.metrics))``."""

    def __init__(self, **hooks: Callable[[State], Any]) -> None:
        for name, function in hooks.items():
            if name not in EPOCH_HOOKS + STEP_HOOKS:
                raise unknown_name("hook", name, EPOCH_HOOKS + STEP_HOOKS)
            setattr(self, name, function)
