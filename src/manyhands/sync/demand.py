"""How much of the machine a worker would use if it did not have to share it.

More processes than cores take turns: each turn costs a change of context and a cold cache, and gains nothing, unless
the processes sleep (waiting for a disk, say). Which of the two it is, the scheduler of the system knows: it counts how
long a process ran, and how long it was ready to run and had to wait.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

import torch

from manyhands.comm.control import SLOT_FIELDS

__all__ = ["Demand"]

_SCHEDSTAT = Path("/proc/self/schedstat")
_INTERVAL_NS = 100_000_000
_WORK = [SLOT_FIELDS.index(name) for name in ("data_ns", "compute_ns", "reduce_ns")]
_DEMAND = SLOT_FIELDS.index("demand")


class Demand:
    """Measures this process, a few times a second, into its slot."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._file: io.FileIO | None = None
        try:
            self._file = io.FileIO(_SCHEDSTAT)
            self._delay_ns()
        except (OSError, ValueError, IndexError):  # another system: nothing is measured, nobody is held back
            self._file = None
        self._due_ns = 0
        self._last = (0, 0, 0)

    def _delay_ns(self) -> int:
        assert self._file is not None
        self._file.seek(0)
        return int(self._file.read(64).split()[1])

    def measure(self) -> None:
        """Called often; looks when it is time."""
        now = time.monotonic_ns()
        if self._file is None or now < self._due_ns:
            return
        seen = (time.process_time_ns(), sum(self._words[word] for word in _WORK), self._delay_ns())
        if self._due_ns:
            used, worked, delayed = (new - old for new, old in zip(seen, self._last, strict=True))
            share = min(1000 * used // max(worked - delayed, 1), 1000 * torch.get_num_threads())
            before = self._words[_DEMAND]
            self._words[_DEMAND] = max((share + before) // 2 if before else share, 1)
        self._last, self._due_ns = seen, now + _INTERVAL_NS
