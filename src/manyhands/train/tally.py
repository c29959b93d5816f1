"""Adds up what lanes report of their batches: how many rows, the loss, the metrics.

Floating-point sums depend on their order. Here it is that of the lanes and of the batches, however many batches are
added up at once, so what a history says depends neither on workers nor on when somebody looked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manyhands.train.metrics import Metric

__all__ = ["add_in_order", "sums_of", "values_of"]


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


def values_of(sums: np.ndarray, metrics: Sequence[Metric]) -> dict[str, float]:
    """Loss and metrics, by name, of what was added up."""
    count = int(sums[0])
    values = {"loss": float(sums[1] / count) if count else float("nan")}
    at = 2
    for metric in metrics:
        values[metric.name] = metric.result(sums[at : at + metric.width].tolist(), count)
        at += metric.width
    return values
