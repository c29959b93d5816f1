"""Files are read whole or refused by name; a damaged one is never half read."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from manyhands.data.files import read_idx, read_table
from manyhands.errors import DataError


def idx_bytes(array: np.ndarray, code: int) -> bytes:
    header = bytes([0, 0, code, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.mark.parametrize("code, dtype", [(8, "u1"), (9, "i1"), (0x0B, "i2"), (0x0C, "i4"), (0x0D, "f4"), (0x0E, "f8")])
@pytest.mark.parametrize("is_zipped", [True, False])
def test_idx_types(tmp_path: Path, code: int, dtype: str, is_zipped: bool) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    content = idx_bytes(array, code)
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(content) if is_zipped else content)
    received = read_idx(path)
    assert received.dtype == np.dtype(dtype)
    assert received.dtype.isnative
    assert np.array_equal(received, array)
    received[0] = 0  # it is the caller's own


LABELS = idx_bytes(np.arange(10, dtype=np.uint8), 8)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not an idx file"),
        (b"\0\0\x07\1", "not an idx file"),
        (b"PNG!" + bytes(20), "not an idx file: it begins with b'PNG!'"),
        (LABELS[:-1], r"damaged: shape \(10,\) in its header makes 18 bytes, but it has 17"),
        (LABELS + b"x", "but it has 19"),
        (LABELS[:6], "damaged"),
        (gzip.compress(LABELS)[:-9], "cannot read"),
        (gzip.compress(LABELS)[:12] + b"\xff" * 20, "cannot read"),
    ],
)
def test_idx_damage_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "labels-idx1-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_idx_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_idx(tmp_path / "nothing.gz")


TABLE = pd.DataFrame({"a": [1, 2], "b": [0.5, np.nan], "name": ["x", "ü"]})


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.parquet", "t.pq"])
def test_tables(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if ".csv" in name or ".tsv" in name:
        TABLE.to_csv(path, index=False, sep="\t" if ".tsv" in name else ",")
    else:
        TABLE.to_parquet(path)
    pd.testing.assert_frame_equal(read_table(path), TABLE, check_dtype=False)
    assert list(read_table(str(path), columns=["a"]).columns) == ["a"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("t.xlsx", b"", r"by its ending '.xlsx'; valid: .csv, .tsv, .parquet"),
        ("t.csv", b"", "No columns to parse"),
        ("t.csv", b"a,b\n1,2\n1,2,3,4\n", "cannot read .*t.csv as a table"),
        ("t.parquet", b"PAR1 but no more", "cannot read .*t.parquet as a table"),
    ],
)
def test_bad_tables(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_table(path)


def test_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*t.csv"):
        read_table(tmp_path / "t.csv")
