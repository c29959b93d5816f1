"""Callbacks and the history of a fit: hooks once per event, in the caller's process, steering what the workers do."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from jobs import ROWS, X, Y, digest_of, mlp, train
from torch import nn

import manyhands as mh
from manyhands.train.callbacks import CSVLogger, EarlyStopping, Lambda, ReduceOnPlateau, Schedule

STEPS = -(-ROWS // 16)


class Log(mh.Callback):
    """Every hook, where it ran, and what it saw."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.places: set[tuple[int, int]] = set()
        self.steps: list[int] = []
        self.digests: list[str] = []
        self.losses: list[float] = []

    def _note(self, hook: str) -> None:
        self.calls.append(hook)
        self.places.add((os.getpid(), threading.get_ident()))

    def on_train_begin(self, state: mh.State) -> None:
        self._note("train_begin")

    def on_train_end(self, state: mh.State) -> None:
        self._note("train_end")
        self.digests.append(mh.digest(state.model))

    def on_epoch_begin(self, state: mh.State) -> None:
        self._note(f"epoch_begin {state.epoch}")

    def on_epoch_end(self, state: mh.State) -> None:
        self._note(f"epoch_end {state.epoch}")
        assert state.metrics["loss"] == state.history.metrics["loss"][-1]
        assert len(state.history) == state.epoch + 1

    def on_step_begin(self, state: mh.State) -> None:
        self._note("step_begin")

    def on_step_end(self, state: mh.State) -> None:
        self._note("step_end")
        self.steps.append(state.step)
        self.digests.append(mh.digest(state.model))
        self.losses.append(state.metrics["loss"])


def test_every_hook_once_in_order_in_the_callers_thread() -> None:
    log, model = Log(), mlp(0.2)
    train(model, fit={"callbacks": [log], "epochs": 2})
    epoch = ["step_begin", "step_end"] * STEPS
    assert log.calls == [
        "train_begin", "epoch_begin 0", *epoch, "epoch_end 0", "epoch_begin 1", *epoch, "epoch_end 1", "train_end",
    ]  # fmt: skip
    assert log.places == {(os.getpid(), threading.get_ident())}
    assert log.steps == list(range(1, 2 * STEPS + 1))
    assert len(set(log.digests)) == 2 * STEPS
    assert log.digests[-1] == log.digests[-2] == mh.digest(model)
    assert mh.digest(model) == digest_of(mlp(0.2), fit={"epochs": 2})


def test_the_loss_of_a_step_is_that_of_its_batch() -> None:
    log = Log()
    _, history = train(fit={"callbacks": [log], "lanes": 3})
    sizes = [16] * (STEPS - 1) + [ROWS - 16 * (STEPS - 1)]
    mean = sum(loss * size for loss, size in zip(log.losses, sizes, strict=True)) / ROWS
    assert history.metrics["loss"] == [pytest.approx(mean, rel=1e-12)]


def test_early_stopping_ends_the_run() -> None:
    stop = EarlyStopping("loss", patience=2)
    _, history = train(optimizer=mh.optimizer("sgd", lr=0.0), fit={"callbacks": [stop], "epochs": 9, "shuffle": False})
    assert history.epochs == [0, 1, 2]


def test_a_stop_in_the_middle_of_an_epoch() -> None:
    log = Log()
    stop = Lambda(on_step_end=lambda state: state.stop("enough") if state.step == 3 else None)
    model = mlp()
    _, history = train(model, fit={"callbacks": [log, stop], "epochs": 3})
    assert log.steps == [1, 2, 3]
    assert log.calls[-1] == "train_end"
    assert len(history) == 0
    assert log.digests[-1] == mh.digest(model)


def test_a_rate_set_by_a_callback_is_the_rate_of_a_schedule() -> None:
    rates = [0.1, 0.01, 0.05]

    def by_schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: rates[min(epoch, 2)])

    one = mh.optimizer("sgd", lr=1.0)
    expected = digest_of(optimizer=one, schedule=mh.PerEpoch(by_schedule), fit={"epochs": 3, "lanes": 3})
    for workers in (1, 3):
        by_callback = {"callbacks": [Schedule(lambda epoch: rates[epoch])], "epochs": 3, "lanes": 3}
        assert digest_of(optimizer=one, workers=workers, fit=by_callback) == expected


def test_groups_keep_their_proportion_and_the_rate_can_be_read() -> None:
    seen = []

    def halve(state: mh.State) -> None:
        seen.append(state.lr)
        state.lr = state.lr / 2

    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.4}, {"params": model[3].parameters(), "lr": 0.1}]
    )
    train(model, optimizer=optimizer, fit={"callbacks": [Lambda(on_epoch_end=halve)], "epochs": 3})
    assert seen == [0.4, 0.2, 0.1]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.0125])


def test_reduce_on_plateau_by_callback() -> None:
    rates: list[float] = []
    read = Lambda(on_epoch_begin=lambda state: rates.append(state.lr))
    plateau = ReduceOnPlateau("loss", patience=1, factor=0.5, min_delta=1e9)
    train(optimizer=mh.optimizer("sgd", lr=0.8), fit={"callbacks": [read, plateau], "epochs": 4})
    assert rates == [0.8, 0.8, 0.4, 0.2]


def test_resizing_from_a_callback_changes_the_workers_and_nothing_else() -> None:
    class Resize(mh.Callback):
        """Asks for the next number as soon as the last one is there."""

        def __init__(self) -> None:
            self.wanted, self.reached = [2, 4, 1, 3], list[int]()

        def on_step_end(self, state: mh.State) -> None:
            if not self.wanted:
                return
            if len(trainer.pids) != self.wanted[0]:
                time.sleep(0.005)
                return
            self.reached.append(self.wanted.pop(0))
            if self.wanted:
                state.resize(self.wanted[0])

    model, resize = mlp(0.3), Resize()
    trainer = mh.Trainer(model, workers=2)
    options: dict[str, Any] = {"batch_size": 4, "lanes": 4, "epochs": 20}
    trainer.fit((X, Y), callbacks=[resize], run_dir=False, progress="quiet", **options)
    assert resize.reached == [2, 4, 1, 3]
    assert mh.digest(model) == digest_of(mlp(0.3), fit=options)


@pytest.mark.parametrize("wrong", [0, -1, "two", 1.5, True])
def test_a_callback_that_resizes_to_nonsense_gets_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"resize.*valid"):
        train(fit={"callbacks": [Lambda(on_epoch_end=lambda state: state.resize(wrong))], "epochs": 2})


def test_evaluate_and_predict_inside_a_callback_see_the_current_weights() -> None:
    found: list[tuple[float, torch.Tensor]] = []

    class Look(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            found.append((trainer.evaluate((X, Y))["loss"], trainer.predict(X)))
            assert found[-1][0] == state.metrics["val_loss"]

        def on_step_end(self, state: mh.State) -> None:
            if state.step == 2:
                found.append((trainer.evaluate((X, Y))["loss"], trainer.predict(X)))

    model = mlp(0.3)
    trainer = mh.Trainer(model, workers=2)
    options: dict[str, Any] = {"batch_size": 16, "epochs": 2, "run_dir": False, "progress": "quiet"}
    trainer.fit((X, Y), validation=(X, Y), callbacks=[Look()], **options)
    assert len({loss for loss, _ in found}) == 3
    assert found[-1][0] == trainer.evaluate((X, Y))["loss"]
    assert torch.equal(found[-1][1], trainer.predict(X))
    assert mh.digest(model) == digest_of(mlp(0.3), fit={"epochs": 2})


def test_an_error_in_a_callback_ends_the_run_as_it_is() -> None:
    class Mine(Exception):
        pass

    def fail(state: mh.State) -> None:
        raise Mine("here")

    with pytest.raises(Mine, match="here"):
        train(fit={"callbacks": [Lambda(on_epoch_end=fail)]})


def test_history_goes_to_files_while_it_grows(tmp_path: Any) -> None:
    _, history = train(metrics=["accuracy"], fit={"callbacks": [CSVLogger(tmp_path / "log.csv")], "epochs": 2})
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[0].split(",")[:3] == ["epoch", "loss", "accuracy"]
    assert [float(line.split(",")[1]) for line in lines[1:]] == history.metrics["loss"]
    assert history.to_pandas().loc[1, "accuracy"] == history.metrics["accuracy"][1]


def test_metrics_of_training_are_exact_over_lanes_and_short_batches() -> None:
    """With a rate of 0 the model stays, so the epoch's metrics are those of one pass over all rows."""
    trainer, history = train(
        metrics=["accuracy", "top2"], optimizer=mh.optimizer("sgd", lr=0.0), workers=3, fit={"lanes": 3}
    )
    exact = trainer.evaluate((X, Y))
    assert history.metrics["accuracy"] == [exact["accuracy"]]
    assert history.metrics["top2"] == [exact["top2"]]
    assert history.metrics["loss"] == [pytest.approx(exact["loss"], rel=1e-6)]


def test_a_model_that_keeps_buffers_shows_them_to_callbacks() -> None:
    model = nn.Sequential(nn.BatchNorm1d(X.shape[1]), mlp())
    counts: list[int] = []
    look = Lambda(on_epoch_end=lambda state: counts.append(int(state.model[0].num_batches_tracked)))  # type: ignore[index]
    train(model, fit={"callbacks": [look], "epochs": 2, "lanes": 2})
    assert counts == [STEPS, 2 * STEPS]
    mean = model[0].running_mean
    assert mean is not None
    torch.testing.assert_close(mean, X.mean(0), rtol=0.3, atol=0.15)
