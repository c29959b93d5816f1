"""The Trainer: what a user calls. Checks everything it is given, then hands over to a fit or an inference session."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from manyhands.config import environment
from manyhands.data.adapt import Adapted, adapt
from manyhands.engine import local
from manyhands.errors import CheckpointDamaged, CheckpointError, ModelError, UsageError, named_options
from manyhands.sync.clip import resolve_clip
from manyhands.train.archive import Saving
from manyhands.train.callbacks import Callback, CallbackList
from manyhands.train.checkpoint import Checkpoint, CheckpointStore
from manyhands.train.evaluation import add_up
from manyhands.train.export import save_model
from manyhands.train.fit import Fit
from manyhands.train.history import History
from manyhands.train.lane import Job
from manyhands.train.losses import resolve_loss
from manyhands.train.metrics import resolve_metrics
from manyhands.train.optimizers import resolve_optimizer
from manyhands.train.progress import Progress
from manyhands.train.receipt import closing_line, header, interrupted_line
from manyhands.train.row_tables import describe_tables
from manyhands.train.run_folder import RunFolder
from manyhands.train.schedule import Course, resolve_schedule
from manyhands.train.seats import Limits, check_limits
from manyhands.train.session import Session, infer_alone
from manyhands.train.strategy import Sync, check_choice, plain_sync, resolve_sync
from manyhands.train.team import resized, worker_range
from manyhands.train.trainable import check_model

__all__ = ["Trainer"]

_RING = 4096  # batches whose numbers are kept until the caller has read them
_INFERENCE_BATCH = 256


class Trainer:
    """Trains, evaluates and applies one model with worker processes.

    >>> trainer = mh.Trainer(model, loss="cross_entropy", optimizer="adamw", metrics=["accuracy"], workers=4)
    >>> history = trainer.fit((x, y), validation=(vx, vy), epochs=3, batch_size=128)

    The result depends on seed, data, model and lanes; it does not depend on the workers.
    """

    @named_options
    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[[Any, Any], torch.Tensor] = "cross_entropy",
        optimizer: Any = "adamw",
        metrics: Iterable[Any] = (),
        *,
        workers: int | str | tuple[int, int] = "auto",
        sync: str | Sync = "allreduce",
        layout: str = "whole",
        engine: str = "local",
        device: str = "auto",
        precision: str = "fp32",
        seed: int = 0,
        schedule: Any = None,
        clip: Any = None,
        accumulate: int = 1,
        threads: int = 1,
        nan: str = "stop",
        limits: Limits | None = None,
    ) -> None:
        """``schedule``, ``clip``, ``accumulate``, ``nan``: see docs/training.md. ``threads`` are per worker."""
        if not isinstance(model, nn.Module):
            raise ModelError(f"model received {type(model).__name__}; valid is a torch.nn.Module")
        self.model = model
        self.loss_name, self._loss = resolve_loss(loss)
        self._optimizer_item = optimizer
        self.metrics = resolve_metrics(metrics)
        self._workers = worker_range(workers)
        self._sync = resolve_sync(sync)
        check_choice("layout", layout, ("whole",))
        check_choice("engine", engine, ("local",))
        check_choice("device", device, ("auto", "cpu"))
        check_choice("precision", precision, ("fp32", "bf16"))
        check_choice("nan", nan, ("stop", "skip"))
        for name, value in (("seed", seed), ("accumulate", accumulate), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < (name != "seed"):
                raise UsageError(f"{name} received {value!r}; valid is an integer of at least {int(name != 'seed')}")
        self._seed, self._threads, self._precision = seed, threads, precision
        self._schedule, self._clips, self._accumulate, self._nan = schedule, resolve_clip(clip), accumulate, nan
        self._limits = check_limits(limits)
        self._optimizer: torch.optim.Optimizer | None = None
        self._notes: dict[str, Any] = {}
        self._fit: Fit | None = None
        self.history = History()
        self.run_dir: Path | None = None
        local.warm()

    # -- while running --------------------------------------------------------------------------------------
    @property
    def pids(self) -> dict[str, int]:
        """Role -> pid of the live processes; empty outside of a run."""
        return self._fit.session.supervisor.pids() if self._fit is not None else {}

    def resize(self, workers: int) -> None:
        """Change the number of workers, also while a fit runs (from a callback or another thread)."""
        self._workers = resized(self._workers, workers)
        if self._fit is not None:
            self._fit.resize(workers)

    def note(self, key: str, value: Any) -> None:
        """Keep ``value`` (JSON-able) under ``key`` in the run.json of the next fit."""
        self._notes[key] = value

    # -- the verbs ------------------------------------------------------------------------------------------
    @named_options
    def fit(
        self,
        data: Any,
        validation: Any = None,
        epochs: int = 1,
        batch_size: int | None = None,
        lanes: int | None = None,
        callbacks: Iterable[Callback] = (),
        run_dir: str | Path | bool | None = None,
        resume: str | Path | bool | None = None,
        *,
        shuffle: bool | None = None,
        checkpoint_every_s: float | None = 60.0,
        checkpoint_every_steps: int | None = None,
        keep: int = 2,
        events: bool = True,
        progress: str = "auto",
    ) -> History:
        """Train. ``batch_size`` (32) is the global batch, however many workers share it.

        ``run_dir``: a folder for this run; by default the next number under ``runs/``; False keeps nothing on disk.
        A folder that already holds checkpoints is resumed (``resume=False`` refuses), also in mid-epoch and with
        another number of workers. ``resume``: the folder of an earlier run to go on with.
        """
        adapted = adapt(data)
        checked = None if validation is None else adapt(validation)
        view = Progress(progress)  # type: ignore[arg-type]
        callback_list = CallbackList(callbacks)
        saving = Saving(every_s=checkpoint_every_s, every_steps=checkpoint_every_steps, keep=keep)
        with contextlib.ExitStack() as open_things:
            folder = self._known_folder(run_dir, resume)
            if folder is not None:
                open_things.enter_context(folder.lock())
            checkpoint, warnings = self._checkpoint(folder, resume)
            course = self._course(adapted, batch_size, lanes, epochs, checkpoint)
            fit = self._prepare(adapted, checked, course, epochs, shuffle, callback_list, view, saving)
            open_things.callback(fit.close)
            if folder is None and run_dir is not False:  # made only now: a call that is refused leaves nothing behind
                folder = self._new_folder(run_dir)
                open_things.enter_context(folder.lock())
            fit.open(folder, events=events)
            for text in warnings:
                fit.hear_event("checkpoint_damaged", {"text": text})
            if checkpoint is not None:
                fit.go_to(checkpoint)
            return self._run(fit, [] if adapted.note is None else [adapted.note])

    def evaluate(self, data: Any, batch_size: int = _INFERENCE_BATCH) -> dict[str, float]:
        """Loss and metrics over all rows, exact and the same on any number of workers."""
        adapted = adapt(data)
        if self._fit is not None:
            return self._fit.evaluate(adapted.source, batch_size)
        return add_up(self._infer("evaluate", adapted, batch_size), self.metrics)

    def predict(self, data: Any, batch_size: int = _INFERENCE_BATCH) -> torch.Tensor:
        """The model's output for every row, in the order of the rows."""
        adapted = adapt(data, needs_target=False)
        if self._fit is not None:
            results = self._fit.session.infer("predict", adapted.source, batch_size)
        else:
            results = self._infer("predict", adapted, batch_size)
        parts = []
        for result in results:
            dtype = getattr(torch, result["dtype"])
            raw = bytearray(result["rows"])
            parts.append(
                (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(result["shape"])
            )
        return torch.cat(parts)

    def save(self, path: str | Path) -> Path:
        """Export the model to a folder that ``mh.load`` reads."""
        return save_model(self.model, path)

    # -- preparation ----------------------------------------------------------------------------------------
    def _job(self, **more: Any) -> Job:
        return Job(
            model=self.model, loss=self._loss, metrics=self.metrics, seed=self._seed, threads=self._threads,
            precision=self._precision, accumulate=self._accumulate, nan=self._nan, **more,
        )  # fmt: skip

    def _infer(self, kind: str, adapted: Adapted, batch: int) -> list[dict[str, Any]]:
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise UsageError(f"batch_size received {batch!r}; valid is an integer of at least 1")
        return infer_alone(self.model, self._job(), self._workers[1], kind, adapted.source, batch)

    def _known_folder(self, run_dir: str | Path | bool | None, resume: str | Path | bool | None) -> RunFolder | None:
        """The folder of an earlier run that this fit goes on with, if there is one."""
        if isinstance(resume, (str, Path)):
            if run_dir not in (None, True) and Path(str(run_dir)) != Path(resume):
                raise UsageError(
                    f"run_dir={str(run_dir)!r} and resume={str(resume)!r} name two folders; give one of them"
                )
            return RunFolder.open(resume)
        if isinstance(run_dir, (str, Path)) and Path(run_dir).exists():
            return RunFolder.at(run_dir)
        return None

    def _new_folder(self, run_dir: str | Path | bool | None) -> RunFolder:
        if isinstance(run_dir, (str, Path)):
            return RunFolder.at(run_dir)
        return RunFolder.create(environment("RUNS", "runs"), type(self.model).__name__.lower())

    def _checkpoint(self, folder: RunFolder | None, resume: object) -> tuple[Checkpoint | None, list[str]]:
        if folder is None:
            return None, []
        store = CheckpointStore(folder.checkpoints)
        if resume is False:
            if store.steps():
                raise UsageError(
                    f"{folder.path} holds checkpoints and resume=False; give another run_dir or resume=True"
                )
            return None, []
        checkpoint, warnings = store.load_latest()
        if checkpoint is None and (warnings or isinstance(resume, (str, Path))):
            found = "; ".join(warnings) or "it has none"
            raise (CheckpointDamaged if warnings else CheckpointError)(
                f"{folder.path} has no checkpoint that can be used: {found}. "
                "To start from the beginning, give another run_dir."
            )
        return checkpoint, warnings

    def _known_lanes(self, course: Mapping[str, Any]) -> int | None:
        """The lanes of a checkpoint, unless another way of agreeing had no use for any."""
        known: int = course["lanes"]
        return known if known > 1 or course.get("sync", self._sync.name) == self._sync.name else None

    def _course(
        self, adapted: Adapted, batch_size: int | None, lanes: int | None, epochs: int, checkpoint: Checkpoint | None
    ) -> Course:
        batch = batch_size if batch_size is not None else adapted.batch_size or 32
        known = None if checkpoint is None else self._known_lanes(checkpoint.meta["course"])
        usual = min(self._workers[1] * self._sync.lanes_per_worker, batch) if isinstance(batch, int) else 1
        chosen = lanes if lanes is not None else self._sync.lanes or known or usual
        for name, value in (("batch_size", batch), ("lanes", chosen), ("epochs", epochs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} received {value!r}; valid is an integer of at least 1")
        if batch < chosen:
            raise UsageError(
                f"batch_size={batch} is smaller than lanes={chosen}: each lane needs at least one sample of the global "
                "batch. Take a larger batch or fewer lanes."
            )
        chosen = self._sync.lanes or chosen
        course = Course(
            samples=len(adapted.source), batch_size=batch, lanes=chosen, drop_last=adapted.drop_last,
            every=self._sync.round_batches, span=self._sync.lease_batches, fragments=self._sync.fragments,
            begun=0 if checkpoint is None else checkpoint.step,
        )  # fmt: skip
        if course.steps_per_epoch == 0:
            raise UsageError(
                f"the data has {course.samples} samples, fewer than one batch of {batch}, and drop_last is set"
            )
        return course

    def _prepare(
        self, adapted: Adapted, checked: Adapted | None, course: Course, epochs: int, shuffle: bool | None,
        callbacks: CallbackList, view: Progress, saving: Saving,
    ) -> Fit:  # fmt: skip
        if self._optimizer is None:
            self._optimizer = resolve_optimizer(self._optimizer_item, self.model)
        check_model(self.model, self._optimizer)
        # Before the state is laid out: a schedule may give an optimizer its momentum, and with it more state.
        schedule = resolve_schedule(self._schedule, self._optimizer, epochs * course.steps_per_epoch)
        width = 2 + sum(metric.width for metric in self.metrics)
        memory = self._sync.lay_out(
            self.model,
            self._optimizer,
            lanes=course.lanes,
            samples=course.samples,
            stats=width,
            ring=max(_RING, 2 * course.every, 4 * course.span * (self._workers[1] + 1)),
            workers=self._workers[1],
        )
        self.history = History()
        try:
            schedule.keys = memory.hyper
            job = self._job(source=adapted.source, course=course, **self._sync.job(memory, self._clips))
            session = Session(
                memory.arena, job, self._workers, self._limits, memory.places, servers=self._sync.processes,
                replicas=self._sync.replicas if self._sync.sockets else None, lateness=self._sync.lateness,
            )  # fmt: skip
        except BaseException:
            memory.arena.close()
            raise
        return Fit(
            model=self.model, optimizer=self._optimizer, session=session, memory=memory, job=job, course=course,
            schedule=schedule, epochs=epochs, shuffle=adapted.shuffle if shuffle is None else shuffle,
            validation=None if checked is None else checked.source, validation_batch=_INFERENCE_BATCH,
            callbacks=callbacks, history=self.history, progress=view, saving=saving, sync=self._sync.name,
            workers=self._workers,
        )  # fmt: skip

    # -- the run --------------------------------------------------------------------------------------------
    def _run(self, fit: Fit, notes: list[str]) -> History:
        self._fit, self.run_dir = fit, None if fit.archive.folder is None else fit.archive.folder.path
        settings = {
            **self._notes, "loss": self.loss_name, "metrics": [metric.name for metric in self.metrics],
            "workers": list(self._workers), "sync": self._sync.name, "sync_settings": plain_sync(self._sync),
            "seed": self._seed, "threads": self._threads,
            "precision": self._precision, "accumulate": self._accumulate, "epochs": fit.epochs,
            "codec": None if fit.job.codec is None else fit.job.codec.name,
            "schedule": None if self._schedule is None else str(self._schedule), "shuffle": fit.shuffle,
            "clip": [str(clip) for clip in self._clips], "nan": self._nan,
            "limits": asdict(self._limits), "saving": asdict(fit.saving),
        }  # fmt: skip
        if line := self._sync.describe():
            notes = [line, *notes]
        notes = [*notes, *describe_tables(fit.memory.arena.spec.tables, fit.memory.arena.spec.exchange)]
        if self.run_dir is not None:
            notes = [*notes, f"run folder {self.run_dir}"]
        try:
            fit.describe("running", settings)
            fit.progress.begin(header(self.model, fit.course, settings, fit.start_step, notes))
            with fit.interrupts.watching():
                fit.run()
                saved = fit.finish()
                stopped = fit.close()
        except BaseException as error:
            fit.close()
            fit.progress.end()
            fit.describe("failed", settings)
            if isinstance(error, Exception) and (step := fit.archive.last_saved_step):
                error.add_note(f"saved up to step {step}; go on with fit(..., resume={str(self.run_dir)!r})")
            raise
        finally:
            self._fit = None
        fit.describe("interrupted" if fit.interrupts.asked else "finished", settings)
        if fit.interrupts.asked:
            self._leave(fit, saved, stopped)
        fit.progress.end(closing_line(self.history, fit.done - fit.start_step))
        return self.history

    def _leave(self, fit: Fit, saved: int | None, stopped: int) -> NoReturn:
        """After Ctrl-C or SIGTERM: nothing is left, and the receipt says so."""
        ended = local.release()
        left = len(fit.session.supervisor.seats) + (ended and local.zygote_pid() is not None)
        fit.progress.end(interrupted_line(saved, stopped + ended, left, self.run_dir))
        if fit.interrupts.signal == signal.SIGTERM:
            raise SystemExit(143)
        raise KeyboardInterrupt
