"""The undo log: a death at any point of an update leaves the units as before it or as after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rig import Factory, Rig

from manyhands.sync.undo import UndoLog, recover


class Died(BaseException):
    """Stands for the end of the process."""


class Mortal(torch.optim.SGD):
    """Dies after a number of tensors; -1 never. State appears with the first step, as always."""

    survives = -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        done = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if done == Mortal.survives:
                    raise Died
                state = self.state[parameter]
                state.setdefault("count", torch.zeros(()))
                state.setdefault("sum", torch.zeros_like(parameter))
                state.setdefault("rows", torch.zeros(len(parameter), 1))
                state["count"] += 1
                state["sum"] += parameter.grad
                state["rows"] += 1
                parameter.sub_(group["lr"] * state["sum"])
                done += 1


SHAPES = [((40, 30), torch.float32), ((9,), torch.float32), ((4, 4), torch.float64)]


def make(factory: Factory, **options: Any) -> Rig:
    return Rig(factory, shapes=SHAPES, **options)


def die_in_apply(rig: Rig, unit: int, step: int) -> None:
    applier = rig.appliers[0]
    applier.begin_step(rig.hyper(), list(rig.lanes))
    with pytest.raises(Died):
        applier.apply((unit, unit + 1), list(rig.lanes), step, 0.0)


@pytest.mark.parametrize("unit", [0, 1, 2])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_death_within_the_optimizer_is_undone_and_done_again_by_another(unit: int, steps_before: int) -> None:
    undisturbed, rig = (make(lambda p: Mortal(p, lr=0.1), slots=2) for _ in range(2))
    Mortal.survives = -1
    for step in range(steps_before + 1):
        undisturbed.fill_lanes()
        undisturbed.apply(step)
    for step in range(steps_before):
        rig.fill_lanes()
        rig.apply(step)
    rig.fill_lanes()
    before = rig.image()
    for survives in (0, 1):
        Mortal.survives = survives
        try:
            if survives == 0:
                die_in_apply(rig, unit, steps_before)
            else:
                scribble(rig, unit, steps_before)
        finally:
            Mortal.survives = -1
        assert recover(rig.arena, 0)
        assert rig.image() == before
        assert not recover(rig.arena, 0), "what is undone must not be undone twice"
    rig.give_away([1] * len(rig.arena.spec.units))
    rig.apply(steps_before)
    assert rig.image() == undisturbed.image()
    for one in (rig, undisturbed):
        one.close()


def scribble(rig: Rig, unit: int, step: int) -> None:
    """A process that saved the unit, changed all of it, and died before the stamp."""
    log, arena = UndoLog(rig.arena, 0), rig.arena
    log.begin(unit, unit + 1, step)
    place = arena.spec.units[unit]
    for plane in range(1 + len(arena.spec.planes)):
        arena.plane(plane)[place.start : place.stop] = 0xA5
    for index, extra in enumerate(arena.spec.extras):
        if extra.parameter == place.parameter:
            arena.extra(index).fill_(-3)
    arena.scalars[unit] = 1e300
    arena.control.unit_ready[unit] = 1 - arena.control.unit_ready[unit]


def test_a_range_of_units_is_undone_together() -> None:
    rig = Rig(lambda p: torch.optim.Adam(p, lr=0.1))
    rig.fill_lanes()
    rig.apply(0)
    before, runs = rig.image(), rig.appliers[0].batches(range(len(rig.arena.spec.units)))
    assert any(stop - first > 1 for first, stop in runs)
    for first, stop in runs:
        log = UndoLog(rig.arena, 0)
        log.begin(first, stop, 1)
        start, end = rig.arena.spec.units[first].start, rig.arena.spec.units[stop - 1].stop
        for plane in range(3):
            rig.arena.plane(plane)[start:end] = 0x5A
        rig.arena.scalars[first:stop] = -1
        rig.arena.control.unit_ready[first:stop] = 0
        assert recover(rig.arena, 0)
        assert rig.image() == before
    assert (rig.arena.control.unit_done == 1).all(), "an undone unit has no new stamp"
    rig.close()


def test_a_death_while_stamping_is_completed_and_not_undone() -> None:
    rig = Rig(lambda p: torch.optim.Adam(p, lr=0.1))
    rig.fill_lanes()
    rig.apply(0)
    image = rig.image()
    first, stop = rig.appliers[0].batches(range(len(rig.arena.spec.units)))[0]
    rig.arena.control.unit_done[first + 1 : stop] = 0  # the stamps came no further
    rig.arena.control.set_slot_value(0, "undo_step", -1)
    rig.arena.control.set_slot_value(0, "undo_first", first)
    rig.arena.control.set_slot_value(0, "undo_stop", stop)
    assert not recover(rig.arena, 0)
    assert (rig.arena.control.unit_done[first:stop] == 1).all()
    assert rig.arena.control.slot_value(0, "undo_step") == 0
    assert rig.image() == image
    rig.close()


def test_slots_have_undo_buffers_of_their_own() -> None:
    rig = Rig(lambda p: torch.optim.Adam(p, lr=0.1), slots=2)
    rig.fill_lanes()
    rig.apply(0)
    before = rig.image()
    for slot, unit in ((0, 0), (1, len(rig.arena.spec.units) - 1)):
        UndoLog(rig.arena, slot).begin(unit, unit + 1, 1)
        place = rig.arena.spec.units[unit]
        rig.arena.plane(0)[place.start : place.stop] = slot + 1
    assert recover(rig.arena, 1) and recover(rig.arena, 0)
    assert rig.image() == before
    rig.close()


def test_a_slot_that_did_nothing_has_nothing_to_undo() -> None:
    rig = make(lambda p: torch.optim.SGD(p, lr=0.1))
    before = rig.image()
    assert not recover(rig.arena, 1)
    assert rig.image() == before
    rig.close()
