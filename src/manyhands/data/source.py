"""Where batches come from: a source turns positions of the data set into the rows that lie there.

``ColumnSource`` holds arrays and is the fast one, ``DatasetSource`` asks a map-style Dataset row by row, and
``SelectedSource`` is some rows of another source. This module also owns the shape of a batch: how inputs and target
are told apart, and how a model is called with the inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

__all__ = [
    "Batch",
    "Column",
    "ColumnSource",
    "DatasetSource",
    "SelectedSource",
    "Source",
    "call_model",
    "map_tree",
    "split_batch",
    "view_array",
]

Batch = tuple[Any, Any]
"""(inputs, target): inputs are a tensor, a tuple or a dict of tensors; the target may be None."""

Indices = npt.NDArray[np.int64]

TARGET_KEYS = ("target", "targets", "label", "labels", "y")
"""In a sample that is a dict, the first of these keys is the target."""


@runtime_checkable
class Source(Protocol):
    """Anything that has a length and can be asked for rows."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Indices) -> Batch:
        """The rows at these positions of the data set, in this order."""
        ...


@dataclass(slots=True)
class Column:
    """A tensor whose first dimension is the row.

    ``dtype`` is set where rows are converted when they are read, which spares a converted copy of a large file.
    ``origin`` is the memory-mapped array that the tensor is a view of: a pickle carries it in place of the tensor,
    so that whoever ships the column can send the name of the file.
    """

    tensor: Tensor
    dtype: torch.dtype | None = None
    origin: np.ndarray | None = None

    @classmethod
    def mapped(cls, origin: np.ndarray, dtype: torch.dtype | None = None) -> Column:
        """A column over a memory-mapped array, without a copy."""
        return cls(view_array(origin), dtype, origin)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.origin is not None:
            return Column.mapped, (self.origin, self.dtype)
        return Column, (self.tensor, self.dtype)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows with these numbers."""
        found = torch.index_select(self.tensor, 0, rows)
        return found if self.dtype is None else found.to(self.dtype)

    def run(self, start: int, stop: int) -> Tensor:
        """The rows [start, stop); a copy, because a model may work in place on what it is given."""
        found = self.tensor[start:stop]
        return found.clone() if self.dtype is None else found.to(self.dtype, copy=True)


class ColumnSource:
    """Rows of tensors: ``inputs`` and ``target`` are trees (column, tuple or dict) of columns of equal length."""

    def __init__(self, inputs: Any, target: Any = None) -> None:
        self.inputs = map_tree(_as_column, inputs)
        self.target = map_tree(_as_column, target)
        lengths: list[int] = []
        map_tree(lambda column: lengths.append(len(column.tensor)), (self.inputs, self.target))
        assert len(set(lengths)) == 1, f"columns of lengths {lengths}"
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Indices) -> Batch:
        if _is_run(indices):
            start, stop = int(indices[0]), int(indices[-1]) + 1
            assert 0 <= start < stop <= self._length, f"rows [{start}, {stop}) of {self._length}"

            def take(column: Column) -> Tensor:
                return column.run(start, stop)
        else:
            # An order that is shared read-only would make torch warn; its slice is small.
            rows = torch.from_numpy(indices if indices.flags.writeable else indices.copy())

            def take(column: Column) -> Tensor:
                return column.gather(rows)

        return map_tree(take, self.inputs), map_tree(take, self.target)


class DatasetSource:
    """Samples of a map-style Dataset, put together by its collate function."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Indices) -> Batch:
        positions = indices.tolist()
        if callable(getattr(self.dataset, "__getitems__", None)):
            samples = self.dataset.__getitems__(positions)
        else:
            samples = [self._sample(position) for position in positions]
        return split_batch(self.collate(samples))

    def _sample(self, position: int) -> Any:
        try:
            return self.dataset[position]
        except Exception as error:
            error.add_note(f"while reading sample {position} of {type(self.dataset).__name__}")
            raise


class SelectedSource:
    """Some rows of another source, in an order of their own."""

    def __init__(self, source: Source, rows: Sequence[int] | Indices) -> None:
        self.source = source
        self.rows = np.asarray(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Indices) -> Batch:
        return self.source.fetch(self.rows[indices])


def split_batch(batch: Any) -> Batch:
    """Tell inputs and target apart in what a Dataset or a collate function returns.

    A pair is (inputs, target); in a longer tuple the last element is the target and the rest are the inputs; in a
    dict the target has one of the names in ``TARGET_KEYS``; anything else is inputs without a target.
    """
    if isinstance(batch, Mapping):
        name = next((key for key in TARGET_KEYS if key in batch), None)
        return {key: value for key, value in batch.items() if key != name}, None if name is None else batch[name]
    if isinstance(batch, tuple | list):
        if len(batch) == 1:
            return batch[0], None
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    return batch, None


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """``model(x)``, ``model(*xs)`` for a tuple, or ``model(**xs)`` for a dict."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to every leaf of nested tuples and dicts; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple(map_tree(function, branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: map_tree(function, branch) for key, branch in tree.items()}
    return function(tree)


def view_array(array: np.ndarray) -> Tensor:
    """A tensor over the memory of an array, also of a read-only one: rows are copied out of it, never written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _as_column(leaf: Column | Tensor) -> Column:
    return leaf if isinstance(leaf, Column) else Column(leaf)


def _is_run(indices: Indices) -> bool:
    """Whether these are consecutive positions; the first test is cheap and settles it for nearly all shuffled ones."""
    if len(indices) == 0 or indices[-1] - indices[0] != len(indices) - 1:
        return False
    return bool((indices[1:] - indices[:-1] == 1).all())
