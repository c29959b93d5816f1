"""Preparing data before training: clean a table, split it by rows, normalise its features.

Each works on what the user has (NumPy arrays, tensors, pandas objects, lists) and returns the same kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manyhands.errors import DataError, MissingExtra, UsageError

__all__ = ["Normalizer", "clean", "split"]

BLOCK_ROWS = 8192
"""Statistics are summed over blocks, so that a memory-mapped array is never in memory as a whole."""


def split(
    x: Any,
    y: Any = None,
    fractions: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    stratify: Any = None,
) -> list[tuple[Any, Any]]:
    """Cut rows at random into parts, by default train, validation and test: ``[(x, y), (x, y), (x, y)]``.

    With ``stratify`` (a label per row, often ``y`` itself) each part gets its fraction of every label, to within a row.
    """
    shares = np.asarray(fractions, dtype=np.float64)
    if shares.ndim != 1 or len(shares) == 0 or (shares <= 0).any() or abs(shares.sum() - 1) > 1e-6:
        raise UsageError(f"fractions are {tuple(fractions)}; valid: positive numbers that sum to 1")
    rows = len(x)
    for name, other in (("y", y), ("stratify", stratify)):
        if other is not None and len(other) != rows:
            raise DataError(f"x has {rows} rows and {name} has {len(other)}; valid: the same number of rows")
    generator = np.random.default_rng(seed)
    parts: list[list[npt.NDArray[np.int64]]] = [[] for _ in shares]
    for members in _groups(rows, stratify):
        counts = _apportion(len(members), shares)
        pieces = np.split(generator.permutation(members), np.cumsum(counts)[:-1])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    chosen = [generator.permutation(np.concatenate(part)) for part in parts]
    if any(len(part) == 0 for part in chosen):
        sizes = [len(part) for part in chosen]
        raise DataError(f"{rows} rows make parts of {sizes}; valid: at least one row each. Use other fractions")
    return [(_take(x, part), None if y is None else _take(y, part)) for part in chosen]


def _groups(rows: int, labels: Any) -> list[npt.NDArray[np.int64]]:
    if labels is None:
        return [np.arange(rows)]
    _, group = np.unique(np.asarray(labels), return_inverse=True)
    order = np.argsort(group, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group))[:-1])


def _apportion(rows: int, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole rows for each share: rounded down, then one more for those that lost the most."""
    quotas = shares * rows
    counts = np.floor(quotas + 1e-9).astype(np.int64)
    left = rows - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:left]] += 1
    return counts


def _take(value: Any, rows: npt.NDArray[np.int64]) -> Any:
    if hasattr(value, "iloc"):
        return value.iloc[rows]
    if isinstance(value, torch.Tensor):
        return value[torch.from_numpy(rows)]
    if isinstance(value, list):
        return [value[row] for row in rows]
    return value[rows]


class Normalizer:
    """Shifts and scales features to mean 0 and deviation 1, by statistics of the training part alone.

    ``per_feature=False`` uses one mean and one deviation for all, as is usual for images. A constant feature is only
    shifted; missing values (NaN) are left out of the statistics and stay missing.
    """

    def __init__(self, *, per_feature: bool = True) -> None:
        self.per_feature = per_feature
        self._mean: npt.NDArray[np.float64] | None = None
        self._scale: npt.NDArray[np.float64] | None = None

    def fit(self, x: Any) -> Normalizer:
        """Learn mean and deviation from the rows of ``x``."""
        if len(x) == 0:
            raise DataError("cannot normalise by 0 rows; valid: at least one")
        axis = 0 if self.per_feature else None
        count = sum(np.sum(~np.isnan(block), axis=axis) for block in _blocks(x))
        count = np.maximum(count, 1)
        mean = sum(np.nansum(block, axis=axis) for block in _blocks(x)) / count
        variance = sum(np.nansum((block - mean) ** 2, axis=axis) for block in _blocks(x)) / count
        scale = np.sqrt(variance)
        # A constant feature has a deviation of rounding errors; dividing by it would blow them up.
        is_constant = scale <= 1e-12 * np.maximum(np.abs(mean), 1e-300)
        self._mean, self._scale = np.asarray(mean), np.where(is_constant, 1.0, scale)
        return self

    def transform(self, x: Any) -> Any:
        """Shifted and scaled; float32 unless ``x`` is float64."""
        mean, scale = self._statistics(x)
        return (_as_float(x) - _like(mean, x)) / _like(scale, x)

    def inverse(self, x: Any) -> Any:
        """Back from the normalised values to the original ones."""
        mean, scale = self._statistics(x)
        return _as_float(x) * _like(scale, x) + _like(mean, x)

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types, for a JSON file."""
        mean, scale = self._statistics()
        return {"per_feature": self.per_feature, "mean": mean.tolist(), "scale": scale.tolist()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Normalizer:
        """The normaliser that ``to_dict`` described."""
        made = cls(per_feature=values["per_feature"])
        made._mean = np.asarray(values["mean"], dtype=np.float64)
        made._scale = np.asarray(values["scale"], dtype=np.float64)
        return made

    def _statistics(self, x: Any = None) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        if self._mean is None or self._scale is None:
            raise UsageError("the Normalizer has no statistics yet; call fit(x) with the training part first")
        if x is not None and self.per_feature and tuple(np.shape(x)[1:]) != self._mean.shape:
            raise DataError(f"x has rows of shape {np.shape(x)[1:]}; valid: {self._mean.shape}, as in fit")
        return self._mean, self._scale


def _blocks(x: Any) -> Iterator[npt.NDArray[np.float64]]:
    for start in range(0, len(x), BLOCK_ROWS):
        stop = start + BLOCK_ROWS
        yield np.asarray(x.iloc[start:stop] if hasattr(x, "iloc") else x[start:stop], dtype=np.float64)


def _as_float(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x if x.dtype == torch.float64 else x.to(torch.float32)
    if hasattr(x, "iloc"):
        return x.astype(np.float64)
    array = np.asarray(x)
    return array if array.dtype == np.float64 else array.astype(np.float32)


def _like(statistic: npt.NDArray[np.float64], x: Any) -> Any:
    """The statistic in the kind and precision that ``x`` is computed in."""
    if isinstance(x, torch.Tensor):
        return torch.from_numpy(statistic).to(x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
    if hasattr(x, "iloc"):
        return statistic
    return statistic.astype(np.float64 if np.asarray(x).dtype == np.float64 else np.float32)


def clean(table: Any, *, missing: str | float = "drop", duplicates: bool = True) -> Any:
    """A table without missing values and, unless ``duplicates=False``, without repeated rows.

    ``missing``: ``"drop"`` leaves out rows with a missing value; ``"mean"`` and ``"median"`` fill it from its column
    (columns of text: the most frequent value); a number fills it with that number. A pandas DataFrame gives a
    DataFrame with a fresh index, a two-dimensional array gives an array.
    """
    if isinstance(missing, str) and missing not in ("drop", "mean", "median"):
        raise UsageError(f"missing is {missing!r}; valid: 'drop', 'mean', 'median' or a number")
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingExtra("clean", "data") from error
    is_frame = isinstance(table, pandas.DataFrame)
    if not is_frame and np.ndim(table) != 2:
        raise DataError(f"table is a {np.ndim(table)}-D {type(table).__name__}; valid: a DataFrame or a 2-D array")
    frame = table if is_frame else pandas.DataFrame(np.asarray(table))
    frame = frame.replace([np.inf, -np.inf], np.nan)
    if duplicates:
        frame = frame.drop_duplicates()
    frame = frame.dropna() if missing == "drop" else frame.fillna(_fillings(frame, missing))
    return frame.reset_index(drop=True) if is_frame else frame.to_numpy()


def _fillings(frame: Any, missing: str | float) -> dict[Any, Any]:
    fillings: dict[Any, Any] = {}
    for name in frame.columns:
        column = frame[name]
        if not isinstance(missing, str):
            fillings[name] = missing
        elif getattr(column.dtype, "kind", "O") in "iuf":
            fillings[name] = column.mean() if missing == "mean" else column.median()
        elif not (frequent := column.mode()).empty:
            fillings[name] = frequent.iloc[0]
    return fillings
