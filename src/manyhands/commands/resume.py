"""``manyhands resume RUN``: go on from the last good checkpoint, at any worker count."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.commands.find_run import find_run
from manyhands.commands.options import DEFAULT_OUTPUT, Output, TrainingOptions, parse_settings, set_option
from manyhands.commands.training import Job, run_job
from manyhands.errors import UsageError
from manyhands.recipes import get, with_settings

__all__ = ["resume"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """What changes from here on; None leaves it as it was."""

    workers: str | None = None
    "Worker processes from now on. The weights do not depend on it."
    sync: str | None = None
    "How copies of the model agree from now on: any checkpoint can go on under any of them."
    layout: str | None = None
    "How one copy of the model lies over devices."
    engine: str | None = None
    "Where processes come from."
    epochs: int | None = None
    "Passes over the training data in all."
    batch_size: int | None = None
    "The global batch; a checkpoint goes on only with its own."
    lanes: int | None = None
    "Fixed slices of the global batch; others than before only together with another --sync."
    seed: int | None = None
    "Everything random follows from it; a checkpoint goes on only with its own."
    settings: Annotated[tuple[str, ...], set_option] = ()
    checkpoint_every: float | None = None
    "Seconds between checkpoints."


DEFAULT_RESUME = ResumeOptions()
OF_THE_RECIPE = ("epochs", "batch_size")


def resume(run: str, /, *, options: ResumeOptions = DEFAULT_RESUME, output: Output = DEFAULT_OUTPUT) -> int:
    """Go on from the last good checkpoint of a run, as it was or with other options.

    Parameters
    ----------
    run
        A run folder, its name or its number (see: manyhands runs).
    """
    folder = find_run(run)
    recorded = folder.read_json("run.json").get("recipe")
    if not isinstance(recorded, dict):
        raise UsageError(
            f"{folder.path} was not started by the command line, so its recipe is not known. "
            f"Go on from Python: trainer.fit(..., resume={str(folder.path)!r})."
        )
    return run_job(_job_of(recorded, options), output, resume=folder.path)


def _job_of(recorded: dict[str, Any], options: ResumeOptions) -> Job:
    chosen = {name: value for name, value in asdict(options).items() if value is not None and name != "settings"}
    settings = {**recorded["settings"], **parse_settings(options.settings)}
    settings |= {name: chosen[name] for name in OF_THE_RECIPE if name in chosen}
    known = {field.name for field in fields(TrainingOptions)} - {"settings"}
    choices = {name: value for name, value in {**recorded, **chosen}.items() if name in known}
    if options.lanes is None:  # they stay what they were, or become what suits another way of agreeing
        choices["lanes"] = None
    recipe = with_settings(get(recorded["source"]), settings)
    return Job(recipe=recipe, settings=settings, options=TrainingOptions(**choices))
