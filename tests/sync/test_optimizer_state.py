"""Taking optimizers apart: what state they keep is found out, what they are told is kept."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import pytest
import torch
from rig import make_parameters
from torch import nn
from torch.optim import lr_scheduler

from manyhands.comm.arena import lay_out
from manyhands.errors import ModelError
from manyhands.sync.optimizer_state import StateLayout, Template, hyper_row, layout_of, template_of

SHAPES = [((6, 4), torch.float32), ((5,), torch.float32), ((2, 3, 4), torch.bfloat16)]


def take_apart(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> tuple[Template, StateLayout]:
    template = template_of(optimizer, parameters)
    return template, layout_of(template, lay_out([(str(i), p) for i, p in enumerate(parameters)]))


STATE: dict[str, tuple[Any, list[str], list[str]]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), [], []),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ["momentum_buffer"], []),
    "Adam": (lambda p: torch.optim.Adam(p), ["exp_avg", "exp_avg_sq"], ["step"]),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], ["step"]),
    "Adagrad": (lambda p: torch.optim.Adagrad(p), ["sum"], ["step"]),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, centered=True), ["grad_avg", "square_avg"], ["step"]),
    "NAdam": (lambda p: torch.optim.NAdam(p), ["exp_avg", "exp_avg_sq"], ["mu_product", "step"]),
    "ASGD": (lambda p: torch.optim.ASGD(p), ["ax"], ["eta", "mu", "step"]),
}


@pytest.mark.parametrize("name", STATE)
def test_the_state_is_found(name: str) -> None:
    build, planes, scalars = STATE[name]
    parameters = make_parameters(SHAPES)
    template, layout = take_apart(build(parameters), parameters)
    assert (sorted(layout.planes), sorted(layout.scalars), layout.extras) == (planes, scalars, [])
    assert template.elementwise
    assert all(parameter.grad is None for parameter in parameters), "the trial step touched the user's parameters"


def test_state_of_another_shape_lies_beside() -> None:
    parameters = make_parameters([((6, 4), torch.float32), ((5,), torch.float32)])
    template, layout = take_apart(torch.optim.Adafactor(parameters), parameters)
    assert not template.elementwise
    assert {(e.parameter, e.key, e.shape) for e in layout.extras} == {(0, "row_var", (6, 1)), (0, "col_var", (1, 4))}
    assert layout.planes == ["variance"]
    offsets = sorted(e.offset for e in layout.extras)
    assert offsets[1] - offsets[0] >= 24 and all(offset % 64 == 0 for offset in offsets)


def test_state_of_a_number_lies_in_a_plane_like_that_of_a_matrix() -> None:
    parameters = make_parameters([((), torch.float32), ((6, 4), torch.float32)])
    _, layout = take_apart(torch.optim.Adam(parameters), parameters)
    assert (sorted(layout.planes), layout.scalars) == (["exp_avg", "exp_avg_sq"], ["step"])


def test_state_of_a_fixed_size_is_not_taken_for_a_dimension_of_the_parameter() -> None:
    class Fixed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = {"ends": torch.zeros(2), "corners": torch.zeros(len(parameter), 3)}

    parameters = make_parameters([((6, 4), torch.float32)])
    _, layout = take_apart(Fixed(parameters, lr=0.1), parameters)
    assert {(e.key, e.shape) for e in layout.extras} == {("ends", (2,)), ("corners", (6, 3))}


def test_a_built_copy_has_the_groups_and_makes_the_same_step() -> None:
    parameters, others = make_parameters(SHAPES), make_parameters(SHAPES)
    groups = [
        {"params": parameters[:1], "lr": 0.5, "weight_decay": 0.1},
        {"params": parameters[1:], "betas": (0.5, 0.6)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    template = template_of(optimizer, parameters)
    assert template.group_of == [0, 1, 1]
    built = template.build(list(zip(template.group_of, others, strict=True)))
    for one, other in zip(parameters, others, strict=True):
        one.grad = torch.ones_like(one)
        other.grad = torch.ones_like(other)
    optimizer.step()
    with torch.no_grad():
        template.step(built)
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))


def test_the_numbers_of_a_step_can_be_read_and_given() -> None:
    parameters = make_parameters(SHAPES)
    optimizer = torch.optim.Adam(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": torch.tensor(0.25)}], lr=1
    )
    template = template_of(optimizer, parameters)
    row = hyper_row(optimizer, template.hyper)
    named = {(key.group, key.key, key.index): value for key, value in zip(template.hyper, row, strict=True)}
    assert named[0, "lr", None] == 1.0 and named[1, "lr", None] == 0.25
    assert (named[0, "betas", 0], named[0, "betas", 1]) == (0.9, 0.999)
    built = template.build([(0, parameters[0])])
    template.set_hyper(built, [value / 2 for value in row])
    assert built.param_groups[0]["lr"] == 0.5 and built.param_groups[0]["betas"] == (0.45, 0.4995)
    assert built.param_groups[1]["lr"] == 0.125
    assert template.groups[0]["betas"] == (0.9, 0.999), "the template itself must stay"


@pytest.mark.parametrize("kind", [lr_scheduler.ExponentialLR, lr_scheduler.CosineAnnealingLR])
def test_an_optimizer_that_a_scheduler_is_bound_to_can_be_sent(kind: Any) -> None:
    """A scheduler puts a wrapper around step() on the instance, and the wrapper holds a weak reference."""
    parameters = make_parameters(SHAPES)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    kind(optimizer, 5)
    received = pickle.loads(cloudpickle.dumps(template_of(optimizer, parameters)))
    assert received.kind is torch.optim.SGD
    built = received.build([(0, parameters[0])])
    parameters[0].grad = torch.ones_like(parameters[0])
    before = parameters[0].detach().clone()
    with torch.no_grad():
        received.step(built)
    torch.testing.assert_close(before - parameters[0].detach(), torch.full_like(before, 0.1))


def test_hooks_of_the_users_optimizer_stay_with_it() -> None:
    parameters = make_parameters(SHAPES)
    optimizer = torch.optim.Adam(parameters)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    take_apart(optimizer, parameters)
    assert called == []


def test_what_cannot_be_taken_apart_is_refused() -> None:
    parameters = make_parameters(SHAPES)
    with pytest.raises(ModelError, match=r"LBFGS.*valid: every other optimizer"):
        template_of(torch.optim.LBFGS(parameters), parameters)

    class Closure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return closure()

    optimizer = Closure(parameters, lr=0.1)
    with pytest.raises(ModelError, match=r"Closure failed a trial step.*Valid"):
        take_apart(optimizer, parameters)


def test_the_users_optimizer_is_left_as_it_was() -> None:
    parameters = make_parameters(SHAPES)
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    template, _ = take_apart(optimizer, parameters)
    template.set_hyper(template.build([(0, parameters[0])]), [9.0] * len(template.hyper))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i]["exp_avg"], before["state"][i]["exp_avg"]) for i in range(len(SHAPES)))
