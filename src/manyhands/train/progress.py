"""What a run shows while it runs: a header, one live region on a terminal or plain lines elsewhere, a closing line.

Owns the screen and nothing of the run: the trainer tells it what happened, it decides what is worth drawing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyhands.errors import unknown_name

__all__ = ["MODES", "Mode", "Progress", "describe_event", "format_metrics"]

Mode = Literal["auto", "live", "plain", "quiet"]
MODES: tuple[Mode, ...] = ("auto", "live", "plain", "quiet")

LIVE_INTERVAL_S = 1 / 8
"""Drawing more often costs the run and shows the eye nothing."""
PLAIN_INTERVAL_S = 3.0


@dataclass(frozen=True, slots=True)
class _Status:
    """The latest numbers, drawn or not."""

    epoch: int
    epochs: int
    step: int
    steps: int
    metrics: Mapping[str, float]
    samples_per_s: float
    workers: int

    def numbers(self) -> str:
        hands = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        rate = f"{self.samples_per_s:,.0f} samples/s" if self.samples_per_s > 0 else ""
        parts = [format_metrics(self.metrics), rate, hands]
        return " · ".join(part for part in parts if part)

    def line(self) -> str:
        return f"epoch {self.epoch}/{self.epochs} · step {self.step}/{self.steps} · {self.numbers()}"


class _Screen(Console):
    """A console that falls silent, instead of ending the run, when its reader has gone away."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


class Progress:
    """The view of one run. All methods may be called from any thread, and do nothing after ``end``.

    ``mode``: ``"auto"`` is live on a terminal and plain elsewhere; ``"quiet"`` shows nothing.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in MODES:
            raise unknown_name("progress mode", mode, MODES)
        # Looked up late: a notebook or a test may have put another stream in its place.
        self._console = _Screen(file=sys.stdout if stream is None else stream, highlight=False, soft_wrap=True)
        if mode == "auto":
            mode = "live" if self._console.is_terminal and not self._console.is_jupyter else "plain"
        self._mode: Mode = mode
        self._clock = clock
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._status: _Status | None = None
        self._drawn: _Status | None = None
        self._drawn_at = float("-inf")
        self._ended = False

    def begin(self, header: Iterable[str]) -> None:
        """Print the header and open the live region."""
        with self._lock:
            if self._ended or self._mode == "quiet":
                return
            for line in header:
                self._print(line)
            if self._mode == "live" and self._live is None:
                # No refresh thread: the region is drawn when there is news, so nothing can be left behind.
                self._live = Live(console=self._console, auto_refresh=False, transient=False)
                self._live.start()

    def update(
        self,
        epoch: int,
        epochs: int,
        step: int,
        steps: int,
        metrics: Mapping[str, float],
        samples_per_s: float,
        workers: int,
    ) -> None:
        """Take the latest numbers (``epoch`` from 1, ``step`` of ``steps`` within it); draw them if it is time."""
        if self._ended or self._mode == "quiet":
            return
        interval_s = LIVE_INTERVAL_S if self._mode == "live" else PLAIN_INTERVAL_S
        with self._lock:
            self._status = _Status(epoch, epochs, step, steps, dict(metrics), samples_per_s, workers)
            if self._clock() - self._drawn_at >= interval_s:
                self._draw()

    def event(self, text: str) -> None:
        """Print what happened (a death, a recovery, a resize) above the live region, at once."""
        with self._lock:
            if not self._ended and self._mode != "quiet":
                self._print(text)

    def end(self, closing: str | None = None) -> None:
        """Draw the final numbers, close the live region and print the closing line. May be called twice."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            if self._mode == "quiet":
                return
            if self._status is not self._drawn:
                self._draw()
            if self._live is not None:
                with self._unharmed():
                    self._live.stop()
            if closing:
                self._print(closing)

    def _draw(self) -> None:
        status = self._status
        if status is None:
            return
        if self._live is not None:
            with self._unharmed():
                self._live.update(_region(status), refresh=True)
        else:
            self._print(status.line())
        self._drawn = status
        self._drawn_at = self._clock()

    def _print(self, line: str) -> None:
        with self._unharmed():
            self._console.print(Text(line))

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        """A view that cannot be written (a full disk behind a redirect) must not end the run."""
        try:
            yield
        except OSError:
            self._mode = "quiet"


def format_metrics(metrics: Mapping[str, float]) -> str:
    """``loss 0.1234 · accuracy 0.9876``; four significant digits, so that no value needs a column of its own."""
    return " · ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _region(status: _Status) -> Group:
    """Two lines, so that the numbers fit a terminal of 80 columns beside nothing."""
    first = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(status.steps, 1), completed=status.step, width=32)
    first.add_row(f"epoch {status.epoch}/{status.epochs}", bar, f"step {status.step}/{status.steps}")
    return Group(first, Text(status.numbers(), no_wrap=True, overflow="ellipsis"))


def describe_event(event: str, fields: dict[str, Any]) -> str:
    """One line for the live view."""
    if "text" in fields:
        return str(fields["text"])
    if event in ("worker_died", "server_died"):
        role = event.removesuffix("_died")
        who = f"{role} {fields[role]} (pid {fields['pid']})"
        return f"{who} {fields['how']} at step {fields['step']} ({fields['phase']})"
    if event == "recovered":
        return f"went on {fields['seconds'] * 1000:.0f} ms later, nothing lost"
    return f"{event}: {fields}"
