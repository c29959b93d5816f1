"""Gradients that lanes leave as factors: the bits of whole gradients, whoever makes the products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.sync.apply import Applier
from manyhands.sync.factors import factors_in, pay, put_factors, rows_together
from manyhands.sync.optimizer_state import hyper_row
from manyhands.train.replica import Replica
from manyhands.train.state import ModelState, Needs

SHAPES = [(2048, 2048), (2048, 784), (800, 800), (6000, 100), (1000, 1500), (3000, 777)]
SAMPLES = [2, 3, 5, 16, 64, 128]


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_sum_of_products_have_the_bits_of_the_whole(shape: tuple[int, int], samples: int) -> None:
    """What all of this rests on; a kernel for which it does not hold must be found here."""
    outputs, inputs = shape
    random = torch.Generator().manual_seed(samples)
    pairs = [[torch.randn(samples, n, generator=random) for n in (outputs, inputs)] for _ in range(3)]
    total = pairs[0][0].t() @ pairs[0][1]
    for left, right in pairs[1:]:
        total += left.t() @ right
    rows = rows_together(shape)
    assert rows
    for first in range(0, outputs, rows):
        part = slice(first, first + rows)
        found = pairs[0][0][:, part].t() @ pairs[0][1]
        for left, right in pairs[1:]:
            found.addmm_(left[:, part].t(), right)
        assert torch.equal(found, total[part])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_of_whole_rows_and_fits_into_the_cache(shape: tuple[int, int]) -> None:
    rows = rows_together(shape)
    assert rows % 16 == 0 and rows >= 32
    assert rows * shape[1] * 4 <= 1 << 20


def test_rows_that_are_too_long_are_not_cut() -> None:
    assert rows_together((100, 100_000)) == 0


@pytest.mark.parametrize("shape, samples, wanted", [
    ((800, 800), 0, False), ((800, 800), 1, False), ((800, 800), 2, True), ((800, 800), 199, False),
    ((4096, 4096), 129, False), ((9000, 64), 64, False), ((9000, 64), 16, True),
])  # fmt: skip
def test_when_it_pays(shape: tuple[int, int], samples: int, wanted: bool) -> None:
    assert pay(shape, samples) is wanted


@pytest.mark.parametrize("samples", [1, 3, 64])
def test_factors_lie_where_the_gradient_would(samples: int) -> None:
    home = torch.full((301, 203), 7.0)
    given = torch.randn(samples, 301), torch.randn(samples, 203)
    put_factors(home, *given)
    found = factors_in(home, samples)
    assert all(torch.equal(one, other) for one, other in zip(found, given, strict=True))
    assert all(factor.data_ptr() - home.data_ptr() < home.nbytes // 2 for factor in found)
    assert (found[1].data_ptr() - home.data_ptr()) % 64 == 0


class Step:
    """One step of a model with a large layer over three lanes, applied by ``slots`` workers."""

    def __init__(self, lanes: Sequence[int], *, factors: Sequence[bool], slots: int = 1) -> None:
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(800, 900), nn.Tanh(), nn.Linear(900, 5))
        optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        needs = Needs(factors=any(factors))
        self.state = ModelState(self.model, optimizer, needs, lanes=len(lanes), samples=0, stats=1, ring=1)
        self.arena = self.state.arena
        template = self.state.template
        assert template is not None
        for lane, rows in enumerate(lanes):
            self.leave(lane, rows, factors[lane])
        row = np.array(hyper_row(optimizer, template.hyper))
        owners = np.arange(len(self.arena.spec.units)) % slots
        for slot in reversed(range(slots)):
            applier = Applier(self.arena, template, (), slot)
            applier.begin_step(row, range(len(lanes)))
            for run in applier.batches(np.flatnonzero(owners == slot).tolist()):
                applier.apply(run, range(len(lanes)), 0, 0.0)

    def leave(self, lane: int, rows: int, factors: bool) -> None:
        torch.manual_seed(lane)
        model = nn.Sequential(nn.Linear(800, 900), nn.Tanh(), nn.Linear(900, 5))
        replica = Replica(self.arena, model, ours=True, factors=factors)
        replica.begin(lane)
        replica.backward(model(torch.randn(rows, 800)).square().mean(), 1 / 3)
        replica.end(lane)

    def outcome(self) -> bytes:
        found = b"".join(value.numpy().tobytes() for value in self.arena.parameters())
        self.arena.close()
        return found


@pytest.mark.parametrize("lanes", [(8,), (8, 8, 8), (8, 3, 1), (8, 200, 8)], ids=str)
def test_a_step_has_the_bits_of_one_with_whole_gradients(lanes: tuple[int, ...]) -> None:
    """Also where a lane has too many rows for factors."""
    plain = Step(lanes, factors=[False] * len(lanes))
    assert not plain.arena.spec.factored
    expected = plain.outcome()
    step = Step(lanes, factors=[True] * len(lanes))
    assert step.arena.spec.factored == [0]
    assert [bool(rows) for rows in step.arena.factor_rows[:, 0]] == [1 < rows <= 128 for rows in lanes]
    assert step.outcome() == expected
    assert Step(lanes, factors=[True] * len(lanes), slots=3).outcome() == expected
    mixed = Step(lanes, factors=[True, False, True][: len(lanes)], slots=2)
    assert mixed.outcome() == expected


def test_a_layer_that_is_used_twice_has_its_gradient_made_at_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.inner = nn.Linear(800, 800)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.inner(torch.tanh(self.inner(x))))

    model, plain = Twice(), Twice()
    state = ModelState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Needs(factors=True), lanes=1, samples=0, stats=1, ring=1
    )
    x = torch.randn(6, 800)
    replica = Replica(state.arena, model, ours=True, factors=True)
    replica.begin(0)
    replica.backward(model(x).square().mean(), 1.0)
    replica.end(0)
    plain(x).square().mean().backward()
    assert state.arena.spec.factored == [0]
    assert not state.arena.factor_rows[0, 0]
    assert plain.inner.weight.grad is not None
    assert torch.allclose(state.arena.gradients(0)[0], plain.inner.weight.grad, rtol=1e-5, atol=1e-9)
    state.arena.close()
