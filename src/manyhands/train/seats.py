"""What a supervisor knows of the processes it watches, and how long it lets them take."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.engine import local
from manyhands.errors import UsageError, named_fields
from manyhands.train.stack import StackFile

__all__ = ["Limits", "Recovery", "Seat", "check_limits"]


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take before they count as failed."""

    pause_s: float = 1.0
    """A process that the system shows as stopped for this long is replaced."""
    hang_s: float = 60.0
    """A worker that gives no sign of life for this long within one phase is replaced."""
    start_s: float = 120.0
    """A process must be ready within this time."""
    balance_s: float = 1.0
    """How often speeds are compared; 0 leaves lanes where they are."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not (value > 0 or (name == "balance_s" and value == 0)):
                least = "of at least 0" if name == "balance_s" else "above 0"
                raise UsageError(f"{name} of Limits received {value!r}; valid is a number {least}")


def check_limits(limits: Limits | None) -> Limits:
    """The limits that a user gave, or the usual ones."""
    if limits is None:
        return Limits()
    if not isinstance(limits, Limits):
        raise UsageError(f"limits received {limits!r}; valid: mh.Limits(pause_s=1, hang_s=60, ...), or None")
    return limits


@dataclass(slots=True)
class Seat:
    """The process in a slot and what was seen of it."""

    process: local.Process
    stack: StackFile
    beat: int = -1
    beat_time: float = 0.0
    stopped_since: float | None = None
    blame: str | None = None  # why we killed it, if we did
    failed: bool = False


@dataclass(slots=True)
class Recovery:
    """A death after which no step is committed yet."""

    who: dict[str, int]
    step: int
    since: float
