"""A worker dies while it changes parameters and optimizer state: what it left half-done is undone, and done again."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import Cnn, Mlp, Scene, committed, first_time, kill_self, send, table, wait_until
from test_digests import Matrices
from torch import nn

import manyhands as mh

pytestmark = pytest.mark.fault


class Dying(torch.optim.Optimizer):
    """Wraps the step of a real optimizer: at its ``at``-th call in a worker it leaves a mess and dies, once."""

    base: type[torch.optim.Optimizer]

    def __init__(self, params: Any, marker: str, at: int, **options: Any) -> None:
        self.marker, self.at, self.calls = marker, at, 0
        self.base.__init__(self, params, **options)  # type: ignore[misc]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        inspect.unwrap(self.base.step)(self)  # the wrapper would import torch's compiler into every worker
        if mh.worker_slot() is None or self.marker == "never":
            return
        self.calls += 1
        if self.calls >= self.at and first_time(self.marker):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1000.0)
                    for value in self.state[parameter].values():
                        if isinstance(value, torch.Tensor):
                            value.fill_(-1.0)
            kill_self()


class DyingAdam(Dying, torch.optim.Adam):
    base = torch.optim.Adam


class DyingMomentum(Dying, torch.optim.SGD):
    base = torch.optim.SGD


class DyingAdafactor(Dying, torch.optim.Adafactor):
    base = torch.optim.Adafactor


class DyingMuon(Dying, torch.optim.Muon):
    base = torch.optim.Muon


KINDS: dict[str, tuple[type[Dying], Callable[[], nn.Module], dict[str, Any]]] = {
    "adam": (DyingAdam, Mlp, {"amsgrad": True}),
    "momentum": (DyingMomentum, Cnn, {"lr": 0.05, "momentum": 0.9}),
    "adafactor": (DyingAdafactor, Mlp, {}),
    "muon": (DyingMuon, Matrices, {}),
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("at", [1, 7], ids=["before there is state", "with state"])
@pytest.mark.parametrize("kind", KINDS)
def test_death_within_a_step_of_the_optimizer(kind: str, at: int, workers: int, tmp_path: Path) -> None:
    optimizer, make_model, options = KINDS[kind]
    marker = tmp_path / "marker"
    scene = Scene(make_model, data=table(160))
    scene.optimizer = lambda params: optimizer(params, "never", at, **options)
    quiet = scene.run(2)
    scene.optimizer = lambda params: optimizer(params, str(marker), at, **options)
    killed = scene.run(workers)
    assert marker.exists()
    deaths = killed.events("worker_died")
    assert [(death["phase"], death["undone"]) for death in deaths] == [("reduce", True)]
    assert killed.digest == quiet.digest


def wide() -> nn.Module:
    return Mlp(width=6000, features=101)


def kill_in_apply(trainer: mh.Trainer, wanted: int = 4) -> None:
    """Kill a worker whenever it has begun to change units, also the successor in the same step."""
    assert trainer._fit is not None
    control, events = trainer._fit.session.control, trainer.history.events
    while sum(1 for event in events if event["event"] == "worker_died" and event["undone"]) < wanted:
        if committed(trainer) < 0:
            return
        for role, pid in trainer.pids.items():
            if control.slot_value(int(role.partition("-")[2]), "undo_step") > 0 and send(pid, signal.SIGKILL):
                wait_until(lambda pid=pid: pid not in trainer.pids.values(), 10)


@pytest.mark.parametrize("name", ["adam", "momentum", "adagrad"])
def test_kills_while_large_tensors_are_being_applied(name: str) -> None:
    """Optimizers that may be cut run torch's own kernels; the kill comes from outside, at the right moment."""
    scene = Scene(wide, optimizer=name, data=table(96, 101), epochs=5, batch_size=8)
    quiet = scene.run(3)
    for _ in range(3):
        killed = scene.run(2, kill_in_apply)
        assert sum(death["undone"] for death in killed.events("worker_died")) >= 4
        assert killed.digest == quiet.digest
