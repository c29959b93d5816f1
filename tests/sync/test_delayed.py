"""Delayed Nesterov against its formula, against Nesterov, and in pieces."""

from __future__ import annotations

import pytest
import torch
from rig import Rig
from torch import nn

from manyhands.sync.delayed import DelayedNesterov

RATE, MOMENTUM = 0.6, 0.8


def vector(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((5,), value, dtype=torch.float64))


def changes(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_it_is_the_formula_of_the_paper(delay: int) -> None:
    parameter = vector()
    optimizer = DelayedNesterov([parameter], lr=RATE, momentum=MOMENTUM, delay=delay)
    expected, buffer, gathered = parameter.detach().clone(), torch.zeros(5), torch.zeros(5)
    for number, change in enumerate(changes(8), start=1):
        gathered = gathered + change
        if number % delay == 0:
            buffer = MOMENTUM * buffer + gathered / delay
            expected = expected - RATE * (MOMENTUM * buffer + change / delay)
            gathered = torch.zeros(5)
        else:
            expected = expected - RATE * change / delay
        parameter.grad = change
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("delay", [1, 4])
def test_changes_that_come_together_make_a_step_of_nesterov_with_their_mean(delay: int) -> None:
    one, other = vector(), vector()
    delayed = DelayedNesterov([one], lr=RATE, momentum=MOMENTUM, delay=delay)
    nesterov = torch.optim.SGD([other], lr=RATE, momentum=MOMENTUM, nesterov=True)
    found = changes(3 * delay)
    for first in range(0, len(found), delay):
        for change in found[first : first + delay]:
            one.grad = change
            delayed.step()
        other.grad = torch.stack(found[first : first + delay]).mean(0)
        nesterov.step()
        torch.testing.assert_close(one, other)


def test_cut_into_units_it_is_the_same_bit_for_bit() -> None:
    """Also for a parameter whose first change comes later than those of the others."""
    rig = Rig(lambda params: DelayedNesterov(params, lr=RATE, momentum=MOMENTUM, delay=3), slots=2)
    assert len(rig.arena.spec.units) > len(rig.arena.spec.parameters), "nothing was cut"
    for step in range(8):
        total: list[torch.Tensor | None] = list(rig.fill_lanes())
        if step < 2:
            rig.arena.present[:, 2], total[2] = 0, None
        rig.apply(step)
        rig.step_reference(total)
        if step == 4:
            rig.give_away([1 - owner for owner in rig.owners])
    for mine, theirs in zip(rig.values(), rig.plain, strict=True):
        assert torch.equal(mine, theirs.detach())
    rig.close()
