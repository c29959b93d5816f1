"""How long to wait before something large is sent again: it may still be on its way."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

__all__ = ["BYTES_PER_S", "Patience"]

_MOST = 1024  # things that are remembered; forgetting one costs sending it again
BYTES_PER_S = 30e6  # less than any link between processes that train together


@dataclass(slots=True)
class Patience:
    """Remembers what was sent when."""

    least_s: float
    _sent: dict[Hashable, tuple[Hashable, float]] = field(default_factory=dict)

    def is_over(self, key: Hashable, version: Hashable, size_bytes: int, now: float) -> bool:
        """Whether to send ``version`` of ``key`` now: it is another one than before, or that is long ago."""
        last = self._sent.get(key)
        if last is not None and last[0] == version and now - last[1] < self.least_s + size_bytes / BYTES_PER_S:
            return False
        if len(self._sent) >= _MOST:
            self._sent.clear()
        self._sent[key] = (version, now)
        return True
