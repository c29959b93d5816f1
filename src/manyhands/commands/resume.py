"""``manyhands resume RUN``: go on from the last good checkpoint, at any worker count."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from manyhands.commands.find_run import find_run
from manyhands.commands.options import DEFAULT_OUTPUT, Output, TrainingOptions
from manyhands.commands.training import Job, run_job
from manyhands.errors import UsageError
from manyhands.recipes import get, with_settings

__all__ = ["resume"]


def resume(
    run: str, /, *, workers: str | None = None, epochs: int | None = None, output: Output = DEFAULT_OUTPUT
) -> int:
    """Go on from the last good checkpoint of a run.

    Parameters
    ----------
    run
        A run folder, its name or its number (see: manyhands runs).
    workers
        Worker processes from now on; by default as before. The weights do not depend on it.
    epochs
        Passes over the training data in all; by default as before.
    """
    folder = find_run(run)
    record = folder.read_json("run.json")
    recorded = record.get("recipe")
    if not isinstance(recorded, dict):
        raise UsageError(
            f"{folder.path} was not started by the command line, so its recipe is not known. "
            f"Go on from Python: trainer.fit(..., resume={str(folder.path)!r})."
        )
    # Lanes belong to the mathematics: they stay what they were, also when nobody chose them.
    job = _job_of({**recorded, "lanes": record.get("lanes")}, workers, epochs)
    return run_job(job, output, resume=folder.path)


def _job_of(recorded: dict[str, Any], workers: str | None, epochs: int | None) -> Job:
    settings = dict(recorded["settings"])
    if epochs is not None:
        settings["epochs"] = epochs
    known = {field.name for field in fields(TrainingOptions)}
    choices = {name: value for name, value in recorded.items() if name in known and name != "settings"}
    options = TrainingOptions(**{**choices, "workers": workers or choices.get("workers")})
    return Job(recipe=with_settings(get(recorded["source"]), settings), settings=settings, options=options)
