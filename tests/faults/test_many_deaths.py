"""All workers die, the process they are forked from dies, workers die again and again: the run goes on, exactly."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import pytest
from scenes import At, Scene, committed, kill_self, percentile, proof, send, table, wait_until

import manyhands as mh
from manyhands.engine import local

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("workers", [1, 4])
def test_all_workers_die_at_once(workers: int) -> None:
    scene, fired = Scene(data=table(1600)), []

    def kill_all(trainer: mh.Trainer) -> None:
        for _ in range(3):
            before = committed(trainer)
            fired.append(sum(send(pid, signal.SIGKILL) for pid in trainer.pids.values()))
            wait_until(lambda before=before: committed(trainer) > before + 5 or committed(trainer) < 0, 10)

    killed = scene.run(workers, kill_all)
    assert len(fired) == 3
    assert sum(fired) >= 3 * workers - 2
    assert killed.digest == scene.run(2).digest
    assert max(killed.stalls()) <= 3.0


def test_the_process_that_workers_are_forked_from_dies() -> None:
    """Its children go with it; another one is started and has torch to load first."""
    scene, killed_pids = Scene(data=table(1600)), []

    def kill_zygote(trainer: mh.Trainer) -> None:
        pid = local.zygote_pid()
        assert pid is not None
        killed_pids.append(pid)
        send(pid, signal.SIGKILL)

    killed = scene.run(2, kill_zygote)
    assert killed_pids
    assert local.zygote_pid() not in (None, *killed_pids)
    assert len(killed.events("worker_died")) >= 2
    assert killed.digest == scene.run(2).digest


def test_a_successor_dies_as_well(tmp_path: Path) -> None:
    """The same sample kills two workers in a row, then lets the third live."""
    count = iter(range(100))

    def make() -> At:
        model = At(17, kill_self, tmp_path / f"first{next(count)}")
        model.act = _TwoDeaths(str(tmp_path / "second"))
        return model

    killed = Scene(make).run(2)
    assert len(killed.events("worker_died")) == 2
    assert killed.digest == Scene().run(2).digest


class _TwoDeaths:
    """Kills, and arms itself once more by removing the marker of the first death."""

    def __init__(self, second: str) -> None:
        self.second = second

    def __call__(self) -> None:
        second = Path(self.second)
        if not second.exists():
            second.touch()
            for marker in second.parent.glob("first*"):
                marker.unlink()
        kill_self()


@pytest.mark.slow
def test_a_short_storm(tmp_path: Path) -> None:
    """Kills and pauses of random workers every 150 steps, with checkpoints being written meanwhile."""
    scene = Scene(data=table(4000), epochs=12)
    quiet = scene.run(2)
    fired = {signal.SIGKILL: 0, signal.SIGSTOP: 0}

    def storm(trainer: mh.Trainer) -> None:
        dice, due = random.Random(3), 0
        while sum(fired.values()) < 16 and committed(trainer) >= 0:
            due += 150  # by steps, so that a fast machine has as many deaths
            wait_until(lambda due=due: committed(trainer) >= due or committed(trainer) < 0, 60)
            if pids := list(trainer.pids.values()):
                number = dice.choices([signal.SIGKILL, signal.SIGSTOP], [6, 1])[0]
                fired[number] += send(dice.choice(pids), number)
                # A step that waits for a stopped worker would see so many deaths that the run gives it up.
                time.sleep(1.5 if number is signal.SIGSTOP else 0)

    stormy = scene.run(3, storm, run_dir=tmp_path / "run", checkpoint_every_s=0.3)
    assert fired[signal.SIGKILL] >= 8
    assert stormy.digest == quiet.digest
    assert proof(tmp_path / "run").exact
    assert percentile(stormy.stalls(), 0.5) <= 1.0


def test_deaths_while_workers_start() -> None:
    """Killed before they are ready: the run begins later, not differently."""
    scene, hit = Scene(), list[int]()
    model = scene.make_model()
    trainer = mh.Trainer(model, optimizer="adam", workers=3)

    def kill_early() -> None:
        wait_until(lambda: trainer.pids, 60)
        while committed(trainer) == 0 and len(hit) < 3:
            hit.extend(pid for pid in trainer.pids.values() if pid not in hit and send(pid, signal.SIGKILL))

    thread = threading.Thread(target=kill_early)
    thread.start()
    trainer.fit(scene.data, epochs=2, batch_size=16, lanes=4, run_dir=False, progress="quiet")
    thread.join()
    assert hit
    assert mh.digest(model) == scene.run(1).digest
