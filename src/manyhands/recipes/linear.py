"""Linear regression on a table that is made from a seed: the smallest complete job."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from manyhands.recipes.registry import Recipe, RecipeData

__all__ = ["linear", "make_table"]


def make_table(samples: int, features: int, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of normal features and a target that is linear in them, plus normal noise."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=random)
    weights = torch.randn(features, 1, generator=random)
    y = x @ weights + 0.5 + noise * torch.randn(samples, 1, generator=random)
    return x, y


def linear(
    samples: int = 8192, features: int = 16, noise: float = 0.1, table_seed: int = 0, lr: float = 0.05
) -> Recipe:
    """Linear regression by mini-batch gradient descent."""

    def data() -> RecipeData:
        x, y = make_table(samples, features, noise, table_seed)
        train, validation = int(samples * 0.8), int(samples * 0.9)
        return RecipeData(
            train=(x[:train], y[:train]),
            validation=(x[train:validation], y[train:validation]),
            test=(x[validation:], y[validation:]),
        )

    return Recipe(
        name="linear",
        description="linear regression on a made table (8,192 rows, 16 features); no download",
        model=partial(nn.Linear, features, 1),
        data=data,
        loss="mse",
        optimizer=partial(torch.optim.SGD, lr=lr),
        metrics=("mae", "r2"),
        epochs=5,
        batch_size=64,
    )
