"""The words a user chooses a strategy with, checked at the border."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import UsageError, unknown_name

__all__ = ["MOST_WORKERS", "AllReduce", "check_choice", "resolve_sync", "worker_range"]

MOST_WORKERS = 64
"""The seats of an arena."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Copies agree on the gradient of every global batch: an ordered sum over the lanes."""

    name = "allreduce"


_SYNCS = {"allreduce": AllReduce, "auto": AllReduce}


def resolve_sync(sync: object) -> AllReduce:
    """A name or an object such as ``mh.AllReduce()``."""
    if isinstance(sync, AllReduce):
        return sync
    if not isinstance(sync, str) or sync not in _SYNCS:
        raise unknown_name("sync", sync, _SYNCS)
    return _SYNCS[sync]()


def check_choice(kind: str, received: object, valid: Sequence[str]) -> None:
    """Refuse a word that is not one of the valid ones."""
    if received not in valid:
        raise unknown_name(kind, received, valid)


def worker_range(workers: object) -> tuple[int, int]:
    """``4`` -> (4, 4); ``"auto"`` -> one per core; ``(2, 6)`` -> as it is."""
    if workers == "auto":
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(count, MOST_WORKERS), min(count, MOST_WORKERS)
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
