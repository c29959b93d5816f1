"""Two sides that move towards each other, in the arena: against the formula, and when a death makes it happen again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.sync.apply import Applier
from manyhands.sync.mixing import mix_with
from manyhands.sync.undo import recover
from manyhands.train.state import ModelState, Needs

# The first optimizer of a process makes torch import its compiler, which sets an environment variable: before a test.
torch.optim.SGD([nn.Parameter(torch.zeros(1))])

SLOT, SERVER = 3, 64


class Side:
    """An arena in which the worker of ``SLOT`` has brought its parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(800, 500), nn.Linear(7, 3))
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        state = ModelState(model, plain, Needs(exchange=True, servers=1), lanes=1, samples=0, stats=1, ring=1)
        assert state.template is not None
        state.template.hyper = []  # no schedule is about these steps
        self.arena: Arena = state.arena
        self.applier = Applier(self.arena, state.template, (), SERVER)
        self.runs = self.applier.batches(range(len(self.arena.spec.units)))
        self.brought = [torch.randn_like(tensor) for tensor in self.arena.parameters()]
        for place, tensor in zip(self.arena.gradients(SLOT), self.brought, strict=True):
            place.copy_(tensor)
        self.arena.present[SLOT] = 1
        self.before = [tensor.clone() for tensor in self.arena.parameters()]

    def mix(self, beta: float, runs: list[tuple[int, int]]) -> None:
        self.applier.begin_step(self.arena.hyper[0], [SLOT])
        for run in runs:
            self.applier.apply(run, [SLOT], 0, 0.0, mix_with(self.arena, SLOT, beta))

    def check(self, beta: float) -> None:
        sides = zip(self.before, self.brought, self.arena.parameters(), self.arena.pulled(SLOT), strict=True)
        for centre, own, live, pulled in sides:
            torch.testing.assert_close(live, (1 - beta) * centre + beta * own)
            torch.testing.assert_close(pulled, (1 - beta) * own + beta * centre)


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    yield side
    side.arena.close()


@settings(max_examples=20, deadline=None)
@given(st.floats(0.001, 0.999))
def test_both_move_by_beta_of_the_way(beta: float) -> None:
    side = Side()
    side.mix(beta, side.runs)
    side.check(beta)
    side.arena.close()


def test_what_was_brought_stays_as_it_is(side: Side) -> None:
    side.mix(0.4, side.runs)
    for place, tensor in zip(side.arena.gradients(SLOT), side.brought, strict=True):
        assert torch.equal(place, tensor)


def test_a_death_in_the_middle_is_undone_and_done_again_to_the_same_values(side: Side) -> None:
    assert len(side.runs) > 1
    side.mix(0.4, side.runs[:1])

    def torn(gradient: torch.Tensor, start: int, present: np.ndarray) -> None:
        """Both sides are changed, and nobody has said that it is done."""
        mix_with(side.arena, SLOT, 0.4)(gradient, start, present)
        side.arena.plane(0)[start : start + gradient.nbytes].view(gradient.dtype).fill_(7)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side.applier.apply(side.runs[1], [SLOT], 0, 0.0, torn)
    assert recover(side.arena, SERVER)
    done = side.arena.control.unit_done
    left = [run for run in side.runs if done[run[0]] != 1]
    assert left == side.runs[1:]
    side.mix(0.4, left)
    side.check(0.4)
