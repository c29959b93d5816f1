"""The kept copy: going back to it restores everything that a step changes, and the number of the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.sync.kept import Kept, go_back, replay_steps
from manyhands.train.state import ModelState, Needs

RING = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.bias = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture
def arena() -> Arena:
    model = Model()
    optimizer = torch.optim.Adafactor(model.parameters())
    arena = ModelState(model, optimizer, Needs(repeatable=True), lanes=2, samples=0, stats=1, ring=RING).arena
    assert arena.spec.extras, "an optimizer with state of other shapes belongs to this test"
    return arena


def changing(arena: Arena) -> list[torch.Tensor]:
    """Every tensor that a step may change for good."""
    planes = [tensor for plane in range(1 + len(arena.spec.planes)) for tensor in arena.parameters(plane)]
    extras = [arena.extra(index) for index in range(len(arena.spec.extras))]
    numbers = [torch.from_numpy(arena.scalars), torch.from_numpy(arena.control.unit_ready)]
    return [*planes, *extras, *arena.buffers(), *numbers]


def fill(arena: Arena, value: int) -> None:
    for tensor in changing(arena):
        tensor.fill_(value)


def begin_to_change(arena: Arena, step: int) -> None:
    arena.control.set_slot_value(0, "undo_step", step + 1)
    fill(arena, 66)


def test_going_back_restores_everything(arena: Arena) -> None:
    control = arena.control
    fill(arena, 7)
    control.commit(3, 5)
    Kept(arena).renew(3)
    control.commit(5, 6)
    begin_to_change(arena, 5)
    repairs = control.repairs
    assert go_back(arena, 0)
    assert [set(tensor.flatten().tolist()) for tensor in changing(arena)] == [{7}] * len(changing(arena))
    assert control.committed == (3, 6), "the newest plan stays"
    assert control.repairs > repairs
    assert not control.marked(6)
    assert not go_back(arena, 0), "once is enough"


@pytest.mark.parametrize("mark", [0, 4])
def test_nothing_is_taken_back_from_one_that_died_after_its_commit(arena: Arena, mark: int) -> None:
    fill(arena, 7)
    Kept(arena).renew(3)
    fill(arena, 8)
    arena.control.commit(4, 1)
    arena.control.set_slot_value(0, "undo_step", mark)
    assert not go_back(arena, 0)
    assert arena.control.steps == 4
    assert {float(tensor.flatten()[0]) for tensor in changing(arena)} == {8.0}
    assert not arena.control.marked(4)


def share_out(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Arena:
    """Units 0 and 1 belong to slots 0 and 1; step 3 is being applied, from a copy of step 2."""
    monkeypatch.setattr("manyhands.train.state.WHOLE_BYTES", 0)
    optimizer = torch.optim.Adam(model.parameters())
    arena = ModelState(model, optimizer, Needs(repeatable=True), lanes=2, samples=0, stats=1, ring=RING).arena
    assert arena.spec.keeps and not arena.spec.whole
    arena.control.unit_owner(0)[:] = -1
    arena.control.unit_owner(0)[:2] = [0, 1]
    fill(arena, 7)
    Kept(arena).renew(2)
    fill(arena, 8)
    arena.control.commit(3, 0)
    for slot in (0, 1):
        arena.control.set_slot_value(slot, "undo_step", 4)
    return arena


def test_who_has_stamped_all_its_units_tore_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = share_out(Model(), monkeypatch)
    arena.control.unit_done[0] = 4
    assert not go_back(arena, 0)
    assert arena.control.steps == 3
    assert {float(tensor.flatten()[0]) for tensor in changing(arena)} == {8.0}
    assert arena.control.slot_value(1, "undo_step") == 4, "the other one is still at it"


def test_the_others_finish_before_anything_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = share_out(Model(), monkeypatch)
    control = arena.control
    waited = list[int]()

    def others_finish(mark: int) -> None:
        assert control.going_back, "nobody may begin now"
        assert {float(tensor.flatten()[0]) for tensor in changing(arena)} == {8.0}
        control.unit_done[1] = mark
        waited.append(mark)

    assert go_back(arena, 0, others_finish)
    assert waited == [4]
    assert {float(tensor.flatten()[0]) for tensor in changing(arena)} == {7.0}
    assert control.steps == 2 and not control.going_back
    assert not control.unit_done.any(), "what was stamped is to be done again"
    assert not go_back(arena, 1), "one who died with the first is settled with it"


@pytest.mark.parametrize(
    "disturb, renewed",
    [
        (lambda control: None, False),
        (lambda control: setattr(control, "kept", 0), True),
        (lambda control: setattr(control, "kept_ns", 1), True),
    ],
    ids=["young", "thrown away", "old"],
)
def test_when_the_copy_is_renewed(arena: Arena, disturb: Callable[[object], None], renewed: bool) -> None:
    kept = Kept(arena)
    kept.renew(0)
    disturb(arena.control)
    kept.renew(1)
    assert arena.control.kept == (2 if renewed else 1)


def test_one_never_goes_back_further_than_the_caller_remembers(arena: Arena) -> None:
    kept = Kept(arena)
    ages = []
    for step in range(40):
        kept.renew(step)
        ages.append(step + 1 - arena.control.kept)
    assert max(ages) < replay_steps(arena) <= RING // 2


def test_only_small_models_that_can_go_back_keep_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    shape = {"lanes": 1, "samples": 0, "stats": 1, "ring": 1}
    assert ModelState(model, optimizer, Needs(repeatable=True), **shape).arena.spec.keeps
    assert not ModelState(model, optimizer, **shape).arena.spec.keeps
    monkeypatch.setattr("manyhands.train.state.KEPT_BYTES", 12 * 4 + 5 * 8 + 3 * 2 * 4 - 1)
    assert not ModelState(model, optimizer, Needs(repeatable=True), **shape).arena.spec.keeps
