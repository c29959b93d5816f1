"""The number of workers does not change a bit of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scenes import CLASSES, FEATURES, Cnn, Mlp, Scene, table
from torch import nn

import manyhands as mh
from manyhands.train import state
from manyhands.train.optimizers import NAMES

pytestmark = pytest.mark.fault

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "momentum": {"optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)},
    "adamw, clip, schedule": {
        "optimizer": mh.optimizer("adamw", lr=3e-3, weight_decay=0.01),
        "trainer": {"clip": 0.5, "schedule": "onecycle"},
    },
}


class Tied(nn.Module):
    """Two layers share a weight, one parameter is frozen, one is used for some rows only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.into = nn.Linear(FEATURES - 1, 16)
        self.back = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.back.weight
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.seldom = nn.Linear(16, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.into(x[:, :-1])) * self.frozen
        hidden = torch.relu(self.again(torch.relu(self.back(hidden))))
        if x[0, -1] % 3 == 0:
            hidden = hidden + self.seldom(hidden)
        out: torch.Tensor = self.out(hidden)
        return out


def grouped(model: Tied) -> torch.optim.Optimizer:
    heads = {*model.out.parameters()}
    rest = [p for p in model.parameters() if p not in heads]
    return torch.optim.AdamW([{"params": rest, "lr": 1e-3}, {"params": [*heads], "lr": 1e-2, "weight_decay": 0.0}])


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make_model", [Mlp, Cnn])
def test_any_number_of_workers_gives_the_same_weights(
    make_model: Callable[[], nn.Module], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(make_model, data=table(203), **settings)  # 203 = 12 × 16 + 11: the last batch is ragged
    outcomes = [scene.run(workers) for workers in (1, 2, 3, 4)]
    monkeypatch.setattr(state, "WHOLE_BYTES", 0)  # every worker applies a share, and a copy is kept
    outcomes += [scene.run(workers) for workers in (1, 2, 3)]
    monkeypatch.setattr(state, "KEPT_BYTES", 0)  # every worker applies a share, with an undo log, as with large models
    outcomes += [scene.run(workers) for workers in (1, 3, 4)]
    assert len({outcome.digest for outcome in outcomes}) == 1
    assert outcomes[0].digest != mh.digest(make_model())
    assert len({tuple(outcome.history.metrics["loss"]) for outcome in outcomes}) == 1


def wide() -> nn.Module:
    return Mlp(width=6000, features=101)


def test_gradients_that_are_left_as_factors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server, and a model none of whose layers is large enough for factors, have whole gradients."""
    scene = Scene(wide, data=table(107, 101), epochs=2)
    digests = {scene.run(workers).digest for workers in (1, 2, 4)}
    monkeypatch.setattr(state, "FACTORED_BYTES", 1 << 30)
    digests |= {scene.run(workers).digest for workers in (1, 3)}
    digests.add(Scene(wide, data=table(107, 101), epochs=2, trainer={"sync": "server"}).run(2).digest)
    assert len(digests) == 1


def test_seed_and_lanes_do_change_it() -> None:
    digests = {Scene(lanes=lanes, trainer={"seed": seed}).run(2).digest for lanes in (1, 4) for seed in (0, 1)}
    assert len(digests) == 4


def test_fewer_rows_than_lanes_in_the_last_batch() -> None:
    scene = Scene(data=table(66), lanes=4)  # the last batch has two rows for four lanes
    assert len({scene.run(workers).digest for workers in (1, 3)}) == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_groups_ties_frozen_and_seldom_used_parameters(accumulate: int) -> None:
    digests, models = set(), []
    for workers in (1, 2, 3):
        model = Tied()
        trainer = mh.Trainer(model, optimizer=grouped(model), workers=workers, accumulate=accumulate)
        trainer.fit(table(150), epochs=2, batch_size=12, lanes=4, run_dir=False, progress="quiet")
        digests.add(mh.digest(model))
        models.append(model)
    assert len(digests) == 1
    assert models[0].back.weight is models[0].again.weight
    assert torch.equal(models[0].frozen, Tied().frozen)
    assert not torch.equal(models[0].seldom.weight, Tied().seldom.weight)


class Embedded(nn.Module):
    """An embedding with sparse gradients, for the optimizer that wants nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(50, CLASSES, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table((x[:, -1] % 50).long())
        return out


class Matrices(nn.Module):
    """Matrices alone, for the optimizer that takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = nn.Linear(FEATURES - 1, 32, bias=False)
        self.second = nn.Linear(32, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x[:, :-1])))
        return out


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_by_name(name: str) -> None:
    make_model = {"sparseadam": Embedded, "muon": Matrices}.get(name, Mlp)
    scene = Scene(make_model, optimizer=name, data=table(100), epochs=2)
    one, three = scene.run(1), scene.run(3)
    assert one.digest == three.digest
    assert one.digest != mh.digest(make_model())
