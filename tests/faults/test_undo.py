"""A worker dies while it changes parameters and optimizer state: what it left half-done is undone, and done again."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import Cnn, Mlp, Scene, committed, first_time, kill_self, send, table, wait_until
from test_digests import Matrices
from torch import nn

import manyhands as mh
from manyhands.comm.arena import Arena, ArenaSpec, Entry, Unit
from manyhands.comm.control import PHASES
from manyhands.sync.undo import UndoLog, recover
from manyhands.train import state

pytestmark = pytest.mark.fault

REDUCE = PHASES.index("reduce")


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


@pytest.mark.usefixtures("way")
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


class TwoFates(Dying, torch.optim.SGD):
    """In one step worker 1 is stopped in the middle of its units, and worker 0 dies in the middle of its own."""

    base = torch.optim.SGD

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        inspect.unwrap(self.base.step)(self)
        stopped, dead = Path(self.marker + ".stopped"), Path(self.marker + ".dead")
        if mh.worker_slot() is None or self.marker == "never" or dead.exists():
            return
        self.calls += 1
        if mh.worker_slot() == 1 and self.calls >= self.at and first_time(stopped):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif mh.worker_slot() == 0:
            time.sleep(0.02)
            if stopped.exists() and first_time(dead):
                self.param_groups[0]["params"][0].add_(1000.0)
                kill_self()


def test_a_worker_stopped_in_its_share_does_not_keep_a_run_from_going_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "WHOLE_BYTES", 0)  # shared out, and a copy is kept
    scene = Scene(data=table(160), trainer={"limits": mh.Limits(pause_s=0.5)})
    scene.optimizer = lambda params: TwoFates(params, "never", 7, lr=0.05, momentum=0.9)
    quiet = scene.run(2)
    scene.optimizer = lambda params: TwoFates(params, str(tmp_path / "marker"), 7, lr=0.05, momentum=0.9)
    killed = scene.run(2)
    assert (tmp_path / "marker.dead").exists()
    assert [event["undone"] for event in killed.events("worker_died")] == [True, False]
    assert "kept a step from being taken back" in killed.events("worker_hung")[0]["text"]
    assert killed.digest == quiet.digest


@pytest.mark.parametrize("committed_steps, undone", [(4, True), (5, False), (9, False)])
def test_what_was_saved_for_a_step_that_is_over_is_not_put_back(committed_steps: int, undone: bool) -> None:
    """A worker that is late may save units for a step that others have finished; the units are theirs by now."""
    entry = Entry("weight", (32,), "float32", 0)
    spec = ArenaSpec(parameters=[entry], fixed=[], buffers=[], units=[Unit(0, 0, 128)], undo_bytes=8192, undo_units=1)
    arena = Arena(spec)
    weight = arena.parameters()[0]
    UndoLog(arena, 0).begin(0, 1, step=4)
    weight.fill_(7.0)
    arena.control.commit(committed_steps, 1)
    assert recover(arena, 0) is undone
    assert set(weight.tolist()) == {0.0 if undone else 7.0}
    assert recover(arena, 0) is False
    arena.close()


def wide() -> nn.Module:
    return Mlp(width=6000, features=101)


def torn(event: dict[str, Any]) -> bool:
    """Whether this is a death that left units half-changed; outside of the reduce phase they are only saved."""
    return event["event"] == "worker_died" and event["undone"] and event["phase"] == "reduce"


def kill_in_apply(trainer: mh.Trainer, wanted: int = 4) -> None:
    """Kill a worker whenever it has begun to change units, also the successor in the same step."""
    assert trainer._fit is not None
    control, events = trainer._fit.session.control, trainer.history.events
    while sum(torn(event) for event in events) < wanted:
        if committed(trainer) < 0:
            return
        for role, pid in trainer.pids.items():
            slot = int(role.partition("-")[2])
            changing = control.slot_value(slot, "undo_step") > 0 and control.slot_value(slot, "phase") == REDUCE
            if changing and send(pid, signal.SIGKILL):
                wait_until(lambda pid=pid: pid not in trainer.pids.values(), 10)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["adam", "momentum", "adagrad"])
def test_kills_while_large_tensors_are_being_applied(name: str) -> None:
    """Optimizers that may be cut run torch's own kernels; the kill comes from outside, at the right moment."""
    scene = Scene(wide, optimizer=name, data=table(96, 101), epochs=5, batch_size=8)
    quiet = scene.run(3)
    for _ in range(2):
        killed = scene.run(2, kill_in_apply)
        assert sum(torn(event) for event in killed.history.events) >= 4
        assert killed.digest == quiet.digest
