"""Factors by worker, and whose the updates are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from manyhands.core.rates import Shares, check_rates, factor_of
from manyhands.errors import UsageError


def test_a_list_goes_by_the_number_of_the_worker() -> None:
    rates = [0.5, 2]
    check_rates(rates)
    assert [factor_of(rates, worker, 0.3) for worker in range(3)] == [0.5, 2, 1.0]


def test_a_function_is_told_the_worker_and_its_share() -> None:
    assert factor_of(lambda worker, share: worker + share, 3, 0.25) == 3.25


@pytest.mark.parametrize("wrong", [0.5, "fast", [], [1.0, 0], [1.0, -1], [math.nan], [math.inf], [True], ["2"]])
def test_what_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"rates.* received .*; valid"):
        check_rates(wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, None, "1"])
def test_what_a_function_returns_is_checked(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"rates\(1, 0.5\) returned .*; valid is a number above 0"):
        factor_of(lambda worker, share: wrong, 1, 0.5)


def test_shares_follow_who_brings_updates() -> None:
    shares = Shares()
    assert shares.of(0) == 0.0
    for _ in range(200):
        for worker in (0, 0, 0, 1):
            shares.came(worker)
    assert shares.of(0) == pytest.approx(0.75, abs=0.02)
    assert shares.of(0) + shares.of(1) == pytest.approx(1)
    for _ in range(500):
        shares.came(1)
    assert shares.of(1) > 0.99
