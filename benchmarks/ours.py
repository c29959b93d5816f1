"""The same job as the peers', through `mh.Trainer`, reported in the same words.

    python -m benchmarks.ours --model mlp --workers 2
    python -m benchmarks.ours --model wide --workers 2 --fit '{"checkpoint_every_s": 10}'

Timed runs stop at the end of the epoch in which the time is over. The rates come from `history.step_times`, the times
of committed steps; the first step from `history.first_step_s`, counted from the call of `fit`.
"""

import argparse
import dataclasses
import json
import math
import os
import signal
import threading
import time

import manyhands as mh
from benchmarks.job import Clock, Job, add_options, now, read_options, report
from benchmarks.models import build, make_data

ENDLESS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Options of manyhands alone."""

    lanes: int = 0  # 0: as many as workers
    trainer: str = "{}"  # further arguments of mh.Trainer, as JSON
    fit: str = "{}"  # further arguments of fit, as JSON
    kill_every_s: float = 0.0  # kill -9 of a worker so often; 0: never


class StopAfter(mh.Callback):
    """Ends the run at the first end of an epoch after `seconds` of training."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = math.inf

    def on_train_begin(self, state: mh.State) -> None:
        self.deadline = now() + self.seconds

    def on_epoch_end(self, state: mh.State) -> None:
        if now() >= self.deadline:
            state.stop("the measured time is over")


class KillOften(mh.Callback):
    """Kills one of the workers, in turns, a moment into the epoch in which it is time."""

    def __init__(self, trainer: mh.Trainer, every_s: float) -> None:
        self.trainer, self.every_s, self.due, self.kills = trainer, every_s, math.inf, 0

    def on_train_begin(self, state: mh.State) -> None:
        self.due = now() + self.every_s

    def on_epoch_begin(self, state: mh.State) -> None:
        if now() >= self.due:
            pids = list(self.trainer.pids.values())
            threading.Timer(0.03, os.kill, (pids[self.kills % len(pids)], signal.SIGKILL)).start()
            self.kills, self.due = self.kills + 1, now() + self.every_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for record in (Job, Clock, Ours):
        add_options(parser, record)
    namespace = parser.parse_args()
    job, clock, ours = read_options(namespace, Job), read_options(namespace, Clock), read_options(namespace, Ours)
    x, y = make_data(job.rows, storage=job.storage)
    model = build(job.model, slow_slot=job.slow_slot, own_slot=mh.worker_slot)
    trainer = mh.Trainer(
        model,
        loss="cross_entropy",
        optimizer=mh.optimizer("adam", lr=1e-3),
        workers=job.workers,
        threads=job.threads,
        **json.loads(ours.trainer),
    )
    steps_per_epoch = math.ceil(job.rows / job.batch_size)
    callbacks: list[mh.Callback] = [] if clock.steps else [StopAfter(clock.warm_s + clock.seconds)]
    if ours.kill_every_s:
        callbacks.append(KillOften(trainer, ours.kill_every_s))
    fit_called, spent_before = now(), time.process_time()
    history = trainer.fit(
        (x, y),
        batch_size=job.batch_size,
        epochs=math.ceil(clock.steps / steps_per_epoch) if clock.steps else ENDLESS,
        lanes=ours.lanes or job.workers,
        callbacks=callbacks,
        **json.loads(ours.fit),
    )
    caller_share = (time.process_time() - spent_before) / (now() - fit_called) / (os.cpu_count() or 1)
    report(
        job,
        clock,
        history.step_times,
        first_step_time=fit_called + history.first_step_s,
        side="manyhands",
        caller_share=caller_share,
        fit_to_first_step_s=history.first_step_s,
        lanes=ours.lanes or job.workers,
        kills=sum(event["event"] == "worker_died" for event in history.events),
    )


if __name__ == "__main__":
    main()
