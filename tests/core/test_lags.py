"""The running mean of the staleness."""

from __future__ import annotations

import pytest

from manyhands.core.lags import Lags


def test_each_worker_has_its_own_mean() -> None:
    lags = Lags(most=9.0)
    for _ in range(100):
        lags.saw(0, 2)
        lags.saw(1, 7)
    assert lags.of(0) == pytest.approx(2) and lags.of(1) == pytest.approx(7)
    assert lags.of(2) == 0.0


def test_who_is_never_behind_is_predicted_nothing() -> None:
    lags = Lags(most=9.0)
    lags.saw(0, 0)
    assert lags.of(0) == 0.0
    lags.saw(0, 3)
    assert lags.of(0) == 3.0
    for _ in range(40):  # the others have left
        lags.saw(0, 0)
    assert lags.of(0) == 0.0


@pytest.mark.parametrize("most, predicted", [(9.0, 9.0), (1.0, 1.0), (0.0, 0.0), (19.0, 12.0)])
def test_no_more_is_predicted_than_can_be(most: float, predicted: float) -> None:
    lags = Lags(most)
    lags.saw(0, 12)
    assert lags.of(0) == predicted
