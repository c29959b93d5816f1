"""Shares by speed: in the time in which the fastest makes all its batches, nobody is asked for much more or less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.pace import Pace, share_of

SPEEDS = st.dictionaries(st.integers(0, 7), st.floats(1e-3, 1e5), min_size=1)


@pytest.mark.parametrize(
    "every, speed, share", [(32, 4.0, 32), (32, 2.0, 16), (32, 1.0, 8), (32, 0.01, 1), (1, 1.0, 1)]
)
def test_shares_are_proportional(every: int, speed: float, share: int) -> None:
    assert share_of(every, speed, 4.0) == share


@given(SPEEDS, st.integers(1, 500))
def test_everybody_comes_back_together(speeds: dict[int, float], every: int) -> None:
    pace = Pace(every)
    for worker, speed in speeds.items():
        pace.measured(worker, 1, 1 / speed)
    shares = {worker: pace.share(worker) for worker in speeds}
    assert all(1 <= share <= every for share in shares.values())
    assert max(shares.values()) == every, "the fastest makes all of them"
    turn = every / max(pace.speeds.values())
    for worker, share in shares.items():
        batch = 1 / pace.speeds[worker]
        assert share == 1 or abs(share * batch - turn) <= (0.5 + 1e-6) * batch


@given(SPEEDS)
def test_who_is_not_measured_counts_as_fast(speeds: dict[int, float]) -> None:
    assert Pace(32, speeds).share(9) == 32


def test_nobody_is_compared_with_who_is_gone() -> None:
    pace = Pace(32, {0: 8.0, 1: 1.0})
    assert pace.share(1) == 4
    pace.gone(0)
    assert pace.share(1) == 32


@given(st.floats(1.0, 100.0), st.floats(1.0, 100.0))
def test_a_speed_follows_what_is_measured(before: float, after: float) -> None:
    pace = Pace(8)
    pace.measured(0, 1, 1 / before)
    for _ in range(12):
        pace.measured(0, 4, 4 / after)
    assert pace.speeds[0] == pytest.approx(after, rel=0.05)
    pace.measured(0, 4, 0.0)  # a clock that stood still says nothing
    assert pace.speeds[0] == pytest.approx(after, rel=0.05)
