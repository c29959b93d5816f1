"""Workers that go ahead: what they read, into which place they compute, and what they are shown."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.comm.arena import MOST_WORKERS
from manyhands.sync import client
from manyhands.sync.apply import Applier
from manyhands.sync.client import Client
from manyhands.sync.optimizer_state import hyper_row, without_compiler
from manyhands.sync.windows import Windows, read_newest
from manyhands.train.state import ModelState, Needs


@pytest.fixture
def state() -> Iterator[ModelState]:
    model = nn.Linear(300, 300)
    needs = Needs(servers=1, exchange=True, ahead=True)
    with without_compiler():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = ModelState(model, optimizer, needs, lanes=1, samples=0, stats=2, ring=4)
    state.row = np.array(hyper_row(optimizer, state.template.hyper))  # type: ignore[attr-defined, union-attr]
    yield state
    state.arena.close()


def numbers(plane: torch.Tensor) -> torch.Tensor:
    return plane.view(torch.float32).clone()


def test_what_is_shown_goes_on_from_the_last_step_and_is_what_is_after_a_rest(state: ModelState) -> None:
    arena, exchange = state.arena, state.arena.exchange()
    assert state.template is not None
    applier = Applier(arena, state.template, (), MOST_WORKERS)
    runs = applier.batches(range(len(arena.spec.units)))
    windows = Windows(arena, applier)

    def shown() -> torch.Tensor:
        return numbers(arena.shown(exchange.newest))

    windows.look(True)
    assert not shown().any()
    windows.look(False)
    assert torch.equal(shown(), numbers(arena.plane(0)))
    for gradient in arena.gradients(0):
        gradient.normal_()
    arena.present[0] = 1
    before = numbers(arena.plane(0))
    applier.begin_step(state.row, [0])  # type: ignore[attr-defined]
    for run in runs:
        applier.apply(run, [0], 0, 0.0)
        windows.write(run, 1.5)
    assert torch.equal(shown(), before), "only a whole step is shown"
    windows.show(1, complete=True)
    after = numbers(arena.plane(0))
    assert not torch.equal(before, after)
    assert exchange.shown_version[exchange.newest] == 1
    torch.testing.assert_close(shown(), after + 1.5 * (after - before))
    windows.look(False)
    assert not torch.equal(shown(), after)  # only a rest makes it look again
    windows.look(True)
    arena.plane(0).view(torch.float32).zero_()
    windows.look(False)
    assert not shown().any()
    windows.show(2, complete=False)
    assert torch.equal(shown(), numbers(arena.plane(0))) and exchange.shown_version[exchange.newest] == 2


def test_nothing_is_written_where_somebody_reads(state: ModelState) -> None:
    arena, exchange = state.arena, state.arena.exchange()
    assert state.template is not None
    windows = Windows(arena, Applier(arena, state.template, (), MOST_WORKERS))
    dice, held = random.Random(1), dict[int, tuple[int, float]]()
    live = arena.plane(0).view(torch.float32)
    for version in range(2000):
        live.fill_(version)
        windows.show(version, complete=False)
        worker = dice.randrange(MOST_WORKERS)
        window = read_newest(exchange, worker)
        held[worker] = (window, version)
        assert exchange.shown_version[window] == version
        for window, seen in held.values():
            assert arena.shown(window).view(torch.float32)[0] == seen
    assert len({window for window, _ in held.values()}) > MOST_WORKERS // 2


def test_a_worker_computes_into_one_place_while_the_other_is_applied(
    state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "step_back", lambda: None)
    arena, exchange = state.arena, state.arena.exchange()
    worker, first, second = Client(arena, 3, (), counts=True), 3, 3 + MOST_WORKERS

    def grant(place: int, chunk: int) -> None:
        exchange.grant[place], exchange.grant_span[place] = chunk + 1, 1
        exchange.granted[place] = exchange.asked[place]

    grant(first, 0)
    grant(second, 1)
    exchange.newest = 2
    assert worker.turn() == "step"
    assert (worker.place, worker.step, worker.window) == (first, 0, 2)
    worker.end_lane(0)
    exchange.newest, exchange.shown_version[4] = 4, 5  # somebody's update
    assert worker.finish()
    assert (exchange.asked[first], exchange.chunk[first], exchange.version[first]) == (1, 1, 0)
    assert worker.turn() == "step"  # the first update has no answer yet
    assert (worker.place, worker.step, worker.window) == (second, 1, 4)
    worker.end_lane(0)
    worker.finish()
    assert (exchange.chunk[second], exchange.version[second]) == (2, 5)
    grant(second, 7)
    grant(first, 6)
    assert worker.turn() == "step"
    assert (worker.place, worker.step) == (first, 6), "the oldest first: a rest may wait for it"
