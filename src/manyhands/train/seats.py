"""What a supervisor knows of the processes it watches, and how long it lets them take."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.engine import local
from manyhands.train.stack import StackFile

__all__ = ["Limits", "Recovery", "Seat"]


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
