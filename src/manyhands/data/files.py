"""Reading data files: idx arrays (the format of MNIST) and tables (CSV, Parquet)."""

from __future__ import annotations

import gzip
import importlib
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.errors import DataError, MissingExtra

__all__ = ["read_idx", "read_table"]

# The third byte of an idx file names the type; numbers are big-endian.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

_CSV_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_PARQUET = (".parquet", ".pq")


def read_idx(path: str | Path) -> np.ndarray:
    """The array in an idx file, plain or gzipped, e.g. MNIST's ``train-images-idx3-ubyte.gz``."""
    path = Path(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}. Valid: an idx file, plain or gzipped") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise DataError(
            f"{path} is not an idx file: it begins with {content[:4]!r}; valid: two zero bytes and a type code"
        )
    dtype, dimensions = np.dtype(_IDX_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise DataError(
            f"{path} is damaged: shape {shape} in its header makes {expected} bytes, but it has {len(content)}. "
            "Download it again"
        )
    return np.frombuffer(content, dtype=dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def read_table(path: str | Path, columns: list[str] | None = None) -> Any:
    """A pandas DataFrame from a CSV (also .tsv, also compressed) or Parquet file; ``columns`` chooses some of them."""
    path = Path(path)
    plain = path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    if plain.suffix not in (*_CSV_SEPARATORS, *_PARQUET):
        raise DataError(
            f"cannot tell the format of {path} by its ending {path.suffix!r}; valid: "
            f"{', '.join((*_CSV_SEPARATORS, *_PARQUET))}, the first two also with {', '.join(_COMPRESSIONS)}"
        )
    if not path.is_file():
        raise DataError(f"there is no file {path}; valid: the path of a table")
    try:
        pandas = importlib.import_module("pandas")
        parquet = importlib.import_module("pyarrow.parquet") if plain.suffix in _PARQUET else None
    except ImportError as error:
        raise MissingExtra("read_table", "data") from error
    try:
        if parquet is not None:
            return parquet.read_table(path, columns=columns).to_pandas()
        return pandas.read_csv(path, sep=_CSV_SEPARATORS[plain.suffix], usecols=columns)
    except (OSError, ValueError) as error:  # what pandas and pyarrow raise for damage are kinds of ValueError
        raise DataError(f"cannot read {path} as a table: {error}") from error
