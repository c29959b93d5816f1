"""evaluate and predict: every row once, in order, the same bits on any number of workers, also when one is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from jobs import CLASSES, FEATURES, X, Y, mlp, one_thread, train, worker_processes
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import manyhands as mh
from manyhands.train.metrics import F1


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """With BatchNorm and dropout, so that the mode matters."""
    made = nn.Sequential(nn.BatchNorm1d(FEATURES), mlp(0.5))
    train(made, fit={"epochs": 2})
    return made


def alone(model: nn.Module, x: torch.Tensor, batch: int) -> torch.Tensor:
    model.eval()
    with one_thread(), torch.no_grad():
        rows = torch.cat([model(part) for part in x.split(batch)])
    model.train()
    return rows


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_predict_is_one_process_bit_for_bit(workers: int, model: nn.Module) -> None:
    trainer = mh.Trainer(model, workers=workers)
    for batch in (7, 256):
        rows = trainer.predict(X, batch_size=batch)
        assert torch.equal(rows, alone(model, X, batch))
        assert not rows.requires_grad


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 63])
def test_ragged_sizes(size: int, model: nn.Module) -> None:
    trainer = mh.Trainer(model, workers=3)
    assert torch.equal(trainer.predict(X[:size], batch_size=8), alone(model, X[:size], 8))
    assert trainer.evaluate((X[:size], Y[:size]), batch_size=8)["loss"] == loss_of(model, size, 8)


def loss_of(model: nn.Module, size: int, batch: int) -> float:
    outputs, total = alone(model, X[:size], batch), 0.0
    for part, target in zip(outputs.split(batch), Y[:size].split(batch), strict=True):
        total += float(functional.cross_entropy(part, target)) * len(part)
    return total / size


def test_evaluate_is_the_same_on_any_number_of_workers_and_exact(model: nn.Module) -> None:
    metrics: list[Any] = ["accuracy", "top2", F1(classes=CLASSES)]
    found = [mh.Trainer(model, metrics=metrics, workers=w).evaluate((X, Y), batch_size=7) for w in (1, 2, 3, 4)]
    assert found == [found[0]] * 4
    rows = alone(model, X, 7)
    right = rows.argmax(1) == Y
    assert found[0]["accuracy"] == int(right.sum()) / len(Y)
    assert found[0]["top2"] == int((rows.topk(2).indices == Y[:, None]).any(1).sum()) / len(Y)
    assert found[0]["loss"] == loss_of(model, len(X), 7)
    scores = []
    for number in range(CLASSES):
        hit = int((right & (number == Y)).sum())
        scores.append(2 * hit / (int((rows.argmax(1) == number).sum()) + int((number == Y).sum())))
    assert found[0]["f1"] == pytest.approx(sum(scores) / CLASSES)


def test_metrics_do_not_depend_on_the_batch_size(model: nn.Module) -> None:
    trainer = mh.Trainer(model, metrics=["accuracy"], workers=2)
    found = [trainer.evaluate((X, Y), batch_size=size) for size in (1, 32, 1000)]
    assert len({result["accuracy"] for result in found}) == 1
    assert [result["loss"] for result in found] == pytest.approx([found[0]["loss"]] * 3, rel=1e-5)


def test_every_kind_of_data_can_be_predicted(model: nn.Module) -> None:
    trainer = mh.Trainer(model, workers=2)
    expected = trainer.predict(X)
    for data in (
        X.numpy(),
        (X, Y),
        TensorDataset(X),
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), 4),
        X.tolist(),
    ):
        assert torch.equal(trainer.predict(data), expected)


def test_the_callers_model_stays_as_it_was(model: nn.Module) -> None:
    before = mh.digest(model)
    model.train()
    mh.Trainer(model, workers=2).predict(X)
    assert model.training
    assert mh.digest(model) == before
    assert worker_processes() == []


def test_a_model_without_trainable_parameters_and_an_output_of_another_type() -> None:
    class Sign(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x > 0).any(dim=1)

    assert torch.equal(mh.Trainer(Sign(), workers=2).predict(X), (X > 0).any(dim=1))


def test_rows_without_columns() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double().reshape(-1, 2, 3)[:, :, :0]

    rows = mh.Trainer(Nothing(), workers=2).predict(X)
    assert rows.shape == (len(X), 2, 0) and rows.dtype is torch.float64


def test_what_cannot_be_put_in_rows_is_named() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, x

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.mean(0)

    with pytest.raises(ValueError, match=r"returned tuple for .* rows; valid is a tensor with a row for each"):
        mh.Trainer(Pair(), workers=1).predict(X)
    with pytest.raises(ValueError, match=r"returned \(6,\) for 90 rows"):
        mh.Trainer(Mean(), workers=1).predict(X)


class Slow(Dataset[Any]):
    """Takes its time, so that a kill falls into the middle."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return X[index % len(X)] + index, int(Y[index % len(Y)])


class Killer(threading.Thread):
    """Sends a signal to workers of the zygote, to one at each of the given moments after the first one is seen."""

    def __init__(self, *moments: float, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.moments, self.number, self.killed = moments, number, list[int]()

    def run(self) -> None:
        while not worker_processes():
            time.sleep(0.005)
        begun = time.monotonic()
        for number, moment in enumerate(self.moments):
            time.sleep(max(begun + moment - time.monotonic(), 0))
            if processes := worker_processes():
                victim = processes[number % len(processes)]
                os.kill(victim, self.number)
                self.killed.append(victim)


@pytest.fixture
def killer() -> Iterator[Killer]:
    thread = Killer(0.25, 0.4, 0.55)
    thread.start()
    yield thread
    thread.join(10)
    assert len(thread.killed) == 3, "the kills did not fall into the run"


@pytest.mark.fault
def test_predict_survives_kills_byte_for_byte(model: nn.Module, killer: Killer) -> None:
    rows = mh.Trainer(model, workers=2).predict(Slow(800), batch_size=16)
    inputs = torch.stack([X[index % len(X)] + index for index in range(800)])
    assert torch.equal(rows, alone(model, inputs, 16))


@pytest.mark.fault
def test_evaluate_survives_kills_to_the_last_bit(model: nn.Module, killer: Killer) -> None:
    trainer = mh.Trainer(model, metrics=["accuracy"], workers=3)
    found = trainer.evaluate(Slow(1200), batch_size=16)
    killer.join(10)
    inputs = torch.stack([X[index % len(X)] + index for index in range(1200)])
    targets = torch.stack([Y[index % len(Y)] for index in range(1200)])
    assert found == mh.Trainer(model, metrics=["accuracy"], workers=1).evaluate((inputs, targets), batch_size=16)


@pytest.mark.fault
def test_many_deaths_over_a_long_inference_are_no_reason_to_give_up(model: nn.Module) -> None:
    """Rows are finished between the deaths, so there is progress."""
    thread = Killer(*(0.35 * number for number in range(1, 9)))  # a successor must have the time to start
    thread.start()
    rows = mh.Trainer(model, workers=2).predict(Slow(5000), batch_size=16)
    thread.join(10)
    assert len(thread.killed) == 8
    assert len(rows) == 5000


def test_an_error_in_the_data_comes_back_as_it_was_raised(model: nn.Module) -> None:
    class Hole(Slow):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 40:
                raise LookupError("no row 40")
            return super().__getitem__(index)

    with pytest.raises(LookupError, match="no row 40") as caught:
        mh.Trainer(model, workers=2).predict(Hole(64), batch_size=8)
    assert any("sample 40" in note for note in caught.value.__notes__)
    assert worker_processes() == []


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "all", True])
def test_a_batch_size_that_is_none_is_refused(wrong: Any, model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"batch_size received .*valid is an integer"):
        mh.Trainer(model, workers=1).predict(X, batch_size=wrong)


def test_data_without_a_target_cannot_be_evaluated(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no target"):
        mh.Trainer(model, workers=1).evaluate(X)


class Wordy(nn.Module):
    """Its outputs are larger than what a connection holds, so that a worker is mostly in the middle of sending one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1].expand(-1, 40_000)


@pytest.mark.fault
def test_a_worker_that_is_stopped_while_it_sends_holds_nobody_up() -> None:
    stopper = Killer(0.15, number=signal.SIGSTOP)
    stopper.start()
    x = torch.arange(3072.0).view(-1, 1)
    begun = time.monotonic()
    sums = [mh.Trainer(Wordy(), workers=2, limits=mh.Limits(pause_s=0.5)).predict(x, batch_size=64).sum(1)]
    assert time.monotonic() - begun < 20
    stopper.join(10)
    assert len(stopper.killed) == 1
    assert torch.equal(sums[0], (x * 40_000).view(-1))
