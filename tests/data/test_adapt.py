"""Every accepted kind of data becomes the same rows; every other gets an error that says what to do."""

from __future__ import annotations

import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from manyhands.data.adapt import adapt
from manyhands.data.source import ColumnSource, DatasetSource, SelectedSource
from manyhands.errors import DataError

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 1, 0])
POSITIONS = np.array([2, 0], dtype=np.int64)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, position: int) -> Any:
        return torch.from_numpy(X[position]), int(Y[position])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y.tolist(), strict=True)


class Strided:
    """A source of the user's own."""

    def __len__(self) -> int:
        return 4

    def fetch(self, indices: np.ndarray) -> Any:
        return torch.from_numpy(X[indices]), torch.from_numpy(Y[indices])


def double(samples: list[Any]) -> Any:
    return torch.stack([torch.as_tensor(x) for x, _ in samples]) * 2, torch.tensor([y for _, y in samples])


PAIR_KINDS = {
    "arrays": lambda: (X, Y),
    "tensors": lambda: (torch.from_numpy(X), torch.from_numpy(Y)),
    "mixed": lambda: (X, torch.from_numpy(Y)),
    "frame and series": lambda: (pd.DataFrame(X, columns=["a", "b", "c"]), pd.Series(Y, index=[9, 8, 7, 6])),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "lists of tensors": lambda: (list(torch.from_numpy(X)), Y.tolist()),
    "float64": lambda: (X.astype(np.float64), Y),
    "small integers": lambda: (X, Y.astype(np.uint8)),
    "booleans": lambda: (X, Y.astype(bool)),
    "int32 tensor": lambda: (X, torch.from_numpy(Y).int()),
    "big-endian": lambda: (X.astype(">f4"), Y.astype(">i2")),
    "reversed view": lambda: (X[::-1].copy()[::-1], Y),
    "columns of a table": lambda: (np.c_[X, Y].astype(np.float32)[:, :3], Y),
    "tensor that requires gradients": lambda: (torch.from_numpy(X.copy()).requires_grad_(), Y),
    "TensorDataset": lambda: TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "map-style Dataset": Pairs,
    "Subset": lambda: Subset(Pairs(), [0, 1, 2, 3]),
    "DataLoader": lambda: DataLoader(Pairs(), batch_size=2),
    "IterableDataset": Stream,
    "generator": lambda: iter(list(zip(X, Y.tolist(), strict=True))),
    "list of samples": lambda: list(zip(X.tolist(), Y.tolist(), strict=True)),
    "list of dicts": lambda: [{"x": x, "label": y} for x, y in zip(X, Y, strict=True)],
    "source": Strided,
}


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_kinds_of_pairs(kind: str) -> None:
    adapted = adapt(PAIR_KINDS[kind]())
    assert len(adapted.source) == 4
    inputs, target = adapted.source.fetch(POSITIONS)
    inputs = inputs["x"] if isinstance(inputs, dict) else inputs
    assert inputs.dtype == torch.float32
    assert not inputs.requires_grad
    assert torch.equal(inputs, torch.from_numpy(X[POSITIONS]))
    assert target.dtype == torch.int64
    assert target.tolist() == [1, 0]


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_what_was_adapted_survives_cloudpickle(kind: str) -> None:
    adapted = adapt(PAIR_KINDS[kind]())
    again = pickle.loads(cloudpickle.dumps(adapted))
    assert again.source.fetch(POSITIONS)[1].tolist() == [1, 0]
    assert (again.shuffle, again.note) == (adapted.shuffle, adapted.note)


@pytest.mark.parametrize(
    "data",
    [X, torch.from_numpy(X), pd.DataFrame(X), X.tolist(), (X,), (X, None), (X, Y), TensorDataset(torch.from_numpy(X))],
    ids=["array", "tensor", "frame", "list", "tuple of one", "pair without y", "pair", "TensorDataset"],
)
def test_x_alone_is_enough_to_predict(data: Any) -> None:
    inputs, _ = adapt(data, needs_target=False).source.fetch(POSITIONS)
    assert torch.equal(inputs, torch.from_numpy(X[POSITIONS]))


@pytest.mark.parametrize(
    "data",
    [X, (X,), (X, None), [X, Y], {"a": X}, TensorDataset(torch.from_numpy(X)), iter(X)],
    ids=["array", "tuple of one", "None", "list for a pair", "dict", "TensorDataset", "generator"],
)
def test_missing_target(data: Any) -> None:
    with pytest.raises(DataError, match=r"no target: received .* Pass a tuple \(x, y\)"):
        adapt(data)


def test_dict_of_columns() -> None:
    source = adapt((types.MappingProxyType({"age": Y, "pixels": X}), Y.astype(float))).source
    inputs, target = source.fetch(POSITIONS)
    assert list(inputs) == ["age", "pixels"]
    assert inputs["age"].tolist() == [1, 0]
    assert target.dtype == torch.float32


def test_last_of_a_longer_tuple_is_the_target() -> None:
    columns, target = adapt(TensorDataset(*(torch.arange(4) * n for n in (1, 2, 3)))).source.fetch(POSITIONS)
    assert [column.tolist() for column in columns] == [[2, 0], [4, 0]]
    assert target.tolist() == [6, 0]
    inputs, target = adapt(((X, Y), Y)).source.fetch(POSITIONS)
    assert isinstance(inputs, tuple)
    assert target.tolist() == [1, 0]


def test_conversions_are_said() -> None:
    assert (
        adapt((X.astype(np.float64), Y.astype(np.float64))).note
        == "x: float64 used as float32; y: float64 used as float32"
    )
    assert adapt((X, Y)).note is None


def test_types_that_stay() -> None:
    images = np.zeros((4, 2, 2), dtype=np.uint8)
    assert adapt((images, Y)).source.fetch(POSITIONS)[0].dtype == torch.uint8
    assert adapt((torch.zeros(4, 2, dtype=torch.float64), Y)).source.fetch(POSITIONS)[0].dtype == torch.float64
    assert adapt((X.astype(np.float16), Y)).source.fetch(POSITIONS)[0].dtype == torch.float16


def test_arrays_in_memory_are_not_copied() -> None:
    x, frozen = X.copy(), X.copy()
    frozen.setflags(write=False)
    for array in (x, frozen):
        source = adapt((array, Y)).source
        assert isinstance(source, ColumnSource)
        assert source.inputs.tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_memory_maps_stay_maps(tmp_path: Path, dtype: type) -> None:
    X.astype(dtype).tofile(tmp_path / "x.bin")
    mapped = np.memmap(tmp_path / "x.bin", dtype=dtype, mode="r", shape=(4, 3))
    source = adapt((mapped, Y)).source
    assert isinstance(source, ColumnSource)
    assert source.inputs.tensor.data_ptr() == mapped.ctypes.data
    inputs, _ = source.fetch(POSITIONS)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, torch.from_numpy(X[POSITIONS]))
    half, _ = adapt((mapped[1:, ::2], Y[1:])).source.fetch(POSITIONS)
    assert torch.equal(half, torch.from_numpy(X[1:, ::2][POSITIONS]))


def test_pandas_types() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": [True, False], "c": [0.5, 1.5]})
    assert adapt((frame, [0, 1])).source.fetch(np.array([0]))[0].tolist() == [[1.0, 1.0, 0.5]]
    nullable = pd.DataFrame({"a": pd.array([1, 2], dtype="Int64"), "b": pd.array([True, None], dtype="boolean")})
    inputs, target = adapt((nullable, nullable["a"])).source.fetch(np.array([1, 0]))
    assert inputs[0, 0] == 2
    assert inputs[0, 1].isnan()
    assert (target.dtype, target.tolist()) == (torch.int64, [2, 1])
    with pytest.raises(DataError, match=r"column 'name' of x has type .*get_dummies"):
        adapt((pd.DataFrame({"a": [1, 2], "name": ["x", "y"]}), [0, 1]))
    with pytest.raises(DataError, match=r"of y has type category"):
        adapt(([1.0, 2.0], pd.Series(["x", "y"], dtype="category")))


def test_subsets_of_tensors_stay_columns() -> None:
    part, _ = random_split(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), [3, 1])
    source = adapt(Subset(part, [2, 0])).source
    assert isinstance(source, SelectedSource)
    assert isinstance(source.source, SelectedSource)
    assert isinstance(source.source.source, ColumnSource)
    expected = X[[part.indices[2], part.indices[0]]]
    assert torch.equal(source.fetch(np.array([0, 1]))[0], torch.from_numpy(expected))


def test_loader_is_taken_over() -> None:
    loader = DataLoader(Pairs(), batch_size=3, shuffle=True, drop_last=True, num_workers=2, collate_fn=double)
    adapted = adapt(loader)
    assert (adapted.batch_size, adapted.shuffle, adapted.drop_last) == (3, True, True)
    assert adapted.note == (
        "from the DataLoader: data set, batch size 3, shuffle, drop_last, collate function; not used: num_workers=2"
    )
    assert isinstance(adapted.source, DatasetSource)
    assert torch.equal(adapted.source.fetch(POSITIONS)[0], torch.from_numpy(X[POSITIONS]) * 2)


def test_loader_of_tensors_is_columns() -> None:
    adapted = adapt(DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=2))
    assert isinstance(adapted.source, ColumnSource)
    assert not adapted.shuffle
    assert adapted.note == "from the DataLoader: data set, batch size 2, order"


def test_loader_over_a_stream() -> None:
    adapted = adapt(DataLoader(Stream(), batch_size=2))
    assert isinstance(adapted.source, ColumnSource)
    assert (adapted.shuffle, adapted.batch_size) == (False, 2)
    doubled = adapt(
        DataLoader(Stream(), batch_size=2, collate_fn=lambda rows: double([(torch.from_numpy(x), y) for x, y in rows]))
    )
    assert torch.equal(doubled.source.fetch(POSITIONS)[0], torch.from_numpy(X[POSITIONS]) * 2)


@pytest.mark.parametrize(
    "sampler",
    [SubsetRandomSampler([0, 1]), RandomSampler(Pairs(), replacement=True), RandomSampler(Pairs(), num_samples=2)],
    ids=["subset", "replacement", "fewer"],
)
def test_other_samplers_are_refused(sampler: Any) -> None:
    with pytest.raises(DataError, match=r"sampler is \w+, .*Subset\(dataset, indices\)"):
        adapt(DataLoader(Pairs(), sampler=sampler))


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_sampler": [[0, 1], [2, 3]]}], ids=str)
def test_loaders_without_a_batch_size_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"batch_size=None or a batch_sampler .* Pass its data set"):
        adapt(DataLoader(Pairs(), **options))


def test_iterables_keep_their_order() -> None:
    adapted = adapt(Stream())
    assert not adapted.shuffle
    assert adapted.note == "read once into memory: 4 samples, in their order"


@pytest.mark.parametrize(
    "data, message",
    [
        ((X, Y[:3]), r"differ in length: 4 and 3 rows"),
        (({"a": X, "b": Y[:2]}, Y), r"differ in length: 4 and 2 and 4 rows"),
        ((X[:0], Y[:0]), r"empty: 0 rows"),
        ((), r"no columns"),
        ([], r"empty: list of 0 elements yielded no sample"),
        (iter([]), r"empty: list_iterator yielded no sample"),
        (Subset(Pairs(), []), r"empty: Subset has 0 samples"),
        ((np.array(["a", "b"]), Y[:2]), r"x is numpy.ndarray of type <U1 and shape \(2,\); valid: numbers"),
        ((X, np.array([{}] * 4)), r"y is numpy.ndarray of type object"),
        ((np.float32(3), Y), r"shape \(\); valid"),
        ((torch.eye(4).to_sparse(), Y), r"x is torch.Tensor .*; valid: a dense tensor"),
        (([[1, 2], [3]], [0, 1]), r"x is list of 2 elements whose rows differ in shape"),
        (([torch.ones(2), torch.ones(3)], [0, 1]), r"rows of x differ in shape .*collate_fn"),
        ([(1, 2), (1, 2, 3)], r"samples differ in structure .* each like the first, tuple of 2"),
        ([{"a": 1, "y": 0}, {"b": 1, "y": 0}], r"samples differ in structure \('a'\)"),
        ("table.csv", r"data is str 'table.csv'; valid: .*read_table\(path\)"),
        (Path("x.parquet"), r"read_table\(path\)"),
        (None, r"data is NoneType; valid: \(x, y\)"),
        (7, r"data is int; valid"),
        (({1: X}, Y), r"names of columns are \[1\]; valid: strings"),
    ],
)
@pytest.mark.parametrize("needs_target", [True, False])
def test_bad_data_gets_a_clear_error(data: Any, message: str, needs_target: bool) -> None:
    with pytest.raises(DataError, match=message):
        adapt(data, needs_target=needs_target)


def test_dataset_without_length() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, position: int) -> Any:
            return position

    with pytest.raises(DataError, match="Endless has no length; valid: a map-style Dataset"):
        adapt(Endless())


def test_broken_dataset_raises_its_own_error_in_the_caller() -> None:
    class Broken(Pairs):
        def __getitem__(self, position: int) -> Any:
            raise FileNotFoundError("image 0.png")

    with pytest.raises(FileNotFoundError, match=r"0\.png"):
        adapt(Broken())
