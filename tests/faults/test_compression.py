"""With a codec, too, nothing that happens to the workers changes a bit of the result."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import Cnn, Killer, Mlp, Scene, committed, first_time, kill_self, send, table, wait_until
from test_digests import Tied
from torch import nn

import manyhands as mh
from manyhands.comm.codecs import CODECS
from manyhands.comm.frames import Frame
from manyhands.comm.scaled import Int8
from manyhands.core.order import epoch_order
from manyhands.train import state

pytestmark = pytest.mark.fault


def scene(
    codec: Any, make_model: Callable[[], nn.Module] = Mlp, trainer: dict[str, Any] | None = None, **more: Any
) -> Scene:
    return Scene(make_model, trainer={"sync": mh.AllReduce(codec=codec), **(trainer or {})}, **more)


@pytest.mark.parametrize("codec", CODECS)
def test_any_number_of_workers_gives_the_same_weights(codec: str) -> None:
    job = scene(codec, data=table(202))  # 202 = 12 × 16 + 10: the last batch is ragged
    outcomes = [job.run(workers) for workers in (1, 2, 3)]
    assert len({outcome.digest for outcome in outcomes}) == 1
    plain = Scene(data=table(202)).run(2)
    assert (outcomes[0].digest == plain.digest) == (codec == "fp32")
    assert outcomes[0].history.metrics["loss"][-1] < 1.5 and plain.history.bytes == {}


@pytest.mark.parametrize("sync", [
    *(f"allreduce:{codec}" for codec in CODECS), "server:int8", mh.Local(every=4, codec="int8"), "async:int8",
], ids=str)  # fmt: skip
def test_a_single_lane(sync: Any) -> None:
    job = Scene(data=table(202), trainer={"sync": sync}, lanes=1)
    alone, two = job.run(1), job.run(2)
    assert alone.history.metrics["loss"][-1] < 1.5
    assert alone.digest == two.digest or sync == "async:int8"


def wide() -> nn.Module:
    """Its first layer is large enough to write its gradient straight into the lane."""
    return Mlp(width=14_000)


@pytest.mark.parametrize("make_model", [Cnn, Tied, wide])
def test_buffers_seldom_used_parameters_and_large_layers(make_model: Callable[[], nn.Module]) -> None:
    assert make_model is not wide or next(wide().parameters()).nbytes >= 1 << 20
    more: dict[str, Any] = {"data": table(100), "epochs": 1}
    plain = Scene(make_model, **more).run(2).digest
    assert scene("fp32", make_model, **more).run(2).digest == plain
    lossy = {scene("int8", make_model, **more).run(workers).digest for workers in (1, 3)}
    assert len(lossy) == 1 and lossy != {plain}


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_random_kills(codec: str) -> None:
    job = scene(codec, data=table(800), epochs=4)
    expected, killer = job.run(2).digest, Killer(kills=4, first=3, last=160, seed=5)
    outcome = job.run(3, killer)
    assert killer.fired >= 3 and len(outcome.events("worker_died")) >= 3
    assert outcome.digest == expected


@dataclass(frozen=True, slots=True)
class Deadly(Int8):
    """Kills its process once, when it has sent so many frames: in the middle of a lane, with memory half written."""

    marker: str = ""
    frames: tuple[int, ...] = ()

    def encode(self, values: torch.Tensor) -> Frame:
        _frames.append(len(values))
        if len(_frames) in self.frames and first_time(f"{self.marker}-{len(_frames)}"):
            kill_self()
        return Int8.encode(self, values)


_frames: list[int] = []


@pytest.mark.parametrize("workers", [1, 3])
def test_a_death_while_a_lane_is_sent(workers: int, tmp_path: Path) -> None:
    job = scene(Deadly(marker=str(tmp_path / "dead"), frames=(3, 22, 47)), data=table(202))
    outcome = job.run(workers)
    assert len(outcome.events("worker_died")) == len(list(tmp_path.iterdir())) == 3
    assert outcome.digest == scene("int8", data=table(202)).run(2).digest


def test_pauses_and_resizes() -> None:
    job = scene("topk", data=table(800), epochs=4)

    def disturb(trainer: mh.Trainer) -> None:
        wait_until(lambda: committed(trainer) >= 20, 60)
        trainer.resize(1)
        wait_until(lambda: committed(trainer) >= 40, 60)
        trainer.resize(3)
        wait_until(lambda: len(trainer.pids) == 3 or committed(trainer) < 0, 60)
        wait_until(lambda: committed(trainer) >= 70, 60)
        assert send(next(iter(trainer.pids.values())), signal.SIGSTOP)

    outcome = scene("topk", data=table(800), epochs=4, trainer={"limits": mh.Limits(pause_s=0.2)}).run(2, disturb)
    assert outcome.events("worker_hung") and outcome.events("worker_left")
    assert outcome.digest == job.run(1).digest


class Look(mh.Callback):
    """What the lanes keep, after every step."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, state: mh.State) -> None:
        controls: Any = state.controls
        tensors = controls.memory.snapshot()
        self.kept[state.step] = {name: tensor for name, tensor in tensors.items() if name.startswith("lanes/")}

    def same(self, step: int) -> set[str]:
        """What did not change in ``step``."""
        before, after = self.kept[step], self.kept[step + 1]
        return {name for name in before if torch.equal(before[name], after[name])}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_lane_without_rows_keeps_what_it_left_out(workers: int) -> None:
    job, look = scene("int8", data=table(66), epochs=2), Look()  # the last of 5 batches has two rows for four lanes
    assert job.run(workers, callbacks=[look]).digest == job.run(2).digest
    assert len(look.kept[4]) == 16 and all(tensor.any() for tensor in look.kept[4].values())
    assert look.same(4) == {name for name in look.kept[4] if name.startswith(("lanes/2/", "lanes/3/"))}
    assert look.same(5) == set()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_skipped_step_changes_nothing_that_lanes_keep(workers: int) -> None:
    x, y = table(160)
    x[77, 0] = math.nan
    job, look = scene("int8", data=(x, y), epochs=2, trainer={"nan": "skip"}), Look()
    outcome = job.run(workers, callbacks=[look])
    assert outcome.digest == job.run(2).digest
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.model.state_dict().values())
    bad = [10 * epoch + epoch_order(0, epoch, 160).tolist().index(77) // 16 for epoch in range(2)]
    assert 0 not in bad, "the callback sees no step before the first"
    assert [step for step in range(1, 20) if look.same(step) == look.kept[step].keys()] == bad


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_gradients_are_never_loose(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the codec keeps nothing: what is encoded lies in the arena."""
    made: list[state.ModelState] = []
    init = state.ModelState.__init__

    def remember(self: state.ModelState, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(state.ModelState, "__init__", remember)
    scene(codec, data=table(32), epochs=1).run(1)
    Scene(data=table(32), epochs=1).run(1)
    assert [memory.arena.spec.keeps for memory in made] == [False, True]
