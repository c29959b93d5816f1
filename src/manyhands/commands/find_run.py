"""Which run folder a user means by a path, a name or a number."""

from __future__ import annotations

from pathlib import Path

from manyhands.commands.training import runs_root
from manyhands.errors import UsageError
from manyhands.train.run_folder import RunFolder, list_runs

__all__ = ["find_run"]


def find_run(text: str) -> RunFolder:
    """``runs/0001-digits-cnn``, ``0001-digits-cnn``, ``0001``, ``1`` or ``last``."""
    if Path(text).is_dir():
        return RunFolder.open(text)
    runs = list_runs(runs_root())
    if text == "last" and runs:
        return RunFolder.open(runs[-1].path)
    for run in runs:
        name = run.path.name
        if text == name or (text.isdecimal() and int(text) == int(name.partition("-")[0])):
            return RunFolder.open(run.path)
    there = f"There are: {', '.join(run.path.name for run in runs[-10:])}." if runs else "There are no runs there yet."
    raise UsageError(
        f"no run {text!r}: valid: a run folder, or the name or number of one under {runs_root()}/, or last. {there}"
    )
