"""Adds up what lanes report of their batches: how many rows, the loss, the metrics.

Floating-point sums depend on their order. Here it is that of the lanes and of the batches, however many batches are
added up at once, so what a history says depends neither on workers nor on when somebody looked.
"""

from __future__ import annotations

import numpy as np

__all__ = ["add_in_order", "sums_of"]


def sums_of(stats: np.ndarray, batches: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """For each batch the sum over its lanes. ``stats``: by batch (a ring), lane and number; ``rows``: of each batch.

    A batch with fewer rows than lanes has none in the last lanes, which report nothing.
    """
    reports = stats[batches % len(stats)]
    total: np.ndarray = reports[:, 0].copy()
    for lane in range(1, stats.shape[1]):
        total[rows > lane] += reports[rows > lane, lane]
    return total


def add_in_order(total: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """``total`` and then one batch after the other."""
    added: np.ndarray = np.add.accumulate(np.vstack([total, sums]))[-1]
    return added
