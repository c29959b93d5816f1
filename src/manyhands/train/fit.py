"""One fit: the caller's side of a training run, from the first plan to the last checkpoint.

The caller never computes. It lets the workers run up to a horizon, adds up what they report, runs callbacks and
validation between steps, and saves. Batches are numbered from the beginning of the run. A step of the workers is a
round of the course, mostly one batch; what is counted, shown and saved here are batches.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.core.order import epoch_order, order_digest
from manyhands.core.policies import scales
from manyhands.data.source import Source
from manyhands.errors import CheckpointMismatch
from manyhands.sync.kept import replay_steps
from manyhands.train import architecture
from manyhands.train.archive import Archive, Saving
from manyhands.train.callbacks import CallbackList, State, wants_steps
from manyhands.train.checkpoint import Checkpoint
from manyhands.train.evaluation import add_up
from manyhands.train.history import History
from manyhands.train.interrupt import Interrupts
from manyhands.train.lane import Job
from manyhands.train.progress import Progress, describe_event
from manyhands.train.receipt import plain_settings
from manyhands.train.run_folder import RunFolder
from manyhands.train.schedule import Course, Schedule
from manyhands.train.session import Session
from manyhands.train.state import ModelState
from manyhands.train.tally import add_in_order, sums_of, values_of
from manyhands.train.team import resized
from manyhands.train.witness import Witness

__all__ = ["Fit"]

_POLL_S = 0.05
_BATCH_TIMEOUT_S = 600.0
_FIRST_STEPS = 8  # enough to keep the workers busy while the numbers of the others are written
_QUIET_EVENTS = ("plan", "worker_ready", "worker_left", "server_ready", "view")


@dataclass(slots=True, kw_only=True)
class Fit:
    """The state of a fit in the caller. Implements the callbacks' Controls."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    session: Session
    memory: ModelState
    job: Job
    course: Course
    schedule: Schedule
    epochs: int
    shuffle: bool
    validation: Source | None
    validation_batch: int
    callbacks: CallbackList
    history: History
    progress: Progress
    saving: Saving
    sync: str
    workers: tuple[int, int]
    archive: Archive = field(init=False)
    witness: Witness = field(init=False)
    lock_step: bool = False
    interrupts: Interrupts = field(default_factory=Interrupts)
    start_step: int = 0
    stop_reason: str | None = None
    _consumed: int = 0
    _entered: int = 0  # batches in the ledger; fewer than were added up while a run does again what it lost
    _sums: np.ndarray = field(default_factory=lambda: np.zeros(2))
    _last_sums: np.ndarray = field(default_factory=lambda: np.zeros(2))
    _rate: float = 0.0
    _rate_mark: tuple[float, int] = (0.0, 0)
    _begun_ns: int = 0
    _samples: int = 0
    _ordered: tuple[int, str] = (-1, "")
    _closed: bool = False
    _architecture: dict[str, Any] | None = None

    # -- opening and closing --------------------------------------------------------------------------------
    def open(self, folder: RunFolder | None, *, events: bool) -> None:
        """Open the files of the run."""
        self._begun_ns = time.monotonic_ns()
        self._sums = np.zeros(2 + sum(metric.width for metric in self.job.metrics))
        self.lock_step = wants_steps(self.callbacks)
        self.session.on_event(self.hear_event)
        self._architecture = None if folder is None else architecture.describe(self.model)
        self.archive = Archive(folder, self.saving, events=events, on_event=self.hear_event)

    def go_to(self, checkpoint: Checkpoint) -> None:
        """Take up the run where a checkpoint stopped."""
        meta = checkpoint.meta
        here, there = self._course_facts(), {"sync": "allreduce", **meta["course"]}
        # Another way of agreeing is another course from here on anyway; only the account must fit.
        free = {"sync", "lanes"} if here["sync"] != there["sync"] else set()
        wrong = [
            f"{name} was {there[name]}, is {value}"
            for name, value in here.items()
            if name not in free and there[name] != value
        ]
        if wrong:
            raise CheckpointMismatch(
                f"the checkpoint of step {checkpoint.step} belongs to another course of training: {'; '.join(wrong)}. "
                "Resume with the same data, batch size, lanes and seed, or start a new run."
            )
        self.memory.load(checkpoint.tensors, self.course.round_of(checkpoint.step))
        self.start_step = self._consumed = self._entered = checkpoint.step
        known = History.from_dict(meta["history"])
        known.events += self.history.events
        self.history.__dict__.update(known.__dict__)
        self._sums[:] = meta["sums"]
        losses = self.history.metrics.get("loss", [])
        self.schedule.advance_to(checkpoint.step, self.course.steps_per_epoch, losses)
        self.schedule.load_state(meta["schedule"])
        self.callbacks.load_state_dict(meta["callbacks"])

    def _course_facts(self) -> dict[str, Any]:
        return {
            "samples": self.course.samples, "batch_size": self.course.batch_size, "lanes": self.course.lanes,
            "seed": self.job.seed, "shuffle": self.shuffle, "drop_last": self.course.drop_last, "sync": self.sync,
        }  # fmt: skip

    def close(self) -> int:
        """End the workers and close the files; returns how many processes there were. Again does nothing."""
        if self._closed:
            return 0
        self._closed = True
        self.history.bill = self.session.bill()
        if self.session.arena.spec.exchange:
            policy = self.job.policy
            self.history.updates = self.session.arena.exchange().tally(scales=policy is not None and scales(policy))
        traffic = self.session.traffic()
        if self.job.codec is not None or any(traffic.values()):
            self.history.bytes = {**traffic, "samples": self._samples}
        first = self.session.control.first_commit_ns
        self.history.first_step_s = (first - self._begun_ns) / 1e9 if first else None
        stopped = self.session.close()
        self.memory.take_back(self.model)
        if hasattr(self, "archive"):
            self.archive.close()
        return stopped

    @property
    def done(self) -> int:
        """Batches whose rounds are committed."""
        return self.course.done(self.session.control.steps)

    def describe(self, status: str, settings: dict[str, Any]) -> None:
        """Write run.json: every effective setting, and how the run stands."""
        progress = {
            "status": status, "steps": self.done, "bill": self.history.bill, "updates": self.history.updates,
            "bytes": self.history.bytes, "history": self.history.to_dict()["metrics"],
        }  # fmt: skip
        self.archive.write_run({**settings, **plain_settings(self.model, self.optimizer, self.course), **progress})

    # -- the run --------------------------------------------------------------------------------------------
    def run(self) -> History:
        """Train to the last epoch, or until somebody asks to stop."""
        self.archive.go_to(self.start_step)
        state = State(
            controls=self, epochs=self.epochs, steps_per_epoch=self.course.steps_per_epoch, history=self.history
        )
        state.step = self.start_step
        self.witness = Witness(self.session.arena, self.start_step, sockets=self.session.sockets)
        self.session.start(self.course.round_of(self.start_step))
        self.memory.lend(self.model)
        self._rate_mark = (time.monotonic(), self.start_step)
        self.callbacks.on_train_begin(state)
        per_epoch = self.course.steps_per_epoch
        for epoch in range(self.start_step // per_epoch, self.epochs):
            if self.stop_reason or self.interrupts.asked:
                break
            state.epoch = epoch
            self._run_epoch(epoch, state)
        self.callbacks.on_train_end(state)
        return self.history

    def _run_epoch(self, epoch: int, state: State) -> None:
        per_epoch = self.course.steps_per_epoch
        fingerprint = self._lay_out_order(epoch)
        self.archive.ledger.begin_epoch(
            epoch, self.course.samples, self.course.batch_size, fingerprint,
            first_step=epoch * per_epoch, drop_last=self.course.drop_last,
        )  # fmt: skip
        self.callbacks.on_epoch_begin(state)
        begun = time.monotonic()
        end = (epoch + 1) * per_epoch
        while self.done < end and not self.stop_reason and not self.interrupts.asked:
            if self.lock_step:
                self._one_step(state)
            else:
                self._run_to(end)
            if self.done < end:
                self._save_if_due(before=end)
        if self.done < end:
            self._settle()
            return
        self._settle()
        values = values_of(self._sums, self.job.metrics) | self._validate()
        values["seconds"] = time.monotonic() - begun
        self._sums[:] = 0
        state.metrics = values
        state.step = self.done
        self.history.append(epoch, values)
        self.archive.emit("epoch", epoch=epoch, **values)
        self._show(epoch, values)
        self.callbacks.on_epoch_end(state)
        self._save_if_due()

    def _lay_out_order(self, epoch: int) -> str:
        """Write the order of an epoch into the arena, unless that was done while the one before it ran."""
        if self._ordered[0] != epoch:
            order = epoch_order(self.job.seed, epoch, self.course.samples, self.shuffle)
            self.session.arena.order[epoch % 2] = order
            self._ordered = (epoch, order_digest(order))
        return self._ordered[1]

    def _run_to(self, end: int) -> None:
        """Let the workers run towards ``end`` until it is time to look at something else."""
        while not self.stop_reason and not self.interrupts.asked and not self.archive.due(self.done):
            horizon = self.course.round_of(min(end, self._consumed + replay_steps(self.session.arena)))
            horizon = min(horizon, self.course.rounds_to(self.archive.next_due))
            for upto in (min(horizon, self.session.control.steps + _FIRST_STEPS), horizon):
                self._allow(upto)
            if end < self.epochs * self.course.steps_per_epoch:
                self._lay_out_order(end // self.course.steps_per_epoch)
            reached = self.session.wait(_POLL_S)
            self._consume()
            self._sample_rate()
            if reached and self.done >= end:
                return

    def _allow(self, horizon: int) -> None:
        """Tell the workers the numbers of the rounds below ``horizon``, and let them work on these."""
        losses = self.history.metrics.get("loss", [])
        self.schedule.fill(self.session.arena, self.course.done(horizon), self.course.steps_per_epoch, losses)
        self.session.allow(horizon)

    def _hold(self) -> int:
        """Let the workers rest after the round in progress; returns the batches that are done."""
        patience_s = _BATCH_TIMEOUT_S * self.course.every * self.course.span
        return self.course.done(self.session.hold(self.course.round_of(self._consumed), patience_s))

    def _settle(self) -> int:
        """Let the workers rest, and bring the account up to there; returns the batches that are done."""
        done = self._hold()
        self._consume()
        self.witness.rested(self.archive.ledger, self.course.steps_per_epoch, self._entered)
        return done

    def _one_step(self, state: State) -> None:
        """A single round, or what one worker takes at once, with the callbacks around it."""
        self.callbacks.on_step_begin(state)
        step = self.course.after(self.session.control.steps)
        self._allow(step)
        while not (self.session.wait(_POLL_S) and self.session.control.steps >= step):
            if self.interrupts.asked > 1:
                return
        self._consume()
        self._sample_rate()
        state.step = self.course.done(step)
        state.metrics = values_of(self._last_sums, self.job.metrics)
        self.callbacks.on_step_end(state)

    def _consume(self) -> None:
        """Add up the numbers of the batches that are done, in their order."""
        stats, steps = self.session.arena.stats, self.session.control.steps
        if (back := self.session.taken_back()) is not None and back < self._entered:
            self.archive.ledger.rollback(back)
            self._entered, steps = back, self.session.control.steps
        first, done = self._entered, self.course.done(steps)
        last_round = self.course.done(max(steps - self.course.span, 0))
        if done <= first:  # after a death, steps that were added up before may be taken again
            return
        batches = np.arange(first, done)
        self.witness.passed(batches)
        rows, fresh = self.course.rows_of(batches), batches >= self._consumed
        sums, moved = np.split(sums_of(stats[:, : self.course.lanes], batches, rows), [len(self._sums)], axis=1)
        counted = np.where(np.isfinite(sums[:, 1]), sums[:, 0], 0)
        self._sums = add_in_order(self._sums, sums[fresh & (counted > 0)])
        self._last_sums = add_in_order(np.zeros_like(self._sums), sums[batches >= last_round])
        self._samples += int(sums[fresh, 0].sum())
        self.history.count_rows(moved.sum(axis=0))
        self._consumed, self._entered = max(done, self._consumed), done
        epoch = first // self.course.steps_per_epoch
        self.archive.ledger.commit(epoch, first, done - 1)
        for at in np.flatnonzero(counted < rows).tolist():
            batch, count = first + at, int(rows[at] - counted[at])
            self.archive.ledger.skip(epoch, batch, "the loss was not finite", count)
            self.archive.emit("step_skipped", step=batch, samples=count, why="the loss was not finite")

    def _validate(self) -> dict[str, float]:
        if self.validation is None:
            return {}
        return {f"val_{name}": value for name, value in self.evaluate(self.validation, self.validation_batch).items()}

    def evaluate(self, source: Source, batch: int) -> dict[str, float]:
        """Evaluate with the workers of this fit, between steps."""
        return add_up(self.session.infer("evaluate", source, batch), list(self.job.metrics))

    # -- what is shown and recorded -------------------------------------------------------------------------
    def _sample_rate(self) -> None:
        now, steps = time.monotonic(), self._consumed
        self.history.saw(time.time(), self._consumed)
        then, before = self._rate_mark
        if now - then >= 0.2 and steps > before:
            rate = (steps - before) * self.course.batch_size / (now - then)
            self._rate = rate if self._rate == 0 else 0.7 * self._rate + 0.3 * rate
            self._rate_mark = (now, steps)
            self._show(self.done // self.course.steps_per_epoch, values_of(self._sums, self.job.metrics))

    def _show(self, epoch: int, values: dict[str, float]) -> None:
        within = self.done - epoch * self.course.steps_per_epoch
        shown = {name: value for name, value in values.items() if name != "seconds"}
        workers = len(self.session.supervisor.membership.active)
        self.progress.update(
            min(epoch + 1, self.epochs), self.epochs, within, self.course.steps_per_epoch, shown, self._rate, workers
        )

    def hear_event(self, event: str, fields: dict[str, Any]) -> None:
        """Something happened to a worker."""
        if "step" in fields:
            fields = {**fields, "step": self.course.done(fields["step"])}
        self.history.events.append({"event": event, "time": time.time(), **fields})
        self.archive.emit(event, **fields)
        if event not in _QUIET_EVENTS:
            self.progress.event(describe_event(event, fields))

    # -- saving ---------------------------------------------------------------------------------------------
    def _save_if_due(self, before: int | None = None) -> None:
        if not self.archive.due(self.done) or (before is not None and self._hold() >= before):
            return  # what was still on its way has ended the epoch: it is recorded first
        self.checkpoint()

    def checkpoint(self) -> None:
        """Save the state after the round in progress, in the background."""
        if self.archive.folder is None:
            return
        horizon = self.session.control.horizon
        done = self._settle()
        tensors, meta = self.memory.snapshot(), self._meta()
        if self.session.control.steps < horizon:
            self.session.allow(horizon)
        self.archive.save(done, tensors, meta)

    def _meta(self) -> dict[str, Any]:
        return {
            "course": self._course_facts(),
            "epochs": self.epochs,
            "history": self.history.to_dict(),
            "sums": self._sums.tolist(),
            "schedule": self.schedule.state(),
            "callbacks": self.callbacks.state_dict(),
            "architecture": self._architecture,
        }  # fmt: skip

    def finish(self) -> int | None:
        """Give model and optimizer their new state, save the last step, and wait; returns the step on disk, if any."""
        self.current_model()
        if self.archive.wants_last(self.done):
            self.archive.save(self._hold(), self.memory.tensors(), self._meta())
        self.archive.finish()
        self.memory.arena.free_lanes()  # the copies for the caller take their place
        self.memory.take_back(self.model)
        self.memory.copy_out_optimizer(self.model, self.optimizer)
        return self.archive.last_saved_step

    # -- what callbacks may ask -----------------------------------------------------------------------------
    def current_model(self) -> nn.Module:
        """The caller's model with the weights of the last committed step."""
        self.memory.copy_out(self.model)
        return self.model

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return self.schedule.rates()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate from the next step on."""
        self.schedule.set_rate(lr)

    def stop(self, reason: str) -> None:
        """End the run after the current step."""
        self.stop_reason = reason
        self.archive.emit("stop", why=reason)

    def resize(self, workers: int) -> None:
        """Go on with another number of workers."""
        self.workers = resized(self.workers, workers)
        self.archive.emit("resize", workers=workers)
        self.session.supervisor.resize(workers)
