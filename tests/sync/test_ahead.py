"""Workers that go ahead: what they read, into which place they compute, and what they are shown."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.comm.arena import MOST_WORKERS
from manyhands.sync import client
from manyhands.sync.apply import Applier
from manyhands.sync.client import Client
from manyhands.sync.optimizer_state import hyper_row
from manyhands.sync.server import _Window
from manyhands.train.state import ModelState, Needs


@pytest.fixture
def state() -> Iterator[ModelState]:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    needs = Needs(servers=1, exchange=True, ahead=True)
    state = ModelState(model, optimizer, needs, lanes=1, samples=0, stats=2, ring=4)
    state.row = np.array(hyper_row(optimizer, state.template.hyper))  # type: ignore[attr-defined, union-attr]
    yield state
    state.arena.close()


def numbers(plane: torch.Tensor) -> torch.Tensor:
    return plane.view(torch.float32).clone()


def test_what_is_shown_goes_on_from_the_last_step_and_is_what_is_after_a_rest(state: ModelState) -> None:
    arena = state.arena
    assert state.template is not None
    applier = Applier(arena, state.template, (), MOST_WORKERS)
    runs = applier.batches(range(len(arena.spec.units)))
    window = _Window(arena, applier, runs)
    window.look(True)
    assert not arena.shown().any()
    window.look(False)
    assert torch.equal(arena.shown(), arena.plane(0))
    for gradient in arena.gradients(0):
        gradient.normal_()
    arena.present[0] = 1
    before = numbers(arena.plane(0))
    applier.begin_step(state.row, [0])  # type: ignore[attr-defined]
    for run in runs:
        applier.apply(run, [0], 0, 0.0)
        window.write(run, 1.5)
    after = numbers(arena.plane(0))
    assert not torch.equal(before, after)
    torch.testing.assert_close(numbers(arena.shown()), after + 1.5 * (after - before))
    window.look(False)
    assert not torch.equal(arena.shown(), arena.plane(0))  # only a rest makes it look again
    window.look(True)
    arena.plane(0).view(torch.float32).zero_()
    window.look(False)
    assert not arena.shown().any()


@pytest.mark.parametrize("predicted", [False, True])
def test_a_worker_computes_into_one_place_while_the_other_is_applied(
    predicted: bool, state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "step_back", lambda: None)
    arena, exchange = state.arena, state.arena.exchange()
    worker, first, second = Client(arena, 3, (), predicted), 3, 3 + MOST_WORKERS
    source = arena.shown() if predicted else arena.plane(0)

    def grant(place: int, chunk: int) -> None:
        exchange.grant[place], exchange.grant_span[place] = chunk + 1, 1
        exchange.granted[place] = exchange.asked[place]

    grant(first, 0)
    grant(second, 1)
    source.fill_(1)
    assert worker.turn() == "step"
    assert (worker.place, worker.step) == (first, 0)
    assert torch.equal(arena.pull(3), source)
    worker.end_lane(0)
    source.fill_(2)  # somebody's update
    exchange.applied[0] = 5
    assert worker.finish()
    assert (exchange.asked[first], exchange.chunk[first], exchange.version[first]) == (1, 1, 0)
    assert worker.turn() == "step"  # the first update has no answer yet
    assert (worker.place, worker.step) == (second, 1)
    assert torch.equal(arena.pull(3), source)
    worker.end_lane(0)
    worker.finish()
    assert (exchange.chunk[second], exchange.version[second]) == (2, 5)
    grant(second, 7)
    grant(first, 6)
    assert worker.turn() == "step"
    assert (worker.place, worker.step) == (first, 6), "the oldest first: a rest may wait for it"
