"""``manyhands runs``: the run folders with their status, and what can be read of one without its lock."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from manyhands.commands.options import DEFAULT_OUTPUT, Output
from manyhands.commands.output import format_measures, format_time, print_json, print_table, say
from manyhands.commands.training import runs_root
from manyhands.errors import ManyhandsError
from manyhands.train.run_folder import RunFolder, list_runs

__all__ = ["Overview", "read_overview", "runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run as its folder shows it."""

    path: Path
    changed: float
    """When run.json was last written, in Unix time."""
    record: Mapping[str, Any]
    """run.json; empty where it cannot be read."""
    status: str
    """running, finished, interrupted, failed, died (it says running, but its process is gone) or unreadable."""

    @property
    def recipe(self) -> str:
        """The recipe's name, or the model's class for a run that was started from Python."""
        recipe = self.record.get("recipe")
        return str(recipe["name"]) if isinstance(recipe, dict) else str(self.record.get("model", "?"))

    @property
    def steps(self) -> int:
        """Steps committed when run.json was last written."""
        return int(self.record.get("steps", 0))

    @property
    def measures(self) -> dict[str, float | None]:
        """The last value of each metric."""
        return {
            name: values[-1] for name, values in self.record.get("history", {}).items() if values and name != "seconds"
        }

    @property
    def bill(self) -> Mapping[str, float]:
        """Seconds of all workers together, by phase."""
        bill: Mapping[str, float] = self.record.get("bill", {})
        return bill

    @property
    def bytes(self) -> Mapping[str, int]:
        """What the workers sent and received; empty without a codec."""
        counted: Mapping[str, int] = self.record.get("bytes", {})
        return counted

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "run_dir": str(self.path),
            "recipe": self.recipe,
            "status": self.status,
            "steps": self.steps,
            "changed": self.changed,
            "metrics": self.measures,
        }


def runs(*, output: Output = DEFAULT_OUTPUT) -> int:
    """List the runs under runs/ (or MANYHANDS_RUNS), oldest first."""
    found = [read_overview(folder) for folder in list_runs(runs_root())]
    if not output.quiet:
        if not found:
            say(f"no runs under {runs_root()}/ yet; start one: manyhands demo")
        else:
            rows = [
                (
                    run.path.name,
                    run.recipe,
                    run.status,
                    str(run.steps),
                    format_time(run.changed),
                    format_measures(run.measures),
                )
                for run in found
            ]
            print_table(("run", "recipe", "status", "steps", "changed", "last"), rows, right=("steps",))
    if output.json:
        print_json({"root": str(runs_root()), "runs": [run.to_dict() for run in found]})
    return 0


def read_overview(folder: RunFolder) -> Overview:
    """Read a run folder; one that is damaged is shown as such and hides no other."""
    file = folder.path / "run.json"
    changed = (file if file.exists() else folder.path).stat().st_mtime
    try:
        record = folder.read_json("run.json")
        if not isinstance(record, dict):
            raise ManyhandsError(f"{file} is not an object")
    except ManyhandsError:
        return Overview(path=folder.path, changed=changed, record={}, status="unreadable")
    status = str(record.get("status", "unreadable"))
    if status == "running" and not _holder_lives(folder.path / "lock"):
        status = "died"
    return Overview(path=folder.path, changed=changed, record=record, status=status)


def _holder_lives(lock: Path) -> bool:
    """Whether the process that wrote the lock file is still there; on another machine nobody can tell, so it counts."""
    try:
        holder = json.loads(lock.read_bytes())
        is_elsewhere: bool = holder["host"] != socket.gethostname()
        return is_elsewhere or psutil.pid_exists(int(holder["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False
