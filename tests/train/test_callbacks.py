"""Callbacks are called in order, steer through the state, and remember across a resume."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch import nn

from manyhands.errors import UsageError
from manyhands.train.callbacks import (
    Callback,
    CallbackList,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    Lambda,
    ReduceOnPlateau,
    Schedule,
    State,
    wants_steps,
)


@dataclass
class Desk:
    """Controls that write down what was asked."""

    rates: list[float] = field(default_factory=lambda: [0.1, 0.2])
    asked: list[Any] = field(default_factory=list)
    network: nn.Module = field(default_factory=lambda: nn.Linear(1, 1))

    def current_model(self) -> nn.Module:
        return self.network

    def get_lr(self) -> list[float]:
        return self.rates

    def set_lr(self, lr: float) -> None:
        self.rates = [lr] * len(self.rates)

    def stop(self, reason: str) -> None:
        self.asked.append(("stop", reason))

    def resize(self, workers: int) -> None:
        self.asked.append(("resize", workers))

    def checkpoint(self) -> None:
        self.asked.append("checkpoint")


def play(callback: Callback, values: list[float], monitor: str = "val_loss", start: int = 0) -> tuple[State, Desk]:
    """Run through epochs that measure these values, until the callback stops the run."""
    desk = Desk()
    state = State(desk, epochs=start + len(values))
    for epoch, value in enumerate(values, start):
        state.epoch = epoch
        callback.on_epoch_begin(state)
        state.metrics = {monitor: value}
        state.history.append(epoch, state.metrics)
        callback.on_epoch_end(state)
        if any(request[0] == "stop" for request in desk.asked):
            break
    return state, desk


def test_state_asks_the_controls() -> None:
    desk = Desk()
    state = State(desk)
    assert state.model is desk.network
    assert state.lr == 0.1
    state.lr = 0.5
    assert desk.rates == [0.5, 0.5]
    state.stop("enough")
    state.resize(3)
    state.save()
    assert desk.asked == [("stop", "enough"), ("resize", 3), "checkpoint"]


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, None, "0.1"])
def test_bad_learning_rate(rate: Any) -> None:
    with pytest.raises(UsageError, match=r"learning rate is .*valid: a finite number"):
        State(Desk()).lr = rate


def test_hooks_are_called_in_order() -> None:
    calls: list[str] = []

    class Loud(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_step_end(self, state: State) -> None:
            calls.append(f"{self.name} step {state.step}")

        def on_train_end(self, state: State) -> None:
            calls.append(f"{self.name} end")

    together = CallbackList([Loud("a"), Lambda(on_step_end=lambda state: calls.append("b")), Loud("c")])
    for hook in ("train_begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "train_end"):
        getattr(together, f"on_{hook}")(State(Desk(), step=4))
    assert calls == ["a step 4", "b", "c step 4", "a end", "c end"]


def test_wants_steps_only_when_a_step_hook_is_there() -> None:
    class Stepper(Callback):
        def on_step_begin(self, state: State) -> None:
            pass

    assert not wants_steps([])
    assert not wants_steps(CallbackList([EarlyStopping(), Lambda(on_epoch_end=print), Callback()]))
    assert wants_steps([Callback(), Stepper()])
    assert wants_steps(CallbackList(Lambda(on_step_end=print)))


@pytest.mark.parametrize("bad", [print, EarlyStopping, "early", None])
def test_what_is_not_a_callback_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match=r"a callback is .*valid: an instance of a subclass of Callback"):
        CallbackList([bad])


def test_lambda_refuses_unknown_hooks() -> None:
    with pytest.raises(UsageError, match=r"unknown hook 'on_epoch_ends'. Did you mean 'on_epoch_end'"):
        Lambda(on_epoch_ends=print)


@pytest.mark.parametrize(
    "options, monitor, values, stopped_at",
    [
        ({"patience": 2}, "val_loss", [1, 0.9, 0.95, 0.91, 0.1], 3),
        ({"patience": 2}, "val_loss", [1, 0.9, 0.95, 0.8, 0.7], None),
        ({"patience": 1, "min_delta": 0.2}, "loss", [1, 0.9, 0.1], 1),
        ({"patience": 1}, "val_accuracy", [0.5, 0.6, 0.6, 0.9], 2),
        ({"patience": 1}, "token_accuracy", [0.5, 0.6, 0.6, 0.9], 2),
        ({"patience": 1}, "top5", [0.5, 0.6, 0.5], 2),
        ({"patience": 1, "mode": "max"}, "custom", [1, 2, 2], 2),
        ({"patience": 1, "mode": "min"}, "accuracy", [2, 1, 1], 2),
        ({"patience": 2}, "loss", [math.nan, math.inf, 0.1], 1),
    ],
)
def test_early_stopping(options: Any, monitor: str, values: list[float], stopped_at: int | None) -> None:
    state, desk = play(EarlyStopping(monitor, **options), values, monitor)
    assert bool(desk.asked) == (stopped_at is not None)
    if stopped_at is not None:
        assert state.epoch == stopped_at
        assert desk.asked[0][1].startswith(f"{monitor} made no progress for {options['patience']} epochs (")


def test_early_stopping_remembers_across_a_resume() -> None:
    values = [1.0, 0.9, 0.95, 0.92, 0.91]
    whole, _ = play(EarlyStopping(patience=3), values)
    first = CallbackList([Callback(), EarlyStopping(patience=3), EarlyStopping("val_loss", patience=5)])
    play(first, values[:3])
    saved = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    second = CallbackList([EarlyStopping(patience=3), EarlyStopping("val_loss", patience=5)])
    second.load_state_dict(saved)
    resumed, desk = play(second, values[3:], start=3)
    assert resumed.epoch == whole.epoch == 4
    assert desk.asked


def test_monitor_that_is_not_measured() -> None:
    with pytest.raises(UsageError, match=r"'val_loss', which this run does not measure; valid: loss. Give fit val"):
        play(EarlyStopping(), [1.0], "loss")


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping(patience=0),
        lambda: EarlyStopping(min_delta=-1),
        lambda: EarlyStopping(mode="down"),
        lambda: ReduceOnPlateau(factor=1.5),
        lambda: Checkpoint(every_epochs=0),
    ],
)
def test_bad_options(make: Any) -> None:
    with pytest.raises(UsageError, match=r"[Vv]alid: "):
        make()


def test_reduce_on_plateau() -> None:
    _, desk = play(ReduceOnPlateau(patience=2, factor=0.5, min_lr=0.03), [1.0] * 8)
    assert desk.rates == [0.03, 0.03]
    _, desk = play(ReduceOnPlateau(patience=2, factor=0.5), [1.0] * 4)
    assert desk.rates == [0.05, 0.05]


def test_schedule() -> None:
    seen: list[float] = []
    watch = Lambda(on_epoch_end=lambda state: seen.append(state.lr))
    play(CallbackList([Schedule(lambda epoch: 1 / (1 + epoch)), watch]), [1.0, 1.0, 1.0, 1.0])
    assert seen == [1, 1 / 2, 1 / 3, 1 / 4]


def test_checkpoint_every_so_many_epochs() -> None:
    _, desk = play(Checkpoint(every_epochs=2), [1.0] * 5)
    assert desk.asked == ["checkpoint", "checkpoint"]


def test_csv_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "log.csv")
    play(logger, [1.0, 0.5])
    assert (tmp_path / "log.csv").read_text().splitlines() == ["epoch,val_loss", "0,1.0", "1,0.5"]
    with pytest.warns(UserWarning, match=r"cannot write .*training goes on"):
        play(CSVLogger(tmp_path / "no such folder" / "log.csv"), [1.0])


def test_callbacks_survive_cloudpickle(tmp_path: Path) -> None:
    early = EarlyStopping(patience=2)
    play(early, [1.0, 2.0])
    others = [Schedule(lambda epoch: 0.1), CSVLogger(tmp_path / "x.csv"), Lambda(on_step_end=print)]
    together = CallbackList([early, *others])
    again = pickle.loads(cloudpickle.dumps(together))
    assert again.state_dict() == together.state_dict() == {"EarlyStopping#0": {"best": 1.0, "waited": 1}}
    assert wants_steps(again)
