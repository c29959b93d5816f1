"""The lead says which updates came to nothing, so that what a codec left out of them is not lost, nor sent twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.core.policies import Async
from manyhands.sync.lead import Lead
from manyhands.sync.optimizer_state import without_compiler
from manyhands.train.state import ModelState, Needs


@pytest.fixture
def arena() -> Iterator[Arena]:
    model = nn.Linear(3, 2)
    with without_compiler():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = ModelState(model, optimizer, Needs(servers=1, exchange=True), lanes=1, samples=0, stats=2, ring=8)
    state.arena.control.horizon = 4
    yield state.arena
    state.arena.close()


def bring(arena: Arena, slot: int, chunk: int) -> None:
    """The worker in ``slot`` brings an update of ``chunk``."""
    exchange = arena.exchange()
    exchange.chunk[slot], exchange.span[slot] = chunk + 1, 1
    exchange.asked[slot] += 1


def test_an_update_that_came_second_is_refused(arena: Arena) -> None:
    lead, exchange = Lead(arena, Async(oldest=3)), arena.exchange()
    bring(arena, 0, chunk=0)
    bring(arena, 1, chunk=0)
    assert lead.judge()
    assert exchange.tally()["applied"] == exchange.tally()["doubled"] == 1
    assert exchange.refused[:2].tolist() == [0, 1]


def test_an_update_that_is_too_old_is_refused(arena: Arena) -> None:
    lead, exchange = Lead(arena, Async(oldest=0)), arena.exchange()
    for slot in range(2):
        bring(arena, slot, chunk=slot)
        assert lead.judge()
    assert exchange.tally()["dropped"] == 1
    assert exchange.refused[:2].tolist() == [0, 1]


def test_a_successor_does_not_refuse_what_its_predecessor_has_logged(arena: Arena) -> None:
    exchange = arena.exchange()
    bring(arena, 0, chunk=0)
    assert Lead(arena, Async(oldest=3)).judge()  # it dies before it grants another chunk
    bring(arena, 1, chunk=0)
    assert Lead(arena, Async(oldest=3)).judge()
    assert exchange.tally()["applied"] == 1 and exchange.tally()["doubled"] == 2
    assert exchange.refused[:2].tolist() == [0, 1]
