"""Rows come back in the order they were asked for, as private copies, from every kind of source."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.source import (
    Column,
    ColumnSource,
    DatasetSource,
    SelectedSource,
    Source,
    call_model,
    map_tree,
    split_batch,
)


def rows_of(*positions: int) -> np.ndarray:
    return np.array(positions, dtype=np.int64)


def leaves_of(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    map_tree(lambda leaf: leaves.append(leaf.tolist()), tree)
    return leaves


class Squares(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        if position == 7:
            raise ZeroDivisionError("sample seven is bad")
        return torch.tensor([position, position**2]), position % 2


class SquaresAtOnce(Squares):
    def __getitems__(self, positions: list[int]) -> list[Any]:
        return [(torch.tensor([position, -1]), 0) for position in positions]


@given(st.lists(st.integers(0, 19), min_size=0, max_size=40))
def test_columns_are_fetched_as_asked(positions: list[int]) -> None:
    x, y = torch.arange(60.0).reshape(20, 3), torch.arange(20)
    inputs, target = ColumnSource(x, y).fetch(np.array(positions, dtype=np.int64))
    assert torch.equal(inputs, x[positions])
    assert torch.equal(target, y[positions])


@given(start=st.integers(0, 19), length=st.integers(1, 20))
def test_a_run_is_the_same_as_a_gather(start: int, length: int) -> None:
    x = torch.arange(60.0).reshape(20, 3)
    positions = np.arange(start, min(start + length, 20))
    inputs, target = ColumnSource(x).fetch(positions)
    assert torch.equal(inputs, x[positions])
    assert target is None


@pytest.mark.parametrize("positions", [rows_of(0, 1, 2), rows_of(2, 0, 1)], ids=["run", "gather"])
def test_working_in_place_on_a_batch_leaves_the_data_alone(positions: np.ndarray) -> None:
    x = torch.ones(3, 2)
    inputs, _ = ColumnSource(x).fetch(positions)
    inputs.zero_()
    assert torch.equal(x, torch.ones(3, 2))


def test_run_beyond_the_end_is_not_cut_short() -> None:
    with pytest.raises(AssertionError, match=r"rows \[2, 4\) of 3"):
        ColumnSource(torch.ones(3, 2)).fetch(rows_of(2, 3))


def test_read_only_order_is_accepted() -> None:
    order = rows_of(2, 0)
    order.setflags(write=False)
    inputs, _ = ColumnSource(torch.arange(3)).fetch(order)
    assert inputs.tolist() == [2, 0]


def test_trees_keep_their_structure() -> None:
    source = ColumnSource({"a": torch.arange(4), "b": (torch.arange(4) * 2,)}, (torch.arange(4) * 3, None))
    inputs, target = source.fetch(rows_of(3, 1))
    assert inputs["a"].tolist() == [3, 1]
    assert inputs["b"][0].tolist() == [6, 2]
    assert target[0].tolist() == [9, 3]
    assert target[1] is None


def test_column_converts_rows_as_they_are_read() -> None:
    source = ColumnSource(Column(torch.arange(4, dtype=torch.float64), torch.float32))
    assert source.fetch(rows_of(0, 1))[0].dtype == torch.float32
    assert source.fetch(rows_of(1, 0))[0].dtype == torch.float32
    assert source.inputs.tensor.dtype == torch.float64


def test_columns_of_different_length_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"lengths \[3, 4\]"):
        ColumnSource(torch.ones(3), torch.ones(4))


def test_sources_survive_cloudpickle() -> None:
    class Local(Squares):
        pass

    columns = ColumnSource({"a": torch.arange(10)}, torch.arange(10) * 2)
    for source in (columns, DatasetSource(Local()), SelectedSource(columns, [5, 4, 3])):
        assert isinstance(source, Source)
        again = pickle.loads(cloudpickle.dumps(source))
        assert len(again) == len(source)
        expected, received = source.fetch(rows_of(2, 0)), again.fetch(rows_of(2, 0))
        assert leaves_of(received) == leaves_of(expected) != []


def test_mapped_column_pickles_its_array_and_not_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    np.arange(12, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="r", shape=(4, 3))
    column = Column.mapped(mapped, torch.float64)
    assert column.tensor.data_ptr() == mapped.ctypes.data
    assert column.__reduce__()[1][0] is mapped
    again = pickle.loads(cloudpickle.dumps(column))
    assert torch.equal(
        again.gather(torch.tensor([3, 0])), torch.tensor([[9.0, 10, 11], [0, 1, 2]], dtype=torch.float64)
    )


def test_dataset_source_collates_samples() -> None:
    inputs, target = DatasetSource(Squares()).fetch(rows_of(3, 1))
    assert inputs.tolist() == [[3, 9], [1, 1]]
    assert target.tolist() == [1, 1]


def test_dataset_source_uses_getitems() -> None:
    inputs, _ = DatasetSource(SquaresAtOnce()).fetch(rows_of(3, 7))
    assert inputs.tolist() == [[3, -1], [7, -1]]


def test_dataset_source_names_the_bad_sample() -> None:
    with pytest.raises(ZeroDivisionError, match="seven is bad") as caught:
        DatasetSource(Squares()).fetch(rows_of(6, 7, 8))
    assert caught.value.__notes__ == ["while reading sample 7 of Squares"]


def test_selected_source_is_rows_of_another() -> None:
    source = SelectedSource(ColumnSource(torch.arange(10) * 10), [9, 0, 5])
    assert len(source) == 3
    assert source.fetch(rows_of(2, 0))[0].tolist() == [50, 90]


@pytest.mark.parametrize(
    "batch, expected",
    [
        (("x",), ("x", None)),
        (["x", "y"], ("x", "y")),
        (("a", "b", "y"), (("a", "b"), "y")),
        ({"a": 1, "label": 2}, ({"a": 1}, 2)),
        ({"a": 1, "y": 2, "target": 3}, ({"a": 1, "y": 2}, 3)),
        ({"a": 1}, ({"a": 1}, None)),
        ("x", ("x", None)),
    ],
)
def test_split_batch(batch: Any, expected: Any) -> None:
    assert split_batch(batch) == expected


def test_call_model_passes_inputs_by_their_kind() -> None:
    class Subtract(nn.Module):
        def forward(self, a: int, b: int = 0) -> int:
            return a - b

    model = Subtract()
    assert call_model(model, 5) == 5
    assert call_model(model, (5, 2)) == call_model(model, [5, 2]) == 3
    assert call_model(model, {"b": 5, "a": 2}) == -3
