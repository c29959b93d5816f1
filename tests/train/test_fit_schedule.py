"""Schedules: the rates that the workers really use are those of a plain loop with the same scheduler.

The model is one number whose gradient is always 1, so that every step of SGD moves it by exactly the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import manyhands as mh

# The first optimizer of a process makes torch import its compiler, which sets an environment variable: before a test.
if mh.worker_slot() is None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])

ROWS, BATCH, EPOCHS, RATE = 40, 8, 4, 0.5
STEPS = ROWS // BATCH
X, Y = torch.ones(ROWS, 1), torch.zeros(ROWS)


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.height = nn.Parameter(torch.tensor([100.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.height * x


def height(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def height_of(model: nn.Module) -> float:
    return float(model.get_parameter("height").item())


class Heights(mh.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_begin(self, state: mh.State) -> None:
        self.seen.append(height_of(state.model))

    def on_step_end(self, state: mh.State) -> None:
        self.seen.append(height_of(state.model))


def used_rates(schedule: Any, workers: int = 2, momentum: float = 0.0) -> list[float]:
    model, heights = Slope(), Heights()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    if isinstance(schedule, Bound):
        schedule = schedule.build(optimizer)
    trainer = mh.Trainer(model, loss=height, optimizer=optimizer, schedule=schedule, workers=workers)
    options: dict[str, Any] = {"run_dir": False, "progress": "quiet", "callbacks": [heights], "lanes": 2}
    trainer.fit((X, Y), epochs=EPOCHS, batch_size=BATCH, **options)
    return [before - after for before, after in pairwise(heights.seen)]


class Bound:
    """A scheduler that the user binds to the optimizer before the Trainer gets either."""

    def __init__(self, build: Callable[[torch.optim.Optimizer], Any]) -> None:
        self.build = build


def plain_rates(
    build: Callable[[torch.optim.Optimizer], Any], per_epoch: bool = False, momentum: float = 0.0
) -> list[float]:
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    scheduler = build(optimizer)
    rates = []
    for _ in range(EPOCHS):
        losses = []
        for _ in range(STEPS):
            before = height_of(model)
            optimizer.zero_grad()
            loss = height(model(X[:BATCH]), Y[:BATCH])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            rates.append(before - height_of(model))
            if not per_epoch:
                scheduler.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(sum(losses) / STEPS)
        elif per_epoch:
            scheduler.step()
    return rates


TOTAL = EPOCHS * STEPS


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=TOTAL)


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, steps)


def warm_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, TOTAL - 5)], [5])


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """No progress is ever enough, so it acts after each epoch but the first."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs")


CASES: dict[str, tuple[Any, Callable[[torch.optim.Optimizer], Any], bool]] = {
    "cosine": ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL), False),
    "linear": ("linear", lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, TOTAL), False),
    "constant": ("constant", lambda o: lr_scheduler.ConstantLR(o, 1.0), False),
    "onecycle": ("onecycle", one_cycle, False),
    "function": (exponential, exponential, False),
    "function of the steps": (lambda o, steps: cosine(o, steps), lambda o: cosine(o, TOTAL), False),
    "two in sequence": (warm_then_cosine, warm_then_cosine, False),
    "instance": (Bound(exponential), exponential, False),
    "per epoch": (mh.PerEpoch(exponential), exponential, True),
    "instance per epoch": (Bound(lambda o: mh.PerEpoch(exponential(o))), exponential, True),
    "plateau": (plateau, plateau, True),
    "plateau instance": (Bound(plateau), plateau, True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_rates_are_those_of_a_plain_loop(name: str) -> None:
    schedule, build, per_epoch = CASES[name]
    expected = plain_rates(build, per_epoch)
    assert len(set(expected)) > 1 or name == "constant"
    assert used_rates(schedule) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_schedule_of_the_momentum_reaches_the_workers() -> None:
    assert used_rates(one_cycle, momentum=0.9) == pytest.approx(plain_rates(one_cycle, momentum=0.9), rel=1e-9)


def test_the_rates_do_not_depend_on_the_workers() -> None:
    assert used_rates("cosine", workers=1) == used_rates("cosine", workers=3)


def test_a_second_fit_runs_the_schedule_again() -> None:
    model = Slope()
    trainer = mh.Trainer(model, loss=height, optimizer=mh.optimizer("sgd", lr=RATE), schedule="cosine", workers=1)
    falls = []
    for _ in range(2):
        before = height_of(model)
        trainer.fit((X, Y), epochs=EPOCHS, batch_size=BATCH, run_dir=False, progress="quiet")
        falls.append(before - height_of(model))
    assert falls[1] == pytest.approx(falls[0], rel=1e-9)


def test_a_rate_set_by_hand_scales_what_the_schedule_says() -> None:
    class Halve(Heights):
        def on_epoch_begin(self, state: mh.State) -> None:
            if state.epoch == 2:
                state.lr = state.lr / 2

    model, heights = Slope(), Halve()
    trainer = mh.Trainer(model, loss=height, optimizer=mh.optimizer("sgd", lr=RATE), schedule="linear", workers=2)
    trainer.fit((X, Y), epochs=EPOCHS, batch_size=BATCH, callbacks=[heights], run_dir=False, progress="quiet")
    rates = [before - after for before, after in pairwise(heights.seen)]
    plain = plain_rates(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, TOTAL))
    half = 2 * STEPS
    assert rates == pytest.approx([*plain[:half], *(rate / 2 for rate in plain[half:])], rel=1e-9)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    other = exponential(torch.optim.SGD(Slope().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="bound to another optimizer"):
        used_rates(other)


@pytest.mark.parametrize("wrong", ["cosin", 3, object()])
def test_what_is_no_schedule_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"(Did you mean 'cosine'|schedule received).*[Vv]alid"):
        used_rates(wrong)
