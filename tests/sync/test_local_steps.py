"""The steps within a share against torch's optimizer beside it, and what a share keeps from round to round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rig import SHAPES, Factory, make_parameters
from torch import nn

from manyhands.sync.clip import ClipNorm, ClipValue
from manyhands.sync.local import Inner
from manyhands.sync.optimizer_state import hyper_row
from manyhands.train.local import LocalState
from manyhands.train.optimizers import optimizer

optim = torch.optim
LANES = 2
OPTIMIZERS: dict[str, Factory] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD plain momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "NAdam": lambda p: optim.NAdam(p, decoupled_weight_decay=True),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, t0=2),
    "Rprop": lambda p: optim.Rprop(p),
}


class Bench:
    """The arena of a local run, one worker's hands on it, and a plain optimizer for each share."""

    def __init__(self, factory: Factory, clips: Any = ()) -> None:
        self.model = nn.ParameterList(make_parameters(SHAPES))
        self.optimizer = factory(list(self.model.parameters()))
        self.state = LocalState(
            self.model, self.optimizer, optimizer("sgd", lr=1.0), lanes=LANES, samples=0, stats=1, ring=1
        )
        self.arena, self.clips = self.state.arena, clips
        self.worker = self.hands()
        self.plain = [make_parameters(SHAPES) for _ in range(LANES)]
        self.references = [factory(plain) for plain in self.plain]
        self.random = torch.Generator().manual_seed(1)

    def hands(self) -> Inner:
        """Of one more worker."""
        return Inner(self.arena, self.state.inner, self.state.scalars, self.clips, self.arena.parameters())

    def gradients(self, left_out: int | None = None) -> list[torch.Tensor | None]:
        drawn = [torch.randn(p.shape, generator=self.random).to(p.dtype) for p in self.plain[0]]
        return [None if index == left_out else gradient for index, gradient in enumerate(drawn)]

    def share(self, worker: Inner, step: int, lane: int, gradients: list[list[torch.Tensor | None]]) -> None:
        """What ``worker`` does for a share in a round."""
        worker.begin(step, lane)
        row = np.array(hyper_row(self.optimizer, self.state.hyper))
        for one in gradients:
            worker.step(row, [None if g is None else g.clone() for g in one])
        worker.end(step, lane, 1, 4)

    def same(self, worker: Inner, lane: int) -> bool:
        return all(torch.equal(mine, theirs) for mine, theirs in zip(worker.parameters, self.plain[lane], strict=True))

    def restart(self, lane: int) -> None:
        """The reference also begins each round from the agreed parameters."""
        with torch.no_grad():
            for parameter, agreed in zip(self.plain[lane], self.arena.parameters(), strict=True):
                parameter.copy_(agreed)


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.arena.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_share_is_torchs_optimizer_bit_for_bit_whoever_computes_it(name: str, benches: list[Bench]) -> None:
    """Shares have states of their own, a new worker takes each round, and one parameter begins late."""
    benches.append(bench := Bench(OPTIMIZERS[name]))
    for step in range(4):
        for lane in range(LANES):
            bench.restart(lane)
            rounds = [bench.gradients(left_out=3 if step < 2 else None) for _ in range(3)]
            for one in rounds:
                for parameter, gradient in zip(bench.plain[lane], one, strict=True):
                    parameter.grad = gradient
                bench.references[lane].step()
            worker = bench.hands()
            bench.share(worker, step, lane, rounds)
            assert bench.same(worker, lane), f"round {step}, share {lane}"
            assert worker.touched == [index != 3 or step >= 2 for index in range(len(SHAPES))]


def test_a_parameter_may_begin_late_where_torchs_fused_step_fails(benches: list[Bench]) -> None:
    benches.append(bench := Bench(lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True)))
    benches.append(plain := Bench(OPTIMIZERS["SGD plain momentum"]))
    rounds = [bench.gradients(left_out=3), bench.gradients()]
    for one in (bench, plain):
        one.share(one.worker, 0, 0, rounds)
    for mine, theirs in zip(bench.worker.parameters, plain.worker.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_a_share_can_be_computed_again_after_a_death_in_it(benches: list[Bench]) -> None:
    benches.append(bench := Bench(OPTIMIZERS["AdamW fused"]))
    bench.share(bench.worker, 0, 1, [bench.gradients()])
    rounds = [bench.gradients() for _ in range(3)]
    bench.share(bench.worker, 1, 1, rounds)
    expected = [tensor.clone() for tensor in bench.worker.parameters]
    kept = [{key: value.clone() for key, value in state.items()} for state in bench.state._shares.read(2, 1)]
    dead = bench.hands()  # as far as the second step of the round, and then no further
    dead.begin(1, 1)
    dead.step(np.array(hyper_row(bench.optimizer, bench.state.hyper)), bench.gradients())
    heir = bench.hands()
    bench.share(heir, 1, 1, rounds)
    assert all(torch.equal(a, b) for a, b in zip(heir.parameters, expected, strict=True))
    for before, after in zip(kept, bench.state._shares.read(2, 1), strict=True):
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_a_share_without_rows_keeps_its_state(benches: list[Bench]) -> None:
    benches.append(bench := Bench(OPTIMIZERS["Adam amsgrad"]))
    bench.share(bench.worker, 0, 0, [bench.gradients()])
    bench.arena.carry_over(1, 0)
    before, after = bench.state._shares.read(1, 0), bench.state._shares.read(2, 0)
    assert all(state["step"] == 1 for state in before)
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[key], new[key]) and old[key] is not new[key] for key in old)
    assert bench.state._shares.read(1, 1) == [{}] * len(SHAPES), "the other share has none"


def test_gradients_are_clipped_within_the_share(benches: list[Bench]) -> None:
    benches.append(bench := Bench(OPTIMIZERS["SGD"], [ClipNorm(0.5), ClipValue(0.01)]))
    one = bench.gradients(left_out=2)
    flat = torch.cat([g.double().flatten() for g in one if g is not None])
    for parameter, gradient in zip(bench.plain[0], one, strict=True):
        parameter.grad = None if gradient is None else (gradient * (0.5 / float(flat.norm()))).clamp(-0.01, 0.01)
    bench.references[0].step()
    bench.share(bench.worker, 0, 0, [one])
    for mine, theirs in zip(bench.worker.parameters, bench.plain[0], strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-7)


def test_the_change_points_away_from_the_aim_and_is_weighted(benches: list[Bench]) -> None:
    benches.append(bench := Bench(OPTIMIZERS["SGD"]))
    one = bench.gradients()
    bench.share(bench.worker, 0, 0, [one])
    for index, gradient in enumerate(one):
        assert gradient is not None
        out = torch.empty_like(gradient)
        bench.worker.change(index, out)
        torch.testing.assert_close(out, 0.1 * 0.25 * gradient, rtol=1e-3, atol=1e-6)


def test_the_users_optimizer_gets_the_mean_back_and_gives_it_to_every_share(benches: list[Bench]) -> None:
    benches.append(bench := Bench(OPTIMIZERS["SGD momentum"]))
    for lane in range(LANES):
        bench.share(bench.worker, 0, lane, [bench.gradients()])
    bench.arena.control.commit(1, 0)
    bench.state.copy_out_optimizer(bench.model, bench.optimizer)
    shares = [bench.state._shares.read(1, lane) for lane in range(LANES)]
    for index, parameter in enumerate(bench.model.parameters()):
        mean = (shares[0][index]["momentum_buffer"] + shares[1][index]["momentum_buffer"]) / 2
        assert torch.equal(bench.optimizer.state[parameter]["momentum_buffer"], mean)
    again = LocalState(bench.model, bench.optimizer, optimizer("sgd", lr=1.0), lanes=3, samples=0, stats=1, ring=1)
    for lane in range(3):
        for index, parameter in enumerate(bench.model.parameters()):
            given = again._shares.read(0, lane)[index]["momentum_buffer"]
            assert torch.equal(given, bench.optimizer.state[parameter]["momentum_buffer"])
    again.arena.close()
