"""Every position belongs to exactly one lane of one step, and all of it is a pure function."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.order import epoch_order, lane_slice, order_digest, steps_per_epoch, stream_seed
from manyhands.errors import UsageError

sizes = st.integers(1, 500)

GOLDEN_ORDER = [2, 4, 3, 6, 5, 0, 1, 7]
GOLDEN_DIGEST = "b4d2b68b71c8efabf60957b09642650f4ca14a71d8141ca701e6e7b246b3c6da"


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 10_000), samples=sizes)
def test_order_has_every_position_once(seed: int, epoch: int, samples: int) -> None:
    order = epoch_order(seed, epoch, samples)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(samples))
    assert np.array_equal(order, epoch_order(seed, epoch, samples))


def test_order_changes_with_seed_and_epoch() -> None:
    orders = {order_digest(epoch_order(seed, epoch, 100)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_order_is_the_identity_without_shuffle() -> None:
    assert epoch_order(7, 3, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_order_never_changes_between_releases() -> None:
    """A run that is resumed under another version of NumPy or of this library must take the same samples."""
    assert epoch_order(0, 0, 8).tolist() == GOLDEN_ORDER
    assert order_digest(epoch_order(1, 2, 1000)) == GOLDEN_DIGEST


def test_negative_seed_is_refused() -> None:
    with pytest.raises(UsageError, match=r"seed is -1; valid: 0 or a positive"):
        epoch_order(-1, 0, 8)


def test_digest_does_not_depend_on_memory_layout() -> None:
    order = epoch_order(0, 0, 10)
    assert order_digest(np.repeat(order, 2)[::2]) == order_digest(order) == order_digest(order.astype(">i8"))
    assert order_digest(order[::-1]) != order_digest(order)


@given(samples=sizes, batch_size=st.integers(1, 100), lanes=st.integers(1, 20), drop_last=st.booleans())
def test_lanes_cut_the_epoch_without_gap_or_overlap(samples: int, batch_size: int, lanes: int, drop_last: bool) -> None:
    end = 0
    for step in range(steps_per_epoch(samples, batch_size, drop_last)):
        rows = []
        for lane in range(lanes):
            start, stop = lane_slice(step, lane, samples=samples, batch_size=batch_size, lanes=lanes)
            assert start == end
            rows.append(stop - start)
            end = stop
        assert max(rows) - min(rows) <= 1
        assert rows == sorted(rows, reverse=True)
        assert end == min((step + 1) * batch_size, samples)
    assert end == (samples - samples % batch_size if drop_last else samples)


@pytest.mark.parametrize(
    "samples, batch_size, drop_last, steps",
    [(10, 5, False, 2), (11, 5, False, 3), (11, 5, True, 2), (4, 5, False, 1), (4, 5, True, 0)],
)
def test_steps_per_epoch(samples: int, batch_size: int, drop_last: bool, steps: int) -> None:
    assert steps_per_epoch(samples, batch_size, drop_last) == steps


def test_short_last_batch_leaves_lanes_empty() -> None:
    slices = [lane_slice(1, lane, samples=10, batch_size=8, lanes=4) for lane in range(4)]
    assert slices == [(8, 9), (9, 10), (10, 10), (10, 10)]


def test_stream_seeds_are_apart() -> None:
    seeds = {stream_seed(0, step, lane) for step in range(100) for lane in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(0, "ab", "c") != stream_seed(0, "a", "bc")
    assert stream_seed(0, 1) != stream_seed(0, "1") != stream_seed(0)
    assert stream_seed(0, np.int64(5)) == stream_seed(0, 5)  # type: ignore[arg-type]


def test_stream_seed_is_the_same_in_another_process() -> None:
    code = "from manyhands.core.order import stream_seed; print(stream_seed(3, 'dropout', 4))"
    settings = {**os.environ, "PYTHONHASHSEED": "1", "MANYHANDS_WARM": "0"}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=settings
    )
    assert int(other.stdout) == stream_seed(3, "dropout", 4)
