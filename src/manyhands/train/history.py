"""What a run measured: values per epoch, events, and where the time went; and its export to other formats."""

from __future__ import annotations

import copy
import csv
import importlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manyhands.errors import MissingExtra, UsageError

__all__ = ["History"]

_MOST_TIMES = 4096


class History:
    """The record of a run; ``fit`` returns it, callbacks see it grow, a resume goes on with it."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.metrics: dict[str, list[float]] = {}
        """Per epoch: ``"loss"``, ``"accuracy"``, ``"val_loss"``, ...; all as long as ``epochs``, NaN where missing."""
        self.events: list[dict[str, Any]] = []
        """Joins, deaths, recoveries: ``{"event": ..., "time": ..., ...}``."""
        self.bill: dict[str, float] = {}
        """Seconds per phase."""
        self.updates: dict[str, int] = {}
        """Of asynchronous servers: updates applied, scaled, dropped, held, doubled, and how stale they were."""
        self.bytes: dict[str, int] = {}
        """Of asynchronous servers, or with a codec: bytes that workers ``sent`` and ``received``, and for how many
        ``samples``."""
        self.rows: dict[str, int] = {}
        """Rows of tables that steps have ``"pulled"`` and ``"pushed"``; empty where no table is held by row."""
        self.step_times: list[tuple[float, int]] = []
        """(unix time, steps committed), sampled about twenty times a second, less often in a long run; not kept over a
        resume."""
        self.first_step_s: float | None = None
        """Seconds from the call of fit to the first committed step."""

    def __len__(self) -> int:
        return len(self.epochs)

    def __repr__(self) -> str:
        last = ", ".join(f"{name}={values[-1]:.4g}" for name, values in self.metrics.items() if values)
        return f"History({len(self)} epochs{': ' * bool(last)}{last})"

    def saw(self, moment: float, steps: int) -> None:
        """So many steps are committed."""
        if not self.step_times or steps != self.step_times[-1][1]:
            self.step_times.append((moment, steps))
        if len(self.step_times) > _MOST_TIMES:
            del self.step_times[1::2]

    def append(self, epoch: int, values: Mapping[str, float]) -> None:
        """Record an epoch. One that was recorded before is replaced, and those after it are forgotten: a run that
        went back to a checkpoint measures them again."""
        kept = sum(known < epoch for known in self.epochs)
        del self.epochs[kept:]
        for recorded in self.metrics.values():
            del recorded[kept:]
        for name in values:
            self.metrics.setdefault(name, [math.nan] * kept)
        self.epochs.append(epoch)
        for name, recorded in self.metrics.items():
            recorded.append(float(values.get(name, math.nan)))

    def count_rows(self, moved: Iterable[float]) -> None:
        """Add the rows that a step moved: pulled, pushed; or nothing."""
        for name, count in zip(("pulled", "pushed"), moved, strict=False):
            self.rows[name] = self.rows.get(name, 0) + int(count)

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types that strict JSON can hold."""
        return {
            "epochs": list(self.epochs),
            "metrics": {name: [_to_plain(value) for value in values] for name, values in self.metrics.items()},
            "events": copy.deepcopy(self.events),
            "bill": dict(self.bill),
            "updates": dict(self.updates),
            "bytes": dict(self.bytes),
            "rows": dict(self.rows),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> History:
        """The history that ``to_dict`` described."""
        made = cls()
        made.epochs = list(values["epochs"])
        made.metrics = {name: [_from_plain(value) for value in column] for name, column in values["metrics"].items()}
        made.events = copy.deepcopy(list(values["events"]))
        made.bill = dict(values["bill"])
        made.updates = dict(values.get("updates", {}))
        made.bytes = dict(values.get("bytes", {}))  # a checkpoint of an earlier version has none
        made.rows = dict(values.get("rows", {}))
        return made

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row per epoch."""
        pandas = _require("pandas", "History.to_pandas", "data")
        return pandas.DataFrame(self.metrics, index=pandas.Index(self.epochs, name="epoch"), dtype=float)

    def to_csv(self, path: str | Path) -> None:
        """A row per epoch; a missing value is an empty field."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", *self.metrics])
            for row, epoch in enumerate(self.epochs):
                values = (column[row] for column in self.metrics.values())
                writer.writerow([epoch, *("" if math.isnan(value) else repr(value) for value in values)])

    def to_parquet(self, path: str | Path) -> None:
        """A row per epoch."""
        arrow = _require("pyarrow", "History.to_parquet", "data")
        parquet = _require("pyarrow.parquet", "History.to_parquet", "data")
        parquet.write_table(arrow.table({"epoch": self.epochs, **self.metrics}), path)

    def to_mat(self, path: str | Path) -> None:
        """A MATLAB file with a column vector per metric; letters that MATLAB's names lack become ``_``."""
        matlab = _require("scipy.io", "History.to_mat", "mat")
        columns = {_matlab_name(name): values for name, values in self.metrics.items()}
        if len(columns) < len(self.metrics):
            raise UsageError(
                f"metrics {list(self.metrics)} have one name in MATLAB; valid: names of letters and digits"
            )
        matlab.savemat(path, {"epoch": self.epochs, **columns}, oned_as="column", long_field_names=True)

    def plot(self, path: str | Path | None = None) -> Any:
        """A matplotlib figure, training and validation in one picture per metric; saved where ``path`` is given."""
        if not self.metrics:
            raise UsageError("the history is empty; valid: plot after at least one epoch")
        pyplot = _require("matplotlib.pyplot", "History.plot", "plot")
        names = list(dict.fromkeys(name.removeprefix("val_") for name in self.metrics))
        figure, axes = pyplot.subplots(1, len(names), figsize=(4.5 * len(names), 3.5), squeeze=False)
        for axis, name in zip(axes[0], names, strict=True):
            for label, key, style in (("training", name, "-"), ("validation", f"val_{name}", "--")):
                if key in self.metrics:
                    axis.plot(self.epochs, self.metrics[key], style, marker="o", markersize=3, label=label)
            axis.set(title=name, xlabel="epoch")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.3)
            axis.legend()
        figure.tight_layout()
        if path is not None:
            figure.savefig(path, dpi=150)
            pyplot.close(figure)
        return figure


def _to_plain(value: float) -> float | str | None:
    """Strict JSON has neither NaN nor infinity."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _from_plain(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _matlab_name(name: str) -> str:
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    return name if name[:1].isalpha() else f"m_{name}"


def _require(module: str, what: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(what, extra) from error
