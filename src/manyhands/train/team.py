"""How many workers a user wants."""

from __future__ import annotations

from manyhands.comm.arena import MOST_WORKERS
from manyhands.engine.local import cores
from manyhands.errors import UsageError

__all__ = ["MOST_WORKERS", "resized", "worker_range"]


def worker_range(workers: object) -> tuple[int, int]:
    """``4`` -> (4, 4); ``"auto"`` -> one per core; ``(2, 6)`` -> as it is."""
    if workers == "auto":
        return min(cores(), MOST_WORKERS), min(cores(), MOST_WORKERS)
    if isinstance(workers, int) and not isinstance(workers, bool) and 1 <= workers <= MOST_WORKERS:
        return workers, workers
    if (
        isinstance(workers, tuple)
        and len(workers) == 2
        and all(isinstance(w, int) and not isinstance(w, bool) for w in workers)
        and 1 <= workers[0] <= workers[1] <= MOST_WORKERS
    ):
        return workers[0], workers[1]
    raise UsageError(
        f'workers received {workers!r}; valid: an integer from 1 to 64, "auto", or a pair (min, max) of these'
    )


def resized(workers: tuple[int, int], count: object) -> tuple[int, int]:
    """What became of a ``worker_range`` once there are ``count``, which stays within where there is a range."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_WORKERS:
        raise UsageError(f"resize received {count!r}; valid is an integer from 1 to {MOST_WORKERS}")
    first, most = workers
    if first == most:
        return count, count
    if not first <= count <= most:
        raise UsageError(f"resize received {count}; this trainer was given workers=({first}, {most})")
    return workers
