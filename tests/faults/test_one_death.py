"""A worker is killed, anywhere: nothing is lost, nothing is counted twice, not a bit changes, and it takes moments."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
from scenes import (
    At,
    Cnn,
    Killer,
    Mlp,
    Scene,
    committed,
    first_time,
    kill_self,
    percentile,
    proof,
    send,
    table,
    wait_until,
)
from torch import nn

import manyhands as mh
from manyhands.core.order import epoch_order

pytestmark = pytest.mark.fault


def big_mlp() -> nn.Module:
    """So large that applying takes as long as computing, and that nobody applies its share in one go."""
    return Mlp(width=9000, features=101)


@pytest.mark.usefixtures("way")
def test_twenty_four_random_kills(tmp_path: Path) -> None:
    scenes = {
        "mlp": Scene(data=table(2400), epochs=4, batch_size=16),
        "cnn": Scene(Cnn, optimizer="momentum", data=table(1600), epochs=3, batch_size=16),
        "big": Scene(big_mlp, data=table(640, 101), epochs=5, batch_size=16, trainer={"clip": 1.0}),
    }
    stalls, deaths = [], []
    for seed, (name, scene) in enumerate(scenes.items()):
        steps = scene.epochs * len(scene.data[0]) // scene.batch_size
        killer = Killer(kills=8, first=5, last=steps * 3 // 4, seed=seed)
        quiet = scene.run(2)
        killed = scene.run(3, killer, run_dir=tmp_path / name, checkpoint_every_s=60.0)
        assert killed.digest == quiet.digest, name
        assert killed.history.metrics["loss"] == quiet.history.metrics["loss"]
        assert proof(tmp_path / name).exact
        assert len(proof(tmp_path / name).epochs) == scene.epochs
        stalls += killed.stalls()
        deaths += killed.events("worker_died")
        assert killer.fired == 8
        assert len(killed.events("worker_died")) >= 7  # one may have hit a process that was ending anyway
    assert {death["how"] for death in deaths} == {"killed by SIGKILL"}
    assert len({death["phase"] for death in deaths}) >= 2, "the kills hit only one phase"
    assert percentile(sorted(stalls), 0.75) <= 1.0  # its p95 on a quiet machine: docs/guarantees.md


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_death_in_the_forward_pass_of_an_exact_step(workers: int, tmp_path: Path) -> None:
    quiet = Scene().run(1)
    for sample in (3, 250):
        marker = tmp_path / str(sample)
        scene = Scene(lambda s=sample, m=marker: At(s, kill_self, m))
        killed = scene.run(workers)
        assert marker.exists()
        assert len(killed.events("worker_died")) == 1
        assert killed.events("worker_died")[0]["phase"] == "compute"
        assert [e["worker"] for e in killed.events("recovered")] == [killed.events("worker_died")[0]["worker"]]
        assert killed.digest == quiet.digest


def test_the_only_worker_dies_in_the_very_first_step(tmp_path: Path) -> None:
    sample = int(epoch_order(0, 0, 400)[0])
    scene = Scene(lambda: At(sample, kill_self, tmp_path / "marker"))
    killed = scene.run(1)
    assert killed.events("worker_died")[0]["step"] == 0
    assert killed.digest == Scene().run(1).digest


class DiesInLoss(nn.Module):
    """A loss that kills the worker after the output is there."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = str(marker)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if first_time(self.marker):
            kill_self()
        return nn.functional.cross_entropy(output, target)


def test_death_in_the_loss(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    killed = Scene(trainer={"loss": DiesInLoss(marker)}).run(2)
    assert marker.exists()
    assert killed.digest == Scene().run(3).digest


def test_death_while_the_run_rests_between_steps() -> None:
    class Resting(mh.Callback):
        fired = 0

        def on_epoch_end(self, state: mh.State) -> None:
            pid = next(iter(trainer.pids.values()))
            self.fired += send(pid, signal.SIGKILL)
            wait_until(lambda: pid not in trainer.pids.values(), 5)

    model, resting = Mlp(), Resting()
    trainer = mh.Trainer(model, optimizer="adam", workers=2)
    validation = table(100)
    trainer.fit(
        table(), validation, epochs=2, batch_size=16, lanes=4, run_dir=False, progress="quiet", callbacks=[resting]
    )
    assert resting.fired == 2
    assert mh.digest(model) == Scene().run(1).digest


def test_death_during_validation_and_predict(tmp_path: Path) -> None:
    x, y = table(400)
    quiet = mh.Trainer(Mlp(), metrics=["accuracy"], workers=1)
    for sample in (0, 399):
        trainer = mh.Trainer(At(sample, kill_self, tmp_path / f"evaluate{sample}"), metrics=["accuracy"], workers=2)
        assert trainer.evaluate((x, y), batch_size=32) == quiet.evaluate((x, y), batch_size=32)
        assert (tmp_path / f"evaluate{sample}").exists()
        trainer = mh.Trainer(At(sample, kill_self, tmp_path / f"predict{sample}"), workers=2)
        assert torch.equal(trainer.predict(x, batch_size=32), quiet.predict(x, batch_size=32))
        assert (tmp_path / f"predict{sample}").exists()


def test_a_fit_outside_of_the_main_thread_survives_as_well() -> None:
    scene, killer, outcomes = Scene(data=table(1600)), Killer(kills=3, first=5, last=100), []
    thread = threading.Thread(target=lambda: outcomes.append(scene.run(2, killer)))
    thread.start()
    thread.join(60)
    assert killer.fired == 3
    assert outcomes[0].digest == scene.run(2).digest
    assert committed(outcomes[0].trainer) == -1
