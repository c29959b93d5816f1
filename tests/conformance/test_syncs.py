"""Every way of agreeing against every property. That nothing is left behind, the fixtures of all tests watch over."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from syncs import ROWS, Row
from torch import nn

import manyhands as mh
from manyhands.errors import CheckpointMismatch, UsageError
from manyhands.train.ledger_file import read_ledger
from manyhands.train.strategy import resolve_sync

pytestmark = [pytest.mark.fault, pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)]

Data = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def digits() -> tuple[Data, Data]:
    """Real data: training and test part of scikit-learn's digits."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    images, labels = torch.as_tensor(x / 16, dtype=torch.float32)[order], torch.as_tensor(y)[order]
    return (images[:1408], labels[:1408]), (images[1408:], labels[1408:])


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def trainer_of(row: Row, workers: int = 3) -> mh.Trainer:
    model = net()
    return mh.Trainer(
        model, optimizer=mh.optimizer("adam", lr=2e-3), metrics=["accuracy"], workers=workers, sync=row.make()
    )


FIT = {"batch_size": 32, "progress": "quiet"}


@functools.cache
def usual_accuracy() -> float:
    """What all-reduce reaches."""
    trainer = trainer_of(ROWS[0])
    trainer.fit(digits()[0], epochs=8, run_dir=False, **FIT)
    return trainer.evaluate(digits()[1])["accuracy"]


def test_it_learns_and_counts_every_sample_once(row: Row, tmp_path: Path) -> None:
    train, test = digits()
    trainer = trainer_of(row)
    history = trainer.fit(train, test, epochs=8, run_dir=tmp_path, **FIT)
    assert history.metrics["val_accuracy"][-1] >= usual_accuracy() - row.lag
    proof = read_ledger(tmp_path / "ledger").verify()
    assert proof.exact and len(proof.epochs) == 8
    sync = resolve_sync(row.make())
    shares_log = sync.processes > 0 and sync.lanes == 1 and not sync.sockets
    assert {epoch.witnessed for epoch in proof.epochs} == {44 if shares_log else 0}


def test_evaluate_and_predict_are_those_of_one_process(row: Row) -> None:
    train, test = digits()
    trainer = trainer_of(row)
    trainer.fit(train, epochs=1, run_dir=False, **FIT)
    model = trainer.model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in test[0].split(256)])
    assert torch.equal(trainer.predict(test[0]), outputs)
    measured = trainer.evaluate(test)
    assert measured["accuracy"] == (outputs.argmax(1) == test[1]).double().mean().item()
    assert measured["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, test[1]).item(), abs=1e-6)


class Disturb(mh.Callback):
    """Sends a signal to a process of each role, once, a moment into the second epoch."""

    def __init__(self, trainer: mh.Trainer, number: signal.Signals) -> None:
        self.trainer, self.number, self.fired = trainer, number, set[str]()

    def on_epoch_begin(self, state: mh.State) -> None:
        if state.epoch == 1:
            for role in ("worker", "server"):
                pids = [pid for name, pid in self.trainer.pids.items() if name.startswith(role)]
                if pids:
                    threading.Timer(0.02, os.kill, (pids[0], self.number)).start()
                    self.fired.add(role)

    def on_epoch_end(self, state: mh.State) -> None:
        """Where nobody waits for the one who is gone, the run would be over before it is missed."""
        recovered = sum(event["event"] == "recovered" for event in state.history.events)
        if state.epoch >= 5 and recovered == len(self.fired):
            state.stop("seen")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_it_survives_the_loss_of_a_worker_and_of_a_server(row: Row, number: signal.Signals, tmp_path: Path) -> None:
    train, _ = digits()
    trainer = mh.Trainer(net(), optimizer="adam", workers=2, sync=row.make(), limits=mh.Limits(pause_s=0.3))
    disturb = Disturb(trainer, number)
    history = trainer.fit(
        train,
        epochs=6 if row.exact else 400,
        lanes=4 if row.exact else None,
        run_dir=tmp_path,
        callbacks=[disturb],
        **FIT,
    )
    died = {event["event"].removesuffix("_died") for event in history.events if event["event"].endswith("_died")}
    assert died == disturb.fired == ({"worker", "server"} if row.servers else {"worker"})
    assert sum(event["event"] == "recovered" for event in history.events) == len(died)
    assert read_ledger(tmp_path / "ledger").verify().exact
    if row.exact:
        quiet = mh.Trainer(net(), optimizer="adam", workers=3, sync=row.make())
        quiet.fit(train, epochs=6, lanes=4, run_dir=False, **FIT)
        assert mh.digest(trainer.model) == mh.digest(quiet.model)


class StopAt(mh.Callback):
    """Ends the run in the middle of an epoch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: mh.State) -> None:
        if state.step >= self.step:
            state.stop("enough")


def test_it_resumes_and_its_checkpoints_move_to_all_reduce_and_back(row: Row, tmp_path: Path) -> None:
    train, test = digits()
    trainer_of(row).fit(train, epochs=3, run_dir=tmp_path, callbacks=[StopAt(60)], **FIT)
    same = trainer_of(row, workers=2)
    same.fit(train, epochs=3, resume=tmp_path, callbacks=[StopAt(100)], **FIT)
    other = trainer_of(ROWS[0], workers=4)
    other.fit(train, epochs=6, resume=tmp_path, callbacks=[StopAt(200)], **FIT)
    back = trainer_of(row, workers=1)
    history = back.fit(train, test, epochs=8, resume=tmp_path, **FIT)
    assert history.metrics["val_accuracy"][-1] >= usual_accuracy() - 2 * row.lag
    proof = read_ledger(tmp_path / "ledger").verify()
    assert proof.exact and len(proof.epochs) == 8


def test_it_refuses_other_data_and_bad_words(row: Row, tmp_path: Path) -> None:
    (x, y), _ = digits()
    trainer_of(row).fit((x, y), epochs=1, run_dir=tmp_path, **FIT)
    with pytest.raises(CheckpointMismatch, match="samples was 1408, is 1407"):
        trainer_of(row).fit((x[1:], y[1:]), epochs=2, resume=tmp_path, **FIT)
    with pytest.raises(UsageError, match="workers received 0"):
        trainer_of(row, workers=0)
    with pytest.raises(UsageError, match="batch_size"):
        trainer_of(row).fit((x, y), batch_size=0, run_dir=False, progress="quiet")
