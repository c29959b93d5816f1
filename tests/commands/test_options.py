"""The text of options becomes values, or a message that says what is valid."""

from __future__ import annotations

import pytest

from manyhands.commands.options import parse_settings, parse_worker_counts, parse_workers
from manyhands.errors import UsageError


@pytest.mark.parametrize("text, value", [("1", 1), ("16", 16), ("auto", "auto"), ("2-4", (2, 4)), ("3-3", (3, 3))])
def test_workers(text: str, value: object) -> None:
    assert parse_workers(text) == value


@pytest.mark.parametrize("text", ["", "two", "0", "-3", "1.5", "2-", "-", "0-2", "4-2", "²"])
def test_workers_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="valid: a whole number of at least 1, auto, or a range"):
        parse_workers(text)


def test_worker_counts_are_sorted_and_unique() -> None:
    assert parse_worker_counts("4, 1,2,2") == [1, 2, 4]
    with pytest.raises(UsageError, match="with commas"):
        parse_worker_counts("1,,2")


def test_settings_keep_all_after_the_first_equals_sign() -> None:
    assert parse_settings(["lr=0.1", "text=a=b", "path="]) == {"lr": "0.1", "text": "a=b", "path": ""}
    with pytest.raises(UsageError, match="key=value"):
        parse_settings(["=1"])
