"""What a codec leaves out of an update is sent with a later one, whoever dies, is refused, or goes on another day."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from counting import BATCH, Storm, UntilOver, counting_data, counting_trainer

import manyhands as mh
from manyhands.core.policies import Async
from manyhands.train.checkpoint import read_checkpoint

pytestmark = pytest.mark.fault

QUIET = {"batch_size": BATCH, "progress": "quiet"}
CODEC = "topk:0.005"  # 32 of the 64 values that an update of eight rows has


def trainer_of(policy: object, workers: int = 3) -> mh.Trainer:
    return counting_trainer(mh.Server(policy=policy, codec=CODEC), workers=workers, height=8)


def left_out(run_dir: Path) -> torch.Tensor:
    """What the newest checkpoint says is still to be sent."""
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    return read_checkpoint(newest).tensors["lanes/0/residual/weight"]


def arrived_or_kept(trainer: mh.Trainer, run_dir: Path) -> set[float]:
    """How often samples had an effect, or will have."""
    kept = left_out(run_dir)
    assert kept.any(), "everything was sent: this shows nothing"
    return set(((kept - trainer.model.weight.detach()) * BATCH).unique().tolist())


def test_through_a_storm_of_kills(tmp_path: Path) -> None:
    trainer = trainer_of("plain")
    with Storm(trainer, most=12) as storm:
        history = trainer.fit(counting_data(), epochs=400, run_dir=tmp_path, callbacks=[UntilOver(storm)], **QUIET)
    assert storm.done and storm.fired["worker"] >= 1
    assert arrived_or_kept(trainer, tmp_path) == {float(len(history))}


def test_what_came_with_a_refused_update_is_sent_again(tmp_path: Path) -> None:
    trainer = trainer_of(Async(oldest=0), workers=4)
    history = trainer.fit(counting_data(), epochs=10, run_dir=tmp_path, **QUIET)
    assert history.updates["dropped"] > 0
    assert arrived_or_kept(trainer, tmp_path) == {10.0}


def test_a_resume_with_fewer_workers_goes_on_with_all_of_it(tmp_path: Path) -> None:
    class Stop(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            if state.epoch == 2:
                state.stop("enough")

    first = trainer_of("plain", workers=4)
    first.fit(counting_data(), epochs=6, run_dir=tmp_path, callbacks=[Stop()], **QUIET)
    assert arrived_or_kept(first, tmp_path) == {3.0}
    second = trainer_of("plain", workers=1)
    second.fit(counting_data(), epochs=6, resume=tmp_path, **QUIET)
    assert arrived_or_kept(second, tmp_path) == {6.0}
