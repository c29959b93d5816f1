"""Workers come and go in mid-epoch, and lanes move: the ledger stays exact and the weights are those of one worker."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from scenes import Mlp, Scene, Sluggish, committed, proof, send, table, wait_until

import manyhands as mh
from manyhands.engine.local import cores

pytestmark = pytest.mark.fault


class ResizeAt(mh.Callback):
    """Resizes at given steps; slows the run down, so that a change is through before the next one."""

    def __init__(self, plan: dict[int, int]) -> None:
        self.plan: dict[int, int] = plan
        self.done: list[int] = []

    def on_step_end(self, state: mh.State) -> None:
        time.sleep(0.005)
        if state.step in self.plan:
            state.resize(self.plan[state.step])
            self.done.append(self.plan[state.step])


def test_from_a_callback_in_mid_epoch(tmp_path: Path) -> None:
    scene, resize = Scene(data=table(2400)), ResizeAt({30: 4, 120: 2, 210: 3})
    resized = scene.run(1, callbacks=[resize], run_dir=tmp_path / "run", checkpoint_every_s=60.0)
    assert resize.done == [4, 2, 3]
    assert resized.digest == scene.run(1).digest
    assert proof(tmp_path / "run").exact
    assert len(resized.events("worker_ready")) >= 5
    assert len(resized.events("worker_left")) >= 2
    assert resized.events("worker_died") == []


def settled(trainer: mh.Trainer, workers: int) -> bool:
    """Whether a plan for so many workers was made last, and there are no others."""
    plans = [event for event in trainer.history.events if event["event"] == "plan"]
    return len(trainer.pids) == workers == plans[-1]["workers"]


def test_from_another_thread_while_steps_run() -> None:
    scene, seen = Scene(data=table(6400), epochs=3), []

    def resize(trainer: mh.Trainer) -> None:
        for workers in (4, 2, 3, 1, 2):
            trainer.resize(workers)
            wait_until(lambda n=workers: settled(trainer, n) or committed(trainer) < 0, 20)
            seen.append(len(trainer.pids))

    resized = scene.run(1, resize)
    assert seen == [4, 2, 3, 1, 2]
    assert {event["workers"] for event in resized.events("plan")} >= {1, 2, 3, 4}
    assert resized.digest == scene.run(1).digest


def test_from_another_thread_at_the_edges_of_a_fit() -> None:
    """Before anybody listens, and when nobody does any more."""
    scene = Scene(epochs=1)
    trainer, over, errors, asked = mh.Trainer(scene.make_model(), workers=1), threading.Event(), [], []

    def insist() -> None:
        while not over.is_set():
            try:
                trainer.resize(1)
                asked.append(trainer._fit is not None)
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=insist)
    thread.start()
    for _ in range(3):
        trainer.fit(scene.data, batch_size=16, run_dir=False, progress="quiet")
    over.set()
    thread.join(10)
    assert errors == [] and {True, False} <= set(asked)


def test_more_workers_than_lanes_and_a_range() -> None:
    scene = Scene(lanes=2)
    assert scene.run(4).digest == scene.run(1).digest
    trainer = mh.Trainer(scene.make_model(), workers=(1, 3))
    with pytest.raises(mh.ManyhandsError, match=r"workers=\(1, 3\)"):
        trainer.resize(4)
    with pytest.raises(mh.ManyhandsError, match="received 0"):
        trainer.resize(0)


class Late(Mlp):
    """Takes a second to arrive in any worker but the first."""

    def __setstate__(self, state: dict[str, object]) -> None:
        if mh.worker_slot():
            time.sleep(1.0)
        super().__setstate__(state)


def test_a_range_begins_with_the_fewest_and_the_others_join() -> None:
    scene, ready = Scene(Late), list[int]()

    def look(state: mh.State) -> None:
        found = [event["event"] for event in state.history.events].count("worker_ready")
        ready.append(found)
        if state.step == 1:
            wait_until(lambda: len([e for e in state.history.events if e["event"] == "worker_ready"]) == 3, 20)

    outcome = scene.run((1, 3), callbacks=[mh.Lambda(on_step_end=look)])
    assert (ready[0], ready[-1]) == (1, 3)
    assert {event["workers"] for event in outcome.events("plan")} >= {1, 3}
    assert outcome.digest == scene.run(2).digest


def test_resize_while_workers_start() -> None:
    """A process that is told to go before it listens goes all the same."""
    scene, done = Scene(data=table(3200)), []

    def hasty(trainer: mh.Trainer) -> None:
        for _ in range(4):
            trainer.resize(4)
            trainer.resize(1)
        trainer.resize(2)
        wait_until(lambda: len(trainer.pids) == 2 or committed(trainer) < 0, 20)
        done.append(len(trainer.pids))

    assert scene.run(2, hasty).digest == scene.run(1).digest
    assert done == [2]


def test_lanes_move_away_from_a_slow_worker() -> None:
    scene = Scene(Sluggish, data=table(3200), epochs=2, lanes=8, trainer={"limits": mh.Limits(balance_s=0.1)})
    moved = scene.run(2)
    shares = [event["lanes"].count(0) for event in moved.events("plan") if event["workers"] == 2]
    assert shares[0] == 4
    assert min(shares) <= 2, "the slow worker kept its lanes"
    assert moved.digest == Scene(data=table(3200), epochs=2, lanes=8).run(1).digest


class Asleep(Mlp):
    """Takes time, but no processor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(x)


def busy(trainer: mh.Trainer) -> set[int]:
    """The workers that have lanes by the newest plan."""
    plans = [event for event in trainer.history.events if event["event"] == "plan"]
    return set(plans[-1]["lanes"])


def test_more_workers_than_cores_stand_by_and_step_in() -> None:
    quick = {"limits": mh.Limits(balance_s=0.1)}
    lanes = 3 * cores()
    scene = Scene(lambda: Mlp(width=600), data=table(3200), epochs=5, batch_size=3 * lanes, lanes=lanes, trainer=quick)
    seen: list[set[int]] = []

    def kill_a_busy_one(trainer: mh.Trainer) -> None:
        wait_until(lambda: len(busy(trainer)) <= cores() or committed(trainer) < 0, 20)
        seen.append(busy(trainer))
        before = committed(trainer)
        send(trainer.pids[f"worker-{min(seen[0])}"], signal.SIGKILL)
        wait_until(lambda: committed(trainer) > before or committed(trainer) < 0, 20)

    disturbed = scene.run(cores() + 2, kill_a_busy_one)
    assert len(seen[0]) == cores()
    assert len(disturbed.events("worker_died")) == 1
    assert disturbed.digest == scene.run(1).digest


def test_workers_that_sleep_are_all_kept_busy() -> None:
    workers = cores() + 2
    quick = {"limits": mh.Limits(balance_s=0.1)}
    scene = Scene(Asleep, data=table(160 * workers), epochs=2, batch_size=2 * workers, lanes=workers, trainer=quick)
    lanes: list[set[int]] = []

    def look(trainer: mh.Trainer) -> None:
        time.sleep(2.0)
        lanes.append(busy(trainer))

    scene.run(workers, look)
    assert len(lanes[0]) == workers


def test_more_workers_than_there_are_banks_for_plans() -> None:
    scene = Scene(lanes=12)
    assert scene.run(12).digest == scene.run(1).digest
