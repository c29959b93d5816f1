"""Splits are exact partitions, normalising is what scikit-learn does, cleaning leaves no gap."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from manyhands.data.prepare import Normalizer, clean, split
from manyhands.errors import DataError, UsageError


@given(rows=st.integers(10, 300), seed=st.integers(0, 100))
def test_split_gives_every_row_to_one_part(rows: int, seed: int) -> None:
    x = np.arange(rows)
    parts = split(x, x * 2, seed=seed)
    assert sorted(np.concatenate([part for part, _ in parts]).tolist()) == list(range(rows))
    assert all(np.array_equal(part * 2, target) for part, target in parts)
    assert [len(part) for part, _ in parts] == pytest.approx([0.8 * rows, 0.1 * rows, 0.1 * rows], abs=1)


def test_split_is_a_function_of_the_seed() -> None:
    x = np.arange(100)
    first, again, other = (split(x, seed=seed)[0][0].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_split_stratified_keeps_the_shares_of_labels() -> None:
    labels = np.array(["rare"] * 30 + ["common"] * 300)
    for part, fraction in zip(
        split(np.arange(330), labels, (0.5, 0.3, 0.2), stratify=labels), (0.5, 0.3, 0.2), strict=True
    ):
        assert (part[1] == "rare").sum() == round(30 * fraction)
        assert (part[1] == "common").sum() == round(300 * fraction)
        assert (part[1][:10] != part[1][0]).any() or fraction < 0.3  # shuffled, not label after label


def test_split_returns_the_kind_it_was_given() -> None:
    frame, tensor, rows = pd.DataFrame({"a": range(10)}), torch.arange(10), list(range(10))
    assert isinstance(split(frame, rows, (0.5, 0.5))[0][0], pd.DataFrame)
    (first, labels), _ = split(tensor, rows, (0.5, 0.5))
    assert torch.equal(first, torch.tensor(labels))
    assert split(rows, None, (0.5, 0.5))[0][1] is None


@pytest.mark.parametrize("fractions", [(0.5, 0.4), (1.2, -0.2), (), (0.5, 0.5, 0.0)])
def test_split_refuses_bad_fractions(fractions: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match=r"fractions are .*sum to 1"):
        split(np.arange(10), fractions=fractions)


def test_split_refuses_what_cannot_be_split() -> None:
    with pytest.raises(DataError, match="x has 10 rows and y has 9"):
        split(np.arange(10), np.arange(9))
    with pytest.raises(DataError, match=r"3 rows make parts of \[3, 0, 0\]"):
        split(np.arange(3))


def test_normalizer_agrees_with_scikit_learn() -> None:
    x = np.random.default_rng(0).normal(5, 3, (20_000, 4))
    expected = StandardScaler().fit(x)
    normalizer = Normalizer().fit(x)
    np.testing.assert_allclose(normalizer.transform(x), expected.transform(x), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(normalizer.inverse(normalizer.transform(x)), x, rtol=1e-9)


def test_normalizer_keeps_kind_and_precision() -> None:
    x = np.arange(12, dtype=np.uint8).reshape(4, 3)
    normalizer = Normalizer().fit(x)
    assert normalizer.transform(x).dtype == np.float32
    tensor = normalizer.transform(torch.from_numpy(x))
    assert tensor.dtype == torch.float32
    np.testing.assert_allclose(tensor.numpy(), normalizer.transform(x))
    frame = normalizer.transform(pd.DataFrame(x, columns=["a", "b", "c"]))
    assert list(frame.columns) == ["a", "b", "c"]
    np.testing.assert_allclose(frame.to_numpy(), normalizer.transform(x), rtol=1e-6)


def test_normalizer_with_one_mean_for_images() -> None:
    images = np.random.default_rng(0).integers(0, 255, (50, 8, 8), dtype=np.uint8)
    done = Normalizer(per_feature=False).fit(images).transform(images)
    assert done.mean() == pytest.approx(0, abs=1e-5)
    assert done.std() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e12, -7.3e-9])
def test_normalizer_only_shifts_constant_features(value: float) -> None:
    x = np.full((1001, 1), value)
    normalizer = Normalizer().fit(x)
    assert np.abs(normalizer.transform(x)).max() <= 1e-12 * abs(value)
    np.testing.assert_allclose(normalizer.inverse(normalizer.transform(x)), x)


def test_normalizer_leaves_missing_values_out() -> None:
    x = np.array([[1.0], [np.nan], [3.0]])
    np.testing.assert_allclose(Normalizer().fit(x).transform(x), [[-1], [np.nan], [1]])


def test_normalizer_survives_json() -> None:
    x = np.random.default_rng(0).normal(size=(9, 2))
    for normalizer in (Normalizer().fit(x), Normalizer(per_feature=False).fit(x)):
        again = Normalizer.from_dict(json.loads(json.dumps(normalizer.to_dict())))
        assert np.array_equal(again.transform(x), normalizer.transform(x))


def test_normalizer_reads_a_memory_map(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    x.tofile(tmp_path / "x.bin")
    mapped = np.memmap(tmp_path / "x.bin", dtype=np.float32, mode="r", shape=(100, 3))
    assert Normalizer().fit(mapped).to_dict() == Normalizer().fit(x).to_dict()


def test_normalizer_errors() -> None:
    with pytest.raises(UsageError, match=r"no statistics yet; call fit"):
        Normalizer().transform([[1.0]])
    with pytest.raises(DataError, match=r"shape \(2,\); valid: \(3,\)"):
        Normalizer().fit(np.ones((4, 3))).transform(np.ones((4, 2)))
    with pytest.raises(DataError, match="0 rows"):
        Normalizer().fit(np.ones((0, 3)))


def test_clean_drops_or_fills() -> None:
    table = pd.DataFrame({"a": [1.0, 1.0, None, 4.0, np.inf], "b": ["x", "x", "y", None, "x"]})
    assert clean(table).to_dict("list") == {"a": [1.0], "b": ["x"]}
    assert clean(table, duplicates=False)["a"].tolist() == [1.0, 1.0]
    filled = clean(table, missing="mean")
    assert filled["a"].tolist() == [1.0, 2.5, 4.0, 2.5]
    assert filled["b"].tolist() == ["x", "y", "x", "x"]
    assert clean(table[["a"]], missing=0)["a"].tolist() == [1.0, 0.0, 4.0]
    assert table.isna().sum().sum() == 2  # the table itself is untouched


def test_clean_arrays() -> None:
    array = np.array([[1.0, 2.0], [1.0, 2.0], [np.nan, 4.0], [5.0, 9.0]])
    assert clean(array).tolist() == [[1.0, 2.0], [5.0, 9.0]]
    assert clean(array, missing="median").tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]


def test_clean_errors() -> None:
    with pytest.raises(UsageError, match=r"missing is 'fill'; valid: 'drop'"):
        clean(pd.DataFrame({"a": [1]}), missing="fill")
    with pytest.raises(DataError, match="table is a 1-D ndarray"):
        clean(np.arange(3))
