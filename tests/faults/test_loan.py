"""A large model during a fit: the caller reads the parameters of the arena, and has its own again afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh

SIDE = 3000  # a square matrix of 34 MiB


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, SIDE), nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, 2))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 8, generator=generator), torch.randint(0, 2, (32,), generator=generator)


def train(model: nn.Module, *callbacks: mh.Callback, **more: Any) -> str:
    trainer = mh.Trainer(model, optimizer=mh.optimizer("sgd", lr=0.01), workers=2, **more)
    trainer.fit(make_data(), epochs=3, batch_size=8, callbacks=callbacks, run_dir=False, progress="quiet")
    return mh.digest(model)


def arenas() -> int:
    """Mappings of an arena in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:manyhands-arena")


class Meddler(mh.Callback):
    """Looks at the weights after every epoch, then spoils what it was given."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.in_arena: list[int] = []

    def on_epoch_end(self, state: mh.State) -> None:
        model = state.model
        self.digests.append(mh.digest(model))
        self.in_arena.append(arenas())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))


def test_a_callback_sees_the_weights_and_cannot_change_the_training() -> None:
    expected = train(make_model())
    meddler = Meddler()
    assert train(make_model(), meddler) == expected
    assert meddler.digests[-1] == expected
    assert len(set(meddler.digests)) == 3
    assert min(meddler.in_arena) == 2, "the caller's parameters were not read from the arena"


def test_the_model_has_memory_of_its_own_afterwards() -> None:
    model = make_model()
    parameters = list(model.parameters())
    train(model)
    assert arenas() == 0
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    before = mh.digest(model)
    train(model)  # goes on from there
    assert mh.digest(model) != before


def test_whoever_else_holds_the_memory_finds_the_trained_weights_there() -> None:
    model = make_model()
    weight = model[1].weight
    view, array = weight.detach(), weight.detach().numpy()
    train(model)
    assert torch.equal(view, weight.detach())
    assert torch.equal(torch.from_numpy(array), weight.detach())


def test_a_frozen_parameter_is_lent_as_well() -> None:
    model = make_model()
    model.insert(1, nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False))
    frozen, address = model[1].weight.detach().clone(), model[1].weight.data_ptr()
    seen: list[int] = []
    train(model, mh.Lambda(on_epoch_end=lambda state: seen.append(state.model[1].weight.data_ptr())))
    assert len(seen) == 3 and address not in seen
    assert torch.equal(model[1].weight.detach(), frozen)


class Fails(mh.Callback):
    def on_epoch_end(self, state: mh.State) -> None:
        raise RuntimeError("not today")


def test_after_a_failure_the_weights_are_those_of_the_last_step() -> None:
    model, once = make_model(), make_model()
    with pytest.raises(RuntimeError, match="not today"):
        train(model, Fails())
    trainer = mh.Trainer(once, optimizer=mh.optimizer("sgd", lr=0.01), workers=2)
    trainer.fit(make_data(), epochs=1, batch_size=8, run_dir=False, progress="quiet")
    assert mh.digest(model) == mh.digest(once)
    assert arenas() == 0
