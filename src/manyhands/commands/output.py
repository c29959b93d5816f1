"""What verbs print: lines and tables for people, one JSON object for programs, errors on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.train.progress import format_metrics

__all__ = [
    "format_bill",
    "format_measures",
    "format_seconds",
    "format_time",
    "print_error",
    "print_json",
    "print_table",
    "say",
]


def say(line: str = "") -> None:
    """A line for people, exactly as it is."""
    print(line, flush=True)


def print_error(message: str) -> None:
    """A message of ours on standard error."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def print_json(value: Mapping[str, Any]) -> None:
    """One object on one line; numbers that JSON has no word for become null."""
    print(json.dumps(_plain(value), allow_nan=False, default=str), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A table without a frame; the columns named in ``right`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column != columns[-1])
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # Piped output has no width of its own; lines must not be folded for a terminal that is not there.
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(table)


def format_seconds(seconds: float) -> str:
    """``0.123 s``, ``12.3 s``, ``2 min 5 s`` or ``1 h 2 min``."""
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_time(unix_s: float) -> str:
    """A moment in local time."""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def format_measures(measures: Mapping[str, float | None]) -> str:
    """The last values of a history, as JSON keeps them: null is not a number."""
    return format_metrics({name: value for name, value in measures.items() if value is not None})


def format_bill(bill: Mapping[str, float]) -> str:
    """The phases of worker time as shares: ``compute 81 % · wait 9 % · ...``."""
    total = sum(bill.values())
    if total <= 0:
        return "nothing was measured"
    return " · ".join(f"{phase} {100 * seconds / total:.0f} %" for phase, seconds in bill.items())
