"""The options that every training verb has, and how their text becomes values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from manyhands.errors import UsageError

__all__ = [
    "DEFAULT_OUTPUT",
    "DEFAULT_TRAINING",
    "Output",
    "TrainingOptions",
    "parse_settings",
    "parse_worker_counts",
    "parse_workers",
    "set_option",
]

Flag = Annotated[bool, Parameter(negative=())]
set_option = Parameter(name="--set", negative=(), help="A setting of the recipe, as key=value; may be repeated.")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a verb prints."""

    json: Flag = False
    "Print one machine-readable object last, on a line of its own."
    quiet: Flag = False
    "Print nothing but errors (and the object of --json)."

    @property
    def progress(self) -> Literal["auto", "quiet"]:
        """The mode of the live view."""
        return "quiet" if self.quiet else "auto"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What the user chose; None leaves a choice to the recipe or the trainer."""

    workers: str | None = None
    "Worker processes: a number, auto (one per core), or a range such as 2-4."
    sync: str = "allreduce"
    "How copies of the model agree; a codec follows a colon, such as allreduce:int8."
    layout: str = "whole"
    "How one copy of the model lies over devices."
    engine: str = "local"
    "Where processes come from."
    epochs: int | None = None
    "Passes over the training data."
    batch_size: int | None = None
    "The global batch, whatever the number of workers."
    lanes: int | None = None
    "Fixed slices of the global batch; the same number gives the same weights on any number of workers."
    seed: int = 0
    "Everything random follows from it."
    settings: Annotated[tuple[str, ...], set_option] = ()
    run_dir: Path | None = None
    "The run folder; by default the next number under runs/."
    checkpoint_every: float = 30.0
    "Seconds between checkpoints."


DEFAULT_OUTPUT = Output()
DEFAULT_TRAINING = TrainingOptions()


def parse_workers(text: str) -> int | str | tuple[int, int]:
    """``"4"``, ``"auto"`` or ``"2-4"`` as ``Trainer`` takes them."""
    valid = "valid: a whole number of at least 1, auto, or a range such as 2-4"
    if text == "auto":
        return text
    low, dash, high = text.partition("-")
    if dash and low.isdecimal() and high.isdecimal():
        least, most = int(low), int(high)
        if not 1 <= least <= most:
            raise UsageError(f"--workers {text}: the range is empty or begins below 1; {valid}.")
        return least, most
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--workers {text}: not a number of worker processes; {valid}.")
    return int(text)


def parse_worker_counts(text: str) -> list[int]:
    """``"1,2,4"`` as counts to compare, each once and in rising order."""
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isdecimal() and int(piece) >= 1 for piece in pieces):
        raise UsageError(f"--workers {text}: valid here: whole numbers of at least 1 with commas, such as 1,2,4.")
    return sorted({int(piece) for piece in pieces})


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """``["lr=0.01"]`` as ``{"lr": "0.01"}``; the recipe knows the types."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {pair}: valid: key=value, such as --set lr=0.01.")
        settings[key.strip()] = value
    return settings
