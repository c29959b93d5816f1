"""The apply phase against torch's optimizer on whole tensors: the same bits, whoever owns which units."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from rig import SHAPES, Factory, Rig

from manyhands.comm.arena import lay_out
from manyhands.errors import ModelError
from manyhands.sync.outer import WarmNesterov
from manyhands.sync.units import UNIT_BYTES, cut_units

optim = torch.optim

ELEMENTWISE: dict[str, Factory] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "Adam maximize": lambda p: optim.Adam(p, lr=0.01, maximize=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "NAdam": lambda p: optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, t0=2),
    "Rprop": lambda p: optim.Rprop(p),
    "WarmNesterov": lambda p: WarmNesterov(p, lr=0.8, momentum=0.3),
}
MATRICES = [((30, 40), torch.float32), ((9, 3), torch.float32), ((200, 300), torch.float32)]
WHOLE: dict[str, tuple[Factory, list[Any]]] = {
    "Adafactor": (lambda p: optim.Adafactor(p, lr=0.1), [*MATRICES, ((17,), torch.float32)]),
    "Muon": (lambda p: optim.Muon(p, lr=0.1), MATRICES),
}


def same(rig: Rig) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(rig.values(), rig.plain, strict=True))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_cut_into_units_it_is_the_whole_step_bit_for_bit(name: str) -> None:
    """Three owners, who change after every step; the state goes with the units."""
    rig = Rig(ELEMENTWISE[name], slots=3)
    units = len(rig.arena.spec.units)
    assert units > len(SHAPES), "nothing was cut"
    chance = np.random.default_rng(0)
    for step in range(5):
        rig.step_reference(rig.fill_lanes())
        rig.apply(step)
        assert same(rig), f"step {step}"
        assert (rig.arena.control.unit_done == step + 1).all()
        rig.give_away(chance.integers(0, 3, units))
    rig.close()


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_needs_whole_tensors_gets_them(name: str) -> None:
    factory, shapes = WHOLE[name]
    rig = Rig(factory, slots=2, shapes=shapes)
    assert len(rig.arena.spec.units) == len(shapes)
    for step in range(4):
        rig.step_reference(rig.fill_lanes())
        rig.apply(step)
        assert same(rig), f"step {step}"
        rig.give_away([(unit + step) % 2 for unit in range(len(shapes))])
    rig.close()


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_lanes_are_added_in_their_order(lanes: int) -> None:
    rig = Rig(ELEMENTWISE["Adam"], lanes=lanes)
    for step in range(2):
        rig.step_reference(rig.fill_lanes())
        rig.apply(step)
        assert same(rig)
    rig.close()


def test_the_gradients_of_the_lanes_stay_so_that_it_can_be_done_again() -> None:
    for clips in ((), (lambda gradient, norm: gradient.mul_(0.5),)):
        rig = Rig(ELEMENTWISE["SGD"], clips=[_Clip()] if clips else ())
        rig.fill_lanes()
        before = [rig.arena.lane(lane).clone() for lane in rig.lanes]
        rig.apply(0)
        assert all(torch.equal(rig.arena.lane(lane), before[lane]) for lane in rig.lanes)
        rig.close()


class _Clip:
    needs_norm = False

    def __call__(self, gradient: torch.Tensor, norm: float) -> None:
        gradient.mul_(0.5)


def test_a_lane_without_rows_is_left_out() -> None:
    rig = Rig(ELEMENTWISE["SGD"], lanes=3)
    rig.fill_lanes()
    expected = [one + other for one, other in zip(rig.arena.gradients(0), rig.arena.gradients(1), strict=True)]
    rig.lanes = range(2)
    rig.step_reference(expected)
    rig.apply(0)
    assert same(rig)
    rig.close()


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AdamW fused"])
def test_a_parameter_that_no_lane_touched_is_left_alone(name: str) -> None:
    """As in plain PyTorch: no weight decay, no moments, no step count; the others go on."""
    rig = Rig(ELEMENTWISE[name], slots=2)
    for step, missing in enumerate([{2}, {0, 2}, set(), {2}]):
        gradients: list[torch.Tensor | None] = list(rig.fill_lanes())
        for index in missing:
            rig.arena.present[:, index] = 0
            gradients[index] = None
        if step == 2:  # one lane alone is enough, the other left zeros
            rig.arena.present[0, 2] = 0
            rig.arena.gradients(0)[2].zero_()
            gradients[2] = rig.arena.gradients(1)[2].clone()
        rig.step_reference(gradients)
        rig.apply(step)
        assert same(rig), f"step {step}"
    rig.close()


def test_groups_and_rates_that_change() -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        return optim.Adam(
            [{"params": parameters[:2], "lr": 0.5, "betas": (0.5, 0.9)}, {"params": parameters[2:]}], lr=0.01
        )

    rig = Rig(factory, slots=2)
    for step in range(4):
        for optimizer in (rig.optimizer, rig.reference):
            optimizer.param_groups[0]["lr"] *= 0.7
            optimizer.param_groups[1]["betas"] = (0.9 - 0.1 * step, 0.99)
        rig.step_reference(rig.fill_lanes())
        rig.apply(step)
        assert same(rig), f"step {step}"
    rig.close()


def test_parameters_without_dimensions_have_state_like_all_others() -> None:
    """A learned scale is one number beside matrices."""
    shapes = [((), torch.float32), ((40, 3), torch.float32), ((), torch.float64)]
    for name in ("SGD momentum", "Adam", "RMSprop", "Rprop"):
        rig = Rig(ELEMENTWISE[name], slots=2, shapes=shapes)
        for step in range(3):
            rig.step_reference(rig.fill_lanes())
            rig.apply(step)
            assert same(rig), f"{name}, step {step}"
            rig.give_away([(unit + step) % 2 for unit in range(len(rig.arena.spec.units))])
        rig.close()


def test_an_optimizer_of_the_users_own() -> None:
    class Signs(torch.optim.Optimizer):
        """Keeps a sum of signs and a list of the sizes of its gradients' rows."""

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state["signs"] = torch.zeros_like(parameter)
                        state["rows"] = torch.zeros(parameter.shape[0])
                    state["signs"] += parameter.grad.sign()
                    state["rows"] += parameter.grad.flatten(1).norm(dim=1) if parameter.dim() > 1 else parameter.grad
                    parameter -= group["lr"] * state["signs"] * (1 + state["rows"].mean())

    rig = Rig(lambda p: Signs(p), slots=2, shapes=[((40, 30), torch.float32), ((9,), torch.float32)])
    for step in range(3):
        rig.step_reference(rig.fill_lanes())
        rig.apply(step)
        assert same(rig), f"step {step}"
        rig.give_away([step % 2, 1])
    rig.close()


def test_an_optimizer_that_replaces_its_state_instead_of_changing_it() -> None:
    """``state["m"] = ...`` in place of ``state["m"].add_(...)``: as common in optimizers that users write."""

    class Replacing(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["mean"] = 0.5 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                    state["step"] = state.get("step", 0) + 1
                    parameter -= group["lr"] / state["step"] * state["mean"]

    rig = Rig(lambda p: Replacing(p), slots=2, shapes=[((40, 30), torch.float32), ((9,), torch.float32)])
    for step in range(4):
        rig.step_reference(rig.fill_lanes())
        rig.apply(step)
        for mine, theirs in zip(rig.values(), rig.plain, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6, msg=f"step {step}")
        rig.give_away([step % 2, 1])
    rig.close()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says so whatever is asked for
def test_sparse_adam() -> None:
    rig = Rig(lambda p: optim.SparseAdam(p, lr=0.1), lanes=1, shapes=[((50, 4), torch.float32)])
    for step in range(3):
        gradient = rig.arena.gradients(0)[0].zero_()
        gradient[step : step + 7] = torch.randn(7, 4, generator=rig.random)
        rig.arena.present[0] = 1
        rows = torch.arange(step, step + 7)
        values = gradient[rows].clone()
        rig.step_reference([torch.sparse_coo_tensor(rows[None], values, gradient.shape, check_invariants=True)])
        rig.apply(step)
        # It counts its steps in double precision where the table of numbers has single precision.
        torch.testing.assert_close(rig.values()[0], rig.plain[0].detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(rig.values()[0][step + 7 :], rig.plain[0][step + 7 :]), "rows without a gradient moved"
    rig.close()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_adam_moves_vectors() -> None:
    """Each number of a vector is a row of its own."""
    rig = Rig(lambda p: optim.SparseAdam(p, lr=0.1), lanes=2, shapes=[((50, 4), torch.float32), ((9,), torch.float32)])
    for step in range(3):
        rig.step_reference([gradient.to_sparse(1) for gradient in rig.fill_lanes()])
        rig.apply(step)
        for mine, theirs in zip(rig.values(), rig.plain, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5, msg=f"step {step}")
    rig.close()


def test_sparse_adam_refuses_a_number_alone() -> None:
    with pytest.raises(ModelError, match=r"SparseAdam received '0', .*torch\.zeros\(1\)"):
        Rig(lambda p: optim.SparseAdam(p, lr=0.1), shapes=[((), torch.float32)])


def test_units_cover_every_byte_once_and_do_not_depend_on_owners() -> None:
    entries = lay_out([(str(i), torch.empty(shape, dtype=dtype)) for i, (shape, dtype) in enumerate(SHAPES)])
    for elementwise in (True, False):
        units = cut_units(entries, elementwise)
        for index, entry in enumerate(entries):
            mine = [unit for unit in units if unit.parameter == index]
            assert mine[0].start == entry.offset and mine[-1].stop == entry.offset + entry.size_bytes
            assert all(one.stop == other.start for one, other in itertools.pairwise(mine))
            assert all(unit.stop - unit.start <= UNIT_BYTES for unit in mine) or not elementwise
    assert cut_units(lay_out([("none", torch.zeros(0, 3))]), True) == []
