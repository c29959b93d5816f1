"""Sums over lanes and batches: the same bits however many batches are added up at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from manyhands.train.schedule import Course
from manyhands.train.tally import add_in_order, sums_of

RING, LANES, WIDTH = 16, 5, 3


def reports(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(RING, LANES, WIDTH)) * 10.0 ** np.arange(WIDTH)


def one_by_one(stats: np.ndarray, first: int, rows: list[int]) -> np.ndarray:
    """The plain way: batch by batch, lane by lane."""
    total = np.zeros(WIDTH)
    for number, count in enumerate(rows):
        batch = stats[(first + number) % RING, 0].copy()
        for lane in range(1, min(count, LANES)):
            batch = batch + stats[(first + number) % RING, lane]
        total = total + batch
    return total


@given(
    seed=st.integers(0, 1000),
    first=st.integers(0, 100),
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=RING),
    cuts=st.sets(st.integers(1, RING - 1)),
)
def test_any_cut_gives_the_bits_of_adding_one_by_one(seed: int, first: int, rows: list[int], cuts: set[int]) -> None:
    stats, total = reports(seed), np.zeros(WIDTH)
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    for start, stop in pairwise(edges):
        batches = np.arange(first + start, first + stop)
        total = add_in_order(total, sums_of(stats, batches, np.array(rows[start:stop])))
    assert total.tobytes() == one_by_one(stats, first, rows).tobytes()


def test_nothing_is_added() -> None:
    total = np.array([1.0, np.nan])
    assert add_in_order(total, np.zeros((0, 2))).tobytes() == total.tobytes()


@given(samples=st.integers(1, 60), batch_size=st.integers(1, 20), batches=st.lists(st.integers(0, 40), min_size=1))
def test_rows_of_batches(samples: int, batch_size: int, batches: list[int]) -> None:
    course = Course(samples=samples, batch_size=batch_size, lanes=1, drop_last=False)
    assert course.rows_of(np.array(batches)).tolist() == [course.batch_rows(batch) for batch in batches]
