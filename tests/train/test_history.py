"""The history keeps its columns equal, survives JSON and pickle, and leaves in every format with its values."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import cloudpickle
import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from scipy.io import loadmat

from manyhands.errors import UsageError
from manyhands.train.history import History

mpl.use("Agg")


@pytest.fixture
def history() -> History:
    made = History()
    made.append(0, {"loss": 0.75, "val_loss": 1 / 3})
    made.append(1, {"loss": math.inf, "accuracy": 0.5})
    made.append(2, {"loss": 0.1, "val_loss": 0.2, "accuracy": 0.9})
    made.events.append({"event": "death", "time": 12.5, "worker": "worker-1"})
    made.bill.update(compute=3.5, wait=0.25)
    return made


def test_missing_values_are_nan_and_columns_equal(history: History) -> None:
    assert history.epochs == [0, 1, 2]
    assert history.metrics["loss"] == [0.75, math.inf, 0.1]
    np.testing.assert_equal(history.metrics["val_loss"], [1 / 3, math.nan, 0.2])
    np.testing.assert_equal(history.metrics["accuracy"], [math.nan, 0.5, 0.9])
    assert len(history) == 3
    assert repr(history) == "History(3 epochs: loss=0.1, val_loss=0.2, accuracy=0.9)"
    assert repr(History()) == "History(0 epochs)"


def test_epoch_that_is_measured_again_replaces_the_old(history: History) -> None:
    history.append(1, {"loss": 0.6})
    assert history.epochs == [0, 1]
    assert history.metrics["loss"] == [0.75, 0.6]
    np.testing.assert_equal(history.metrics["accuracy"], [math.nan, math.nan])


def test_survives_strict_json(history: History) -> None:
    text = json.dumps(history.to_dict(), allow_nan=False)
    again = History.from_dict(json.loads(text))
    np.testing.assert_equal(again.metrics, history.metrics)
    assert (again.epochs, again.events, again.bill) == (history.epochs, history.events, history.bill)
    again.append(3, {"loss": 0.05})
    assert len(history) == 3


def test_survives_cloudpickle(history: History) -> None:
    again = pickle.loads(cloudpickle.dumps(history))
    np.testing.assert_equal(again.to_dict(), history.to_dict())


def test_to_pandas(history: History) -> None:
    frame = history.to_pandas()
    assert frame.index.name == "epoch"
    assert frame.loc[2, "accuracy"] == 0.9
    assert math.isnan(frame.loc[1, "val_loss"])
    assert History().to_pandas().empty


def test_to_csv(history: History, tmp_path: Path) -> None:
    history.to_csv(tmp_path / "h.csv")
    assert (tmp_path / "h.csv").read_text().splitlines()[2] == "1,inf,,0.5"
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "h.csv", index_col="epoch"), history.to_pandas())


def test_to_parquet(history: History, tmp_path: Path) -> None:
    history.to_parquet(tmp_path / "h.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "h.parquet").set_index("epoch"), history.to_pandas())


def test_to_mat(history: History, tmp_path: Path) -> None:
    history.append(3, {"loss": 1.0, "top-5 share": 0.5, "9lives": 0.25})
    history.to_mat(tmp_path / "h.mat")
    content = loadmat(tmp_path / "h.mat")
    assert content["epoch"].ravel().tolist() == [0, 1, 2, 3]
    assert content["loss"].shape == (4, 1)
    assert content["top_5_share"][3, 0] == 0.5
    assert content["m_9lives"][3, 0] == 0.25
    history.append(4, {"top 5 share": 0.5})
    with pytest.raises(UsageError, match="have one name in MATLAB"):
        history.to_mat(tmp_path / "h.mat")


def test_plot(history: History, tmp_path: Path) -> None:
    figure = history.plot(tmp_path / "h.png")
    assert [axis.get_title() for axis in figure.axes] == ["loss", "accuracy"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["training", "validation"]
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="history is empty"):
        History().plot()


def test_step_times_of_a_long_run_stay_few() -> None:
    made = History()
    for second in range(20_000):
        made.saw(float(second), second // 2)
    assert 1000 < len(made.step_times) <= 4096
    assert made.step_times[0] == (0.0, 0) and made.step_times[-1][1] > 9_980
    assert made.step_times == sorted(made.step_times)
