"""How many batches a worker takes at once, by the speeds that were measured: so unequal workers come back together.

The fastest takes ``every`` batches, a worker with a third of its speed takes a third of them (2401.09135 calls this
dynamic local updates). Nobody is measured before its first batches: until then it counts as fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Pace", "share_of"]

_MEMORY = 0.5  # of the old speed, when a new one was measured: a few leases are all there is to go by


def share_of(every: int, speed: float, fastest: float) -> int:
    """The batches of a worker of this ``speed`` in the time in which the ``fastest`` makes ``every``."""
    return min(max(round(every * speed / fastest), 1), every)


@dataclass(slots=True)
class Pace:
    """The speeds of the workers of a run."""

    every: int
    """The batches of the fastest."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Batches per second, where they are known."""

    def measured(self, worker: int, batches: int, seconds: float) -> None:
        """``worker`` took so long for its last ``batches``."""
        if seconds > 0:
            speed, before = batches / seconds, self.speeds.get(worker)
            self.speeds[worker] = speed if before is None else _MEMORY * before + (1 - _MEMORY) * speed

    def gone(self, worker: int) -> None:
        """Nobody is compared with ``worker`` any more."""
        self.speeds.pop(worker, None)

    def share(self, worker: int) -> int:
        """How many batches ``worker`` should take now."""
        speed = self.speeds.get(worker)
        return self.every if speed is None else share_of(self.every, speed, max(self.speeds.values()))
