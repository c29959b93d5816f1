"""Clipping against torch's own, and the words it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rig import Rig
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from manyhands.errors import UsageError
from manyhands.sync.clip import Clip, ClipNorm, ClipValue, resolve_clip


def clipped_step(rig: Rig, scale: float, cut: Any) -> None:
    """A step of the arena, and the same with torch's clipping on whole tensors."""
    gradients = rig.fill_lanes(scale)
    for parameter, gradient in zip(rig.plain, gradients, strict=True):
        parameter.grad = gradient
    cut(rig.plain)
    rig.reference.step()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_by_norm_like_torch_and_the_same_for_any_owners(slots: int, scale: float) -> None:
    """With the small scale the norm is below the limit, and nothing may change."""
    rig = Rig(sgd, clips=[ClipNorm(2.0)], slots=slots)
    clipped_step(rig, scale, lambda parameters: clip_grad_norm_(parameters, 2.0))
    rig.apply(0)
    for mine, theirs in zip(rig.values(), rig.plain, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7)
    rig.close()


def test_the_norm_does_not_depend_on_who_owns_what() -> None:
    norms = set()
    for slots in (1, 2, 3, 7):
        rig = Rig(sgd, clips=[ClipNorm(1.0)], slots=slots)
        gradients = rig.fill_lanes()
        rig.apply(0)
        norms.add(rig.appliers[0].total_norm())
        rig.close()
    assert len(norms) == 1
    whole = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    assert norms.pop() == pytest.approx(float(whole), rel=1e-6)


def test_by_value_is_torch_bit_for_bit() -> None:
    rig = Rig(sgd, clips=[ClipValue(0.5)], slots=2)
    clipped_step(rig, 1.0, lambda parameters: clip_grad_value_(parameters, 0.5))
    rig.apply(0)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(rig.values(), rig.plain, strict=True))
    rig.close()


def test_a_chain_is_applied_in_its_order() -> None:
    rig = Rig(sgd, clips=resolve_clip([ClipNorm(50.0), ClipValue(0.05)]), slots=2)

    def cut(parameters: Any) -> None:
        clip_grad_norm_(parameters, 50.0)
        clip_grad_value_(parameters, 0.05)

    clipped_step(rig, 1.0, cut)
    rig.apply(0)
    for mine, theirs in zip(rig.values(), rig.plain, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7)
    rig.close()


def test_a_parameter_that_no_lane_touched_does_not_count_in_the_norm() -> None:
    rig = Rig(sgd, clips=[ClipNorm(1.0)])
    rig.fill_lanes()
    for lane in rig.lanes:
        rig.arena.gradients(lane)[0].zero_()  # as the lanes leave it
        rig.arena.present[lane, 0] = 0
    for index, parameter in enumerate(rig.plain):
        parameter.grad = None if index == 0 else sum(rig.arena.gradients(lane)[index] for lane in rig.lanes)  # type: ignore[assignment]
    clip_grad_norm_(rig.plain, 1.0)
    rig.reference.step()
    rig.apply(0)
    for mine, theirs in zip(rig.values(), rig.plain, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7)
    rig.close()


def test_what_is_accepted() -> None:
    assert resolve_clip(None) == ()
    assert resolve_clip(2) == (ClipNorm(2.0),)
    assert resolve_clip(ClipValue(0.1)) == (ClipValue(0.1),)
    assert resolve_clip([ClipNorm(1.0), ClipValue(0.1)]) == (ClipNorm(1.0), ClipValue(0.1))
    assert isinstance(ClipNorm(1.0), Clip)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), True, "norm", [1.0], [ClipValue(1.0), ClipNorm(1.0)]])
def test_what_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"valid|must come first"):
        resolve_clip(wrong)
