"""The weights are those of a plain PyTorch loop over the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from scenes import CLASSES, FEATURES, Cnn, Mlp, Scene, table
from torch import nn
from torch.nn import functional

import manyhands as mh
from manyhands.core.order import epoch_order

pytestmark = pytest.mark.usefixtures("one_thread")  # as a worker has

SAMPLES, BATCH, EPOCHS = 203, 16, 3

FACTORIES: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=2e-3),
    "adam, fused": lambda params: torch.optim.Adam(params, lr=2e-3, fused=True),
    "adamw, foreach": lambda params: torch.optim.AdamW(params, lr=2e-3, foreach=True),
}


def still_mlp() -> nn.Module:
    return Mlp(dropout=0.0)


def plain_loop(model: nn.Module, factory: Callable[[Iterable[Any]], torch.optim.Optimizer], clip: float | None) -> None:
    x, y = table(SAMPLES)
    optimizer = factory(model.parameters())
    model.train()
    for epoch in range(EPOCHS):
        order = torch.from_numpy(epoch_order(0, epoch, SAMPLES))
        for rows in order.split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def large(width: int = 600) -> nn.Module:
    """With a matrix whose gradient is computed straight into the lane where work is shared out."""
    torch.manual_seed(3)
    widths = (FEATURES, width, width)
    hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def larger() -> nn.Module:
    """With one whose gradient is left as its factors there."""
    return large(800)


def masked() -> nn.Module:
    """Parts of two matrices never move: their gradients are masked by hooks."""
    model = larger()
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda gradient: gradient * (torch.arange(gradient.shape[1]) % 3 > 0))
    return model


@pytest.mark.usefixtures("way")
def test_hooks_of_parameters_run() -> None:
    reference, before = masked(), masked()
    plain_loop(reference, FACTORIES["adam"], None)
    assert torch.equal(reference[2].weight[:, ::3], before[2].weight[:, ::3])
    assert not torch.equal(reference[2].weight, before[2].weight)
    assert Scene(masked, FACTORIES["adam"], table(SAMPLES), EPOCHS, BATCH, lanes=1).run(2).digest == mh.digest(
        reference
    )
    digests = {Scene(masked, FACTORIES["adam"], table(SAMPLES), 1, BATCH, lanes=4).run(n).digest for n in (1, 3)}
    assert len(digests) == 1


def parametrized() -> nn.Module:
    """One layer has its weight from two parameters, the other is kept orthogonal: each of a class that torch makes."""
    model = large(64)
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[2])
    return model


@pytest.mark.usefixtures("way")
def test_parametrized_layers() -> None:
    reference = parametrized()
    plain_loop(reference, FACTORIES["adam"], None)
    trained = Scene(parametrized, FACTORIES["adam"], table(SAMPLES), EPOCHS, BATCH, lanes=1).run(2)
    assert trained.digest == mh.digest(reference) != mh.digest(parametrized())
    assert torch.equal(trained.model[2].weight, reference[2].weight)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("make_model", [still_mlp, Cnn, large, larger])
def test_one_lane_is_bit_equal(make_model: Callable[[], nn.Module], name: str) -> None:
    reference = make_model()
    plain_loop(reference, FACTORIES[name], None)
    scene = Scene(make_model, FACTORIES[name], table(SAMPLES), EPOCHS, BATCH, lanes=1)
    assert scene.run(2).digest == mh.digest(reference)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_four_lanes_are_equal_but_for_rounding(name: str, clip: float | None) -> None:
    reference = still_mlp()
    plain_loop(reference, FACTORIES[name], clip)
    scene = Scene(still_mlp, FACTORIES[name], table(SAMPLES), EPOCHS, BATCH, lanes=4, trainer={"clip": clip})
    trained = scene.run(2).model
    for (parameter, tensor), expected in zip(
        trained.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        distance = float((tensor - expected).norm() / expected.norm())
        assert distance < 1e-5, f"{parameter} is {distance:.1e} away"
