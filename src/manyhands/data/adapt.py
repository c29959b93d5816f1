"""The border where the user's data becomes a source: every accepted kind, and the error for every other.

What is decided here is decided once: which part is the target, which types are converted (and said so in a note),
and what is taken over from a DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from manyhands.data.source import (
    Column,
    ColumnSource,
    DatasetSource,
    SelectedSource,
    Source,
    map_tree,
    split_batch,
    view_array,
)
from manyhands.errors import DataError

__all__ = ["Adapted", "adapt"]

VALID = (
    "valid: (x, y) of NumPy arrays, tensors, pandas objects or lists; x alone to predict; a dict of columns as x; "
    "a torch Dataset or DataLoader; a finite iterable of (x, y) samples"
)

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A source, and what the data said about how to go through it."""

    source: Source
    batch_size: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    note: str | None = None
    """What was converted, taken over or ignored, for the header of the run."""


def adapt(data: Any, *, needs_target: bool = True) -> Adapted:
    """Turn any accepted kind of data into a source.

    A pair is always (x, y), also where no target is needed, so that the same data can be given to ``fit``,
    ``evaluate`` and ``predict``; several inputs are a dict, or a tuple inside the pair: ``((a, b), y)``.
    """
    notes: list[str] = []
    if isinstance(data, DataLoader):
        adapted = _from_loader(data, notes)
    elif isinstance(data, IterableDataset):
        adapted = Adapted(source=_from_samples(data, default_collate, notes), shuffle=False)
    elif isinstance(data, Dataset):
        adapted = Adapted(source=_from_dataset(data, default_collate, notes))
    elif isinstance(data, Source):
        adapted = Adapted(source=data)
    elif isinstance(data, tuple | Mapping) or _is_array(data):
        inputs, target = split_batch(data) if isinstance(data, tuple) and data else (data, None)
        adapted = Adapted(source=_from_columns(inputs, target, notes))
    elif isinstance(data, list) and data and not isinstance(data[0], tuple | Mapping):
        if needs_target:
            raise _missing_target(data)
        adapted = Adapted(source=_from_columns(data, None, notes))
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes | list):
        adapted = Adapted(source=_from_dataset(data, default_collate, notes))
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes):
        adapted = Adapted(source=_from_samples(data, default_collate, notes), shuffle=False)
    else:
        hint = " Read a file first, e.g. with manyhands.data.read_table(path)." if isinstance(data, str | Path) else ""
        raise DataError(f"data is {_describe(data)}; {VALID}.{hint}")
    if needs_target:
        _require_target(adapted.source, data)
    return Adapted(
        source=adapted.source,
        batch_size=adapted.batch_size,
        shuffle=adapted.shuffle,
        drop_last=adapted.drop_last,
        note="; ".join(dict.fromkeys(notes)) or None,
    )


def _require_target(source: Source, data: Any) -> None:
    """Reading one row also shows now, and in the caller, what a broken Dataset would show in a worker."""
    _, target = source.fetch(np.zeros(1, dtype=np.int64))
    if target is None:
        raise _missing_target(data)


def _missing_target(data: Any) -> DataError:
    return DataError(
        f"data has no target: received {_describe(data)}. Pass a tuple (x, y), or a data set whose samples are (x, y) "
        "tuples, or dicts with a key 'target' or 'label'"
    )


# ── arrays ───────────────────────────────────────────────────────────────────


def _from_columns(inputs: Any, target: Any, notes: list[str]) -> ColumnSource:
    x = map_tree(lambda leaf: _column(leaf, "x", notes), _as_tree(inputs))
    y = map_tree(lambda leaf: _column(leaf, "y", notes), _as_tree(target))
    lengths: list[int] = []
    map_tree(lambda column: lengths.append(len(column.tensor)), (x, y))
    if not lengths:
        raise DataError(f"data has no columns: received {_describe(inputs)}; {VALID}")
    if len(set(lengths)) > 1:
        raise DataError(
            f"x and y, or the columns of x, differ in length: {' and '.join(map(str, lengths))} rows. "
            "Valid: one row in each per sample"
        )
    if lengths[0] == 0:
        raise DataError("data is empty: 0 rows; valid: at least one row. Check the filter or the path it came from")
    return ColumnSource(x, y)


def _as_tree(value: Any) -> Any:
    """Other mappings become plain dicts, which is what a tree of columns is made of."""
    if not isinstance(value, Mapping):
        return value
    if not all(isinstance(key, str) for key in value):
        raise DataError(f"the names of columns are {list(value)[:5]}; valid: strings, since the model gets **columns")
    return {key: _as_tree(branch) for key, branch in value.items()}


def _column(value: Any, role: str, notes: list[str]) -> Column:
    if isinstance(value, Tensor):
        return _from_tensor(value, role, notes)
    if _is_pandas(value):
        value = _pandas_to_array(value, role)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return _from_tensor(_stack(value, role), role, notes)
    elif not isinstance(value, np.ndarray):
        value = _list_to_array(value, role)
    return _from_array(value, role, notes)


def _from_tensor(tensor: Tensor, role: str, notes: list[str]) -> Column:
    if tensor.layout is not torch.strided or tensor.dim() == 0:
        raise DataError(f"{role} is {_describe(tensor)}; valid: a dense tensor with a row per sample")
    if tensor.device.type != "cpu":
        notes.append(f"{role}: copied from {tensor.device} to shared host memory")
    tensor = tensor.detach().cpu().contiguous()
    if role == "y" and tensor.dtype in _INTEGERS:
        tensor = tensor.to(torch.int64)
    return Column(tensor)


def _from_array(array: np.ndarray, role: str, notes: list[str]) -> Column:
    if array.dtype.kind not in "biufc" or array.ndim == 0:
        raise DataError(
            f"{role} is {_describe(array)}; valid: numbers or booleans with a row per sample. "
            "Encode text and categories as integers, or as one column each, first"
        )
    wanted = _wanted_dtype(array.dtype, role)
    if wanted is not None and array.dtype.kind == "f":
        notes.append(f"{role}: {array.dtype.name} used as float32")
    is_viewable = array.dtype.isnative and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    if isinstance(array, np.memmap) and is_viewable:
        return Column.mapped(array, None if wanted is None else getattr(torch, np.dtype(wanted).name))
    # Contiguous, because that is how columns travel to workers without a copy for each.
    return Column(view_array(np.ascontiguousarray(array, dtype=wanted or array.dtype.newbyteorder("="))))


def _wanted_dtype(dtype: np.dtype[Any], role: str) -> type[np.generic] | None:
    """The type to convert to: models are float32, and torch's losses want class numbers as int64."""
    if dtype.kind == "f" and dtype.itemsize >= 8:
        return np.float32
    if role == "y" and dtype.kind in "biu" and dtype.name != "int64":
        return np.int64
    return None


def _pandas_to_array(value: Any, role: str) -> np.ndarray:
    columns = list(value.dtypes.items()) if hasattr(value, "columns") else [(value.name, value.dtype)]
    for name, dtype in columns:
        if getattr(dtype, "kind", "O") not in "biuf":
            raise DataError(
                f"column {name!r} of {role} has type {dtype}; valid: numbers or booleans. Encode it first, e.g. with "
                "pandas.get_dummies, or .astype('category').cat.codes"
            )
    array: np.ndarray = value.to_numpy()
    if array.dtype.kind == "O":  # booleans beside floats, or pandas' nullable types
        is_whole = all(dtype.kind in "biu" for _, dtype in columns) and not np.any(value.isna().to_numpy())
        array = value.astype(np.int64 if is_whole else np.float64).to_numpy()
    return array


def _list_to_array(value: Any, role: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise DataError(f"{role} is {_describe(value)} whose rows differ in shape; valid: rows of one shape") from error
    # A list says nothing about precision, so its conversion is not worth a note.
    return array.astype(np.float32) if isinstance(value, list) and array.dtype == np.float64 else array


def _stack(rows: Any, role: str) -> Tensor:
    try:
        return torch.stack(list(rows))
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"the rows of {role} differ in shape or kind ({error}); valid: rows of one shape. For others pass a "
            "DataLoader with a collate_fn that pads them"
        ) from error


# ── data sets, loaders, iterables ────────────────────────────────────────────


def _from_dataset(dataset: Any, collate: Callable[[list[Any]], Any], notes: list[str]) -> Source:
    try:
        samples = len(dataset)
    except TypeError as error:
        raise DataError(
            f"the data set {type(dataset).__name__} has no length; valid: a map-style Dataset with __len__ and "
            "__getitem__, or a finite IterableDataset"
        ) from error
    if samples == 0:
        raise DataError(f"data is empty: {type(dataset).__name__} has 0 samples; valid: at least one")
    if type(dataset) is Subset:
        return SelectedSource(_from_dataset(dataset.dataset, collate, notes), dataset.indices)
    if type(dataset) is TensorDataset and collate is default_collate:
        return _from_columns(*split_batch(dataset.tensors), notes)
    return DatasetSource(dataset, collate)


def _from_samples(samples: Iterable[Any], collate: Callable[[list[Any]], Any], notes: list[str]) -> Source:
    """Read an iterable once, into columns."""
    rows = list(samples)
    if not rows:
        raise DataError(f"data is empty: {_describe(samples)} yielded no sample; valid: at least one")
    notes.append(f"read once into memory: {len(rows)} samples, in their order")
    if collate is not default_collate:
        return DatasetSource(rows, collate)
    first = rows[0]
    try:
        if isinstance(first, tuple):
            return _from_columns(*split_batch([list(field) for field in zip(*rows, strict=True)]), notes)
        if isinstance(first, Mapping):
            return _from_columns(*split_batch({key: [row[key] for row in rows] for key in first}), notes)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"samples differ in structure ({error}); valid: each like the first, {_describe(first)}"
        ) from error
    return _from_columns(rows, None, notes)


def _from_loader(loader: DataLoader[Any], notes: list[str]) -> Adapted:
    dataset: Any = loader.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    if loader.batch_size is None or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise DataError(
            "the DataLoader has batch_size=None or a batch_sampler of its own; valid: an integer batch_size. Pass its "
            "data set instead, and batch_size= to fit"
        )
    shuffle = False if is_iterable else _shuffle_of(loader)
    has_collate = loader.collate_fn is not default_collate
    taken = ["data set", f"batch size {loader.batch_size}", "shuffle" if shuffle else "order"]
    taken += ["drop_last"] * bool(loader.drop_last) + ["collate function"] * has_collate
    unused = [f"num_workers={loader.num_workers}"] * bool(loader.num_workers)
    unused += [name for name in ("pin_memory", "timeout", "worker_init_fn", "generator") if getattr(loader, name)]
    notes.append(f"from the DataLoader: {', '.join(taken)}" + f"; not used: {', '.join(unused)}" * bool(unused))
    read = _from_samples if is_iterable else _from_dataset
    return Adapted(
        source=read(dataset, loader.collate_fn, notes),
        batch_size=loader.batch_size,
        shuffle=shuffle,
        drop_last=loader.drop_last,
    )


def _shuffle_of(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return True
    raise DataError(
        f"the DataLoader's sampler is {type(sampler).__name__}, which draws samples in a way of its own; valid: "
        "shuffle=True or shuffle=False, so that each sample counts once per epoch. Choose samples with "
        "torch.utils.data.Subset(dataset, indices); drop a DistributedSampler, workers share the data by themselves"
    )


# ── what was received ────────────────────────────────────────────────────────


def _is_pandas(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_numpy")


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) or _is_pandas(value) or hasattr(value, "__array__")


def _describe(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    if isinstance(value, Tensor | np.ndarray):
        return f"{kind} of type {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, str | Path):
        return f"{kind} {str(value)!r}"
    if isinstance(value, list | tuple | Mapping):
        return f"{kind} of {len(value)} elements"
    return kind
