"""The run behind ``demo``, ``train`` and ``resume``: a recipe becomes a trainer, a run folder and a summary."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from manyhands.commands.options import Output, TrainingOptions, parse_settings, parse_workers
from manyhands.commands.output import format_bill, format_measures, format_seconds, print_json, say
from manyhands.config import environment
from manyhands.errors import UsageError
from manyhands.recipes import Recipe, get, with_settings
from manyhands.train.export import digest
from manyhands.train.history import History
from manyhands.train.run_folder import RunFolder
from manyhands.train.trainer import Trainer

__all__ = ["Job", "prepare", "run_job", "runs_root"]


def runs_root() -> Path:
    """The folder under which runs are numbered."""
    return Path(environment("RUNS", "runs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A recipe with everything decided that its mathematics depends on, and where it runs."""

    recipe: Recipe
    settings: Mapping[str, Any]
    options: TrainingOptions

    def description(self) -> dict[str, Any]:
        """What ``resume`` needs to build the same job again; kept in run.json."""
        choices = asdict(self.options)
        for name in ("settings", "run_dir"):
            del choices[name]
        return {"name": self.recipe.name, "source": self.recipe.source, "settings": dict(self.settings), **choices}


def prepare(recipe_name: str, options: TrainingOptions) -> Job:
    """Read the recipe and apply ``--set``, ``--epochs`` and ``--batch-size``; nothing is started."""
    settings = parse_settings(options.settings)
    chosen = {"epochs": options.epochs, "batch_size": options.batch_size}
    settings |= {name: value for name, value in chosen.items() if value is not None}
    return Job(recipe=with_settings(get(recipe_name), settings), settings=settings, options=options)


def run_job(job: Job, output: Output, *, resume: Path | None = None) -> int:
    """Train, evaluate on the test part, print the summary; returns the exit code."""
    recipe, options = job.recipe, job.options
    started = time.monotonic()
    torch.manual_seed(options.seed)
    trainer = Trainer(
        recipe.model(),
        loss=recipe.loss,
        optimizer=recipe.optimizer,
        metrics=list(recipe.metrics),
        workers=parse_workers(options.workers or "auto"),
        sync=options.sync,
        layout=options.layout,
        engine=options.engine,
        seed=options.seed,
    )
    data = recipe.data()
    trainer.note("recipe", job.description())
    with _run_folder(job, resume) as folder:
        history = trainer.fit(
            data.train,
            validation=data.validation,
            epochs=recipe.epochs,
            batch_size=recipe.batch_size,
            lanes=options.lanes,
            run_dir=folder,
            resume=resume,
            checkpoint_every_s=options.checkpoint_every,
            progress=output.progress,
        )
    test = {} if data.test is None else trainer.evaluate(data.test)
    summary = _summary(job, trainer, history, test, time.monotonic() - started)
    if not output.quiet:
        _print_summary(summary)
    if output.json:
        print_json(summary)
    return 0


@contextlib.contextmanager
def _run_folder(job: Job, resume: Path | None) -> Iterator[Path]:
    """Where the run goes; a folder that was numbered for a call which turns out to be wrong is taken back."""
    given = resume or job.options.run_dir
    if given is not None:
        yield given
        return
    made = RunFolder.create(runs_root(), job.recipe.name).path
    try:
        yield made
    except UsageError:
        if not (made / "run.json").exists():
            shutil.rmtree(made, ignore_errors=True)
        raise


def _summary(job: Job, trainer: Trainer, history: History, test: Mapping[str, float], seconds: float) -> dict[str, Any]:
    return {
        "status": "finished",
        "recipe": job.recipe.name,
        "run_dir": str(trainer.run_dir),
        "epochs": len(history.epochs),
        "metrics": {name: values[-1] for name, values in history.metrics.items() if values and name != "seconds"},
        "test": dict(test),
        "seconds": round(seconds, 3),
        "digest": digest(trainer.model),
        "bill": dict(history.bill),
        "events": list(history.events),
        "history": {name: list(values) for name, values in history.metrics.items()},
    }


def _print_summary(summary: Mapping[str, Any]) -> None:
    epochs = f"{summary['epochs']} epoch{'' if summary['epochs'] == 1 else 's'}"
    say(f"trained {summary['recipe']} · {epochs} · {format_seconds(summary['seconds'])} in all")
    if summary["metrics"]:
        say(f"  last   {format_measures(summary['metrics'])}")
    if summary["test"]:
        say(f"  test   {format_measures(summary['test'])}")
    say(f"  bill   {format_bill(summary['bill'])}")
    say(f"  digest {summary['digest']}")
    say(f"  run    {summary['run_dir']} (manyhands explain {summary['run_dir']})")
