"""Ctrl-C and SIGTERM while a fit runs: the first asks for an orderly end, the second forces it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Counts requests to stop. Outside the main thread signals stay as they are."""

    def __init__(self) -> None:
        self.asked = 0
        self.signal = signal.SIGINT

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.asked += 1
        self.signal = signal.Signals(number)
        if self.asked > 1:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take the signals over, and give them back."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
        if old[signal.SIGINT] is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._ask)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            old[signal.SIGTERM] = signal.SIG_DFL
            signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
