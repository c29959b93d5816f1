"""How a comparison of worker counts is laid out."""

from __future__ import annotations

import pytest

from manyhands.errors import UsageError
from manyhands.plan.scale import Plan, choose_lanes


@pytest.mark.parametrize(
    "workers, batch_size, lanes",
    [([1, 2, 4], 64, 4), ([1, 2, 3], 64, 6), ([2, 3], 4, 3), ([5, 6, 7], 64, 7), ([1], 64, 1)],
)
def test_lanes_divide_evenly_among_all_counts_where_they_stay_few(
    workers: list[int], batch_size: int, lanes: int
) -> None:
    assert choose_lanes(workers, batch_size) == lanes


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"repeats": -1}])
def test_nothing_to_measure_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="valid: a whole number of at least 1"):
        Plan(workers=[1], lanes=1, **wrong)
