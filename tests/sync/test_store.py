"""A store does to its shard what the optimizer does to the model, and what another store with the same updates does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.core.policies import Apply
from manyhands.errors import FrameError
from manyhands.server.coder import Update
from manyhands.server.part import Part
from manyhands.sync.optimizer_state import hyper_row
from manyhands.sync.store import Store
from manyhands.train.state import ModelState, Needs

SHARDS = 2


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor])
def test_a_store_steps_as_the_optimizer_does(kind: type[torch.optim.Optimizer], one_thread: None) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7))
    optimizer = kind(model.parameters(), lr=0.05)  # type: ignore[call-arg]
    state = ModelState(model, optimizer, Needs(servers=SHARDS, exchange=True), lanes=1, samples=0, stats=2, ring=1)
    arena, template = state.arena, state.template
    assert template is not None
    stores = [[Store(arena.spec, template, shard) for _ in range(2)] for shard in range(SHARDS)]
    for shard, pair in enumerate(stores):
        for store in pair:
            store.install(Part(arena, shard, SHARDS).state(), 0)
    row = np.array(hyper_row(optimizer, template.hyper))
    for step in range(4):
        for parameter, home in zip(model.parameters(), arena.gradients(0), strict=True):
            parameter.grad = torch.randn_like(parameter)
            home.copy_(parameter.grad)
        arena.present[0] = 1
        optimizer.step()
        for shard, pair in enumerate(stores):
            for store in pair:
                update = Part(arena, shard, SHARDS).update(0)
                store.execute(Update(update, update), row, Apply())
                assert store.count == step + 1
    for shard, (one, other) in enumerate(stores):
        assert [bytes(piece) for piece in one.state()] == [bytes(piece) for piece in other.state()]
        for source, target in zip(one.parameters(), Part(arena, shard, SHARDS).parameters(), strict=True):
            target[:] = source
        one.execute(None, row, None)  # a chunk that was left out
        assert one.count == 5
        with pytest.raises(FrameError, match="bytes of tensors"):
            other.execute(Update((), [memoryview(b"too short")]), row, Apply())
    for parameter, ours in zip(model.parameters(), arena.parameters(), strict=True):
        assert torch.allclose(parameter, ours, rtol=1e-6, atol=1e-7)
    for store in (store for pair in stores for store in pair):
        store.close()
    arena.close()
