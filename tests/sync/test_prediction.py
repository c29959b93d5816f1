"""Predicted parameters: what is written, when nothing is known, and what they are good for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rig import Rig
from torch import nn

from manyhands.core.policies import Apply
from manyhands.server.coder import Update
from manyhands.server.part import Part
from manyhands.sync.optimizer_state import hyper_row, template_of
from manyhands.sync.prediction import Prediction, momentum_reach
from manyhands.sync.store import Store
from manyhands.train.state import ModelState, Needs


@pytest.mark.parametrize(
    "make, reach",
    [
        (lambda p: torch.optim.Adam(p), 9),
        (lambda p: torch.optim.AdamW(p, betas=(0.0, 0.9)), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 9),
        (lambda p: torch.optim.RMSprop(p), 0),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5), 1),
        (lambda p: torch.optim.Adagrad(p), 0),
        (lambda p: torch.optim.Adafactor(p), 0),
    ],
)
def test_only_momentum_tells_the_next_steps(make: Callable[..., torch.optim.Optimizer], reach: float) -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    assert momentum_reach(template_of(make(parameters), parameters)) == pytest.approx(reach)


def test_what_is_written_goes_on_from_the_last_step() -> None:
    rig = Rig(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))  # several types of parameters, several runs
    runs = rig.appliers[0].batches(range(len(rig.arena.spec.units)))
    prediction, place = Prediction(rig.arena, runs), torch.zeros_like(rig.arena.plane(0))
    assert not prediction.write(place, 3.0) and not place.any()
    prediction.begin()
    row = np.array(hyper_row(rig.optimizer, rig.keys))
    for step in range(2):
        rig.fill_lanes()
        before = [parameter.clone() for parameter in rig.arena.parameters()]
        rig.appliers[0].begin_step(row, list(rig.lanes))
        rig.arena.present[:] = 1
        for run in runs:
            prediction.keep(run)
            rig.appliers[0].apply(run, list(rig.lanes), step, 0.0)
    after = rig.arena.parameters()
    assert prediction.write(place, 2.5)
    for entry, old, new in zip(rig.arena.spec.parameters, before, after, strict=True):
        written = place[entry.offset : entry.offset + entry.size_bytes].view(new.dtype).view(new.shape)
        assert not torch.equal(old, new)
        assert torch.allclose(written, new + 2.5 * (new - old), rtol=1e-5, atol=1e-6)
    prediction.forget()
    assert not prediction.write(place, 1.0)


def distance(ahead: float, behind: int) -> float:
    """How far from the minimum of a bowl momentum ends whose gradients are all ``behind`` steps old."""
    model = nn.Linear(20, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.025, momentum=0.9)
    state = ModelState(model, optimizer, Needs(servers=1, exchange=True), lanes=1, samples=0, stats=2, ring=1)
    assert state.template is not None
    part, row = Part(state.arena, 0, 1), np.array(hyper_row(optimizer, state.template.hyper))
    store = Store(state.arena.spec, state.template, 0)
    store.install(part.state(), 0)
    state.arena.present[0] = 1
    read: deque[torch.Tensor] = deque()
    curvature = torch.linspace(0.1, 2.0, 20)

    def weights(steps: float) -> torch.Tensor:
        return torch.frombuffer(bytearray(store.parameters(store.values(steps))[0]), dtype=torch.float32)[:20]

    for _ in range(500):
        read.append(weights(ahead))
        if len(read) > behind:
            state.arena.gradients(0)[0].copy_((curvature * read.popleft()).view(1, 20))
            store.execute(Update(part.update(0), part.update(0)), row, Apply())
    end = float(weights(0.0).norm())
    store.close()
    state.arena.close()
    return end


def test_momentum_that_stale_gradients_throw_off_is_held_by_prediction() -> None:
    fresh, stale, predicted = distance(0.0, 0), distance(0.0, 3), distance(3.0, 3)
    assert fresh < 0.01
    assert stale > 100
    assert predicted < 0.01


def test_a_store_predicts_only_from_steps_of_its_own() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = ModelState(model, optimizer, Needs(servers=1, exchange=True), lanes=1, samples=0, stats=2, ring=1)
    assert state.template is not None
    part, row = Part(state.arena, 0, 1), np.array(hyper_row(optimizer, state.template.hyper))
    store = Store(state.arena.spec, state.template, 0)

    def read(ahead: float) -> list[Any]:
        return [bytes(piece) for piece in store.parameters(store.values(ahead))]

    store.install(part.state(), 0)
    assert read(3.0) == read(0.0)
    state.arena.present[0] = 1
    for gradient in state.arena.gradients(0):
        gradient.fill_(1.0)
    store.execute(Update(part.update(0), part.update(0)), row, Apply())
    assert read(3.0) != read(0.0)
    store.install(part.state(), 0)  # what came from elsewhere is no step
    assert read(3.0) == read(0.0)
    store.close()
    state.arena.close()
