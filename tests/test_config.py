"""Reading the environment: the prefix, the default, and names that are not in the table."""

from __future__ import annotations

import pytest

from manyhands.config import environment


def test_a_variable_is_read_with_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_RUNS", "elsewhere")
    assert environment("RUNS", "runs") == "elsewhere"


@pytest.mark.parametrize("value", [None, ""])
def test_not_set_and_empty_give_the_default(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_MNIST", raising=False)
    if value is not None:
        monkeypatch.setenv("MANYHANDS_MNIST", value)
    assert environment("MNIST") is None
    assert environment("MNIST", "digits") == "digits"


def test_a_name_outside_the_table_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="MANYHANDS_COLOUR is not in the table"):
        environment("COLOUR")
