"""Shares are lanes: workers may be few or many, die, be stopped or come and go, and not a bit of the result changes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from scenes import At, Cnn, Killer, Mlp, Scene, Sluggish, kill_self, proof, send, table, wait_until
from test_undo import KINDS, kill_in_apply, torn, wide
from torch import nn

import manyhands as mh

pytestmark = pytest.mark.fault

LOCAL = {"sync": mh.Local(every=5)}
FRAGMENTS = {"sync": mh.Local(every=10, fragments=2, codec="int8")}


def slow_epoch(sync: dict[str, object] = LOCAL, **options: object) -> Scene:
    """Rounds enough to be disturbed: 1,600 rows in 100 batches, so 20 rounds an epoch."""
    return Scene(data=table(1600), trainer=dict(sync), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "optimizer", ["adam", lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)], ids=["adam", "momentum"]
)
@pytest.mark.parametrize("make_model", [Mlp, Cnn])
def test_any_number_of_workers_gives_the_same_weights(make_model: Callable[[], nn.Module], optimizer: object) -> None:
    scene = Scene(make_model, data=table(203), optimizer=optimizer, trainer=dict(LOCAL))  # the last batch is ragged
    outcomes = [scene.run(workers) for workers in (1, 2, 3, 4)]
    assert len({outcome.digest for outcome in outcomes}) == 1
    assert outcomes[0].digest != mh.digest(make_model())
    assert len({tuple(outcome.history.metrics["loss"]) for outcome in outcomes}) == 1


def test_every_and_lanes_do_change_it() -> None:
    digests = {
        Scene(lanes=lanes, trainer={"sync": mh.Local(every=every)}).run(2).digest
        for lanes in (1, 4)
        for every in (2, 5)
    }
    assert len(digests) == 4


@pytest.mark.parametrize("sync", [LOCAL, FRAGMENTS], ids=["whole", "fragments"])
def test_a_death_in_the_middle_of_a_share_is_repaired(sync: dict[str, object], tmp_path: Path) -> None:
    scene = slow_epoch(sync, epochs=1)
    scene.make_model = lambda: At(801, kill_self, tmp_path / "died")
    broken = scene.run(3, run_dir=tmp_path / "run", checkpoint_every_s=60.0)
    assert [event["phase"] for event in broken.events("worker_died")] == ["compute"]
    assert [event["step"] % 5 for event in broken.events("worker_died")] == [0], "counted in batches, at a round"
    assert broken.digest == scene.run(1).digest  # the marker is there: nobody dies
    assert proof(tmp_path / "run").exact


@pytest.mark.parametrize("sync", [LOCAL, FRAGMENTS], ids=["whole", "fragments"])
def test_kills_at_random_change_nothing(sync: dict[str, object], tmp_path: Path) -> None:
    scene, killer = slow_epoch(sync, epochs=6), Killer(kills=6, first=4, last=90)
    killed = scene.run(3, killer, run_dir=tmp_path / "run", checkpoint_every_s=60.0)
    assert killer.fired >= 4
    assert len(killed.events("worker_died")) >= 4
    assert killed.digest == scene.run(2).digest
    assert proof(tmp_path / "run").exact


def test_a_stopped_worker_is_replaced() -> None:
    scene, stopped = slow_epoch(epochs=8), []
    scene.trainer["limits"] = mh.Limits(pause_s=0.3)

    def pause(trainer: mh.Trainer) -> None:
        role, pid = next(reversed(trainer.pids.items()))
        stopped.append(send(pid, signal.SIGSTOP))
        wait_until(lambda: trainer.pids.get(role, pid) != pid, 10)
        send(pid, signal.SIGCONT)

    paused = scene.run(2, pause)
    assert stopped == [True]
    assert len(paused.events("worker_hung")) == 1
    assert paused.digest == scene.run(1).digest


def test_workers_come_and_go() -> None:
    class Resize(mh.Callback):
        done = 0

        def on_step_end(self, state: mh.State) -> None:
            time.sleep(0.01)
            if state.step in (20, 60, 120):
                state.resize({20: 4, 60: 2, 120: 3}[state.step])
                self.done += 1

    scene, resize = slow_epoch(), Resize()
    resized = scene.run(1, callbacks=[resize])
    assert resize.done == 3
    assert len(resized.events("worker_ready")) >= 4
    assert resized.digest == scene.run(1).digest


def test_at_the_pace_of_speed_a_slow_worker_has_fewer_shares() -> None:
    """And a death among unequal workers changes nothing either: the shares are those of any number of workers."""
    sync, limits = mh.Local(every=5, pace="speed"), mh.Limits(balance_s=0.1)
    scene = Scene(Sluggish, data=table(3200), epochs=2, lanes=None, trainer={"sync": sync, "limits": limits})
    killer = Killer(kills=1, first=30, last=50)
    unequal = scene.run(2, killer)
    shares = [event["lanes"].count(0) for event in unequal.events("plan") if event["workers"] == 2]
    assert shares[0] == 4, "two workers, eight lanes"
    assert min(shares) <= 2, "the slow worker kept its shares"
    assert killer.fired == 1
    equal = Scene(data=table(3200), epochs=2, lanes=8, trainer={"sync": mh.Local(every=5)})
    assert unequal.digest == equal.run(1).digest


def test_with_a_quorum_nobody_waits_for_a_late_share(tmp_path: Path) -> None:
    """A worker that dawdles, alive and well, is given up; its share is redone and counts once."""
    sync = mh.Local(every=5, quorum=0.5, grace_s=0.3)
    scene = Scene(data=table(1600), epochs=1, trainer={"sync": sync})
    scene.make_model = lambda: At(801, partial(time.sleep, 120), tmp_path / "slept")
    begun = time.monotonic()
    late = scene.run(2, run_dir=tmp_path / "run", checkpoint_every_s=60.0)
    assert time.monotonic() - begun < 60
    assert [("late with its share" in event["text"]) for event in late.events("worker_hung")] == [True]
    assert late.digest == scene.run(1).digest  # the marker is there: nobody sleeps
    assert proof(tmp_path / "run").exact


@pytest.mark.parametrize("at", [1, 8], ids=["before there is state", "with state"])
@pytest.mark.parametrize("kind", ["adam", "momentum"])
def test_death_within_a_step_of_a_share(kind: str, at: int, tmp_path: Path) -> None:
    """The dead leaves a mess in its parameters and in the state that it was changing."""
    optimizer, make_model, options = KINDS[kind]
    scene, marker = Scene(make_model, data=table(160), trainer=dict(LOCAL)), tmp_path / "marker"
    scene.optimizer = lambda params: optimizer(params, "never", at, **options)
    quiet = scene.run(2)
    scene.optimizer = lambda params: optimizer(params, str(marker), at, **options)
    killed = scene.run(3)
    assert marker.exists()
    assert [(death["phase"], death["undone"]) for death in killed.events("worker_died")] == [("compute", False)]
    assert killed.digest == quiet.digest


@pytest.mark.parametrize("fragments", [1, 2])
def test_kills_while_the_outer_optimizer_is_applied(fragments: int) -> None:
    sync = mh.Local(every=2, fragments=fragments)
    scene = Scene(wide, data=table(96, 101), epochs=5, batch_size=8, trainer={"sync": sync})
    quiet = scene.run(3)
    killed = scene.run(2, partial(kill_in_apply, wanted=2))
    assert sum(torn(event) for event in killed.history.events) >= 2
    assert killed.digest == quiet.digest
