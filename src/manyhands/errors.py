"""Every error that manyhands raises, in one tree.

ManyhandsError
├── UsageError (ValueError)           the call is wrong; nothing was started
│   ├── DataError                     the data cannot be used as given
│   ├── ModelError                    the model cannot be trained as given
│   ├── MissingExtra                  an optional package is not installed
│   └── UnknownOption (TypeError)     an argument of that name does not exist
├── RunError (RuntimeError)           the run cannot go on
│   ├── NotFinite                     a loss became NaN or infinite
│   ├── WorkerCrashed                 workers die again and again without progress
│   ├── RunLocked                     another live run holds the folder
│   ├── FrameError                    what arrived is not the frame that belongs there
│   └── EngineError                   processes could not be started or reached
│       └── ChannelClosed             the process at the other end is gone
└── CheckpointError (RuntimeError)
    ├── CheckpointDamaged             bytes on disk are not the bytes that were written
    └── CheckpointMismatch            the checkpoint belongs to another model or data set

Each message says what was received, what is valid, and what to do.
An exception of the user's own code keeps its type; ``RemoteTraceback`` is its cause.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

__all__ = [
    "ChannelClosed",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "DataError",
    "EngineError",
    "FrameError",
    "ManyhandsError",
    "MissingExtra",
    "ModelError",
    "NotFinite",
    "RemoteTraceback",
    "RunError",
    "RunLocked",
    "UnknownOption",
    "UsageError",
    "WorkerCrashed",
    "named_fields",
    "named_options",
    "unknown_name",
]


class ManyhandsError(Exception):
    """The root: ``except mh.ManyhandsError`` catches all that the library itself raises."""


class UsageError(ManyhandsError, ValueError):
    """The call is wrong; nothing was started and nothing was changed."""


class DataError(UsageError):
    """The data cannot be used as given."""


class ModelError(UsageError):
    """The model, loss or optimizer cannot be used as given."""


class MissingExtra(UsageError):
    """An optional package is needed; the message has the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional package; install it with: pip install 'manyhands[{extra}]'")
        self._what, self._extra = what, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, (self._what, self._extra)


class UnknownOption(UsageError, TypeError):
    """An argument of that name does not exist; the message has the nearest one."""


class RunError(ManyhandsError, RuntimeError):
    """The run cannot go on; what was committed is on disk."""


class NotFinite(RunError):
    """A loss became NaN or infinite; the message names worker, step and samples."""


class WorkerCrashed(RunError):
    """Worker processes die again and again at the same step."""


class RunLocked(RunError):
    """Another live run holds the run folder."""


class FrameError(RunError):
    """Bytes that came from elsewhere are not the frame that belongs there."""


class EngineError(RunError):
    """Processes could not be started or reached."""


class ChannelClosed(EngineError):
    """The process at the other end of a connection is gone."""


class CheckpointError(ManyhandsError, RuntimeError):
    """A checkpoint could not be written or read."""


class CheckpointDamaged(CheckpointError):
    """The bytes on disk are not the bytes that were written."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another model, optimizer or data set."""


class RemoteTraceback(Exception):
    """Carries the text of a worker's traceback as the cause of the re-raised exception."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]) if self.args else ""


def unknown_name(kind: str, received: object, valid: Iterable[str], error: type[UsageError] = UsageError) -> UsageError:
    """The error for a name that does not exist, with the nearest name that does."""
    names = sorted(valid)
    near = difflib.get_close_matches(str(received), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return error(f"unknown {kind} {received!r}.{hint} Valid: {', '.join(names)}.")


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def named_options(function: Callable[P, R]) -> Callable[P, R]:
    """``function``; an argument whose name does not exist is refused with the nearest name that does."""
    parameters = inspect.signature(function).parameters.values()
    names = [item.name for item in parameters if item.kind != item.VAR_POSITIONAL and item.name != "self"]

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in names:
                raise unknown_name("option", name, names, UnknownOption)
        return function(*arguments, **options)

    return call


def named_fields(kind: type[T]) -> type[T]:
    """The same for the class of a configuration."""
    setattr(kind, "__init__", named_options(kind.__init__))  # noqa: B010
    return kind
