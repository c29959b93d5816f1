"""Parts: together they are the whole state, and a part of one arena fits every other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.comm.envelope import pour
from manyhands.server.part import Part, size_bytes
from manyhands.train.state import ModelState, Needs

SHARDS = 3


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 50))


def state_of(made: nn.Module, optimizer: str) -> ModelState:
    kinds = {"adam": torch.optim.Adam, "adafactor": torch.optim.Adafactor}
    chosen = kinds[optimizer](made.parameters(), lr=0.1)
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter)
    chosen.step()
    return ModelState(made, chosen, Needs(servers=SHARDS, exchange=True), lanes=1, samples=0, stats=2, ring=1)


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_the_parts_are_the_whole(optimizer: str) -> None:
    full, empty = state_of(model(), optimizer), state_of(nn.Sequential(*model()), optimizer)
    for tensor in empty.tensors().values():
        tensor.zero_()
    for shard in range(SHARDS):
        pour(Part(full.arena, shard, SHARDS).state(), Part(empty.arena, shard, SHARDS).state())
    theirs = empty.tensors()
    assert theirs.keys() == full.tensors().keys()
    for name, tensor in full.tensors().items():
        assert torch.equal(tensor, theirs[name]), name
    full.arena.close()
    empty.arena.close()


def test_every_unit_is_in_one_part() -> None:
    state = state_of(model(), "adam")
    parts = [Part(state.arena, shard, SHARDS) for shard in range(SHARDS)]
    assert [unit for part in parts for unit in part.units] == list(range(len(state.arena.spec.units)))
    assert sum(size_bytes(part.parameters()) for part in parts) >= sum(p.nbytes for p in model().parameters())
    state.arena.close()


def test_what_is_pulled_and_pushed_lies_in_the_workers_place() -> None:
    state = state_of(model(), "adam")
    arena, slot = state.arena, 5
    for shard in range(SHARDS):
        part = Part(arena, shard, SHARDS)
        pour(part.parameters(), part.pulled(slot))
    for pulled, parameter in zip(arena.pulled(slot), arena.parameters(), strict=True):
        assert torch.equal(pulled, parameter)
    for pulled, buffer in zip(arena.pulled_buffers(slot), arena.buffers(), strict=True):
        assert torch.equal(pulled, buffer)
    present, gradient, *buffers = Part(arena, 0, SHARDS).update(slot)
    assert len(present) == len(arena.spec.parameters) and len(buffers) == 3 and len(gradient) > 0
    assert len(Part(arena, 1, SHARDS).update(slot)) == 2
    arena.close()
