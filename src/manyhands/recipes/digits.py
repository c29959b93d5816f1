"""The 8 × 8 handwritten digits that come with scikit-learn: real images without a download."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from manyhands.data.prepare import split
from manyhands.errors import MissingExtra
from manyhands.recipes.registry import Recipe, RecipeData

__all__ = ["digits_cnn", "digits_mlp", "load_digits"]

BRIGHTEST = 16.0
"""The pixels of this data set run from 0 to 16."""


def load_digits() -> RecipeData:
    """1,797 images (1 × 8 × 8, from 0 to 1) in a fixed split: 70 % to train on, 10 % to validate, 20 % to test."""
    try:
        from sklearn.datasets import load_digits as read
    except ImportError as error:
        raise MissingExtra("the digits data set (scikit-learn)", "sklearn") from error
    images, labels = read(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / BRIGHTEST
    y = torch.tensor(labels, dtype=torch.int64)
    train, validation, test = split(x, y, fractions=(0.7, 0.1, 0.2), seed=0, stratify=y)
    return RecipeData(train=train, validation=validation, test=test)


def _mlp(hidden: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 10),
    )


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def _cnn(channels: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        *_block(1, channels),
        *_block(channels, 2 * channels),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        *_block(2 * channels, 2 * channels),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * channels * 2 * 2, 10),
    )


def digits_mlp(hidden: int = 128, dropout: float = 0.2, lr: float = 0.002) -> Recipe:
    """Two hidden layers over the pixels."""
    return Recipe(
        name="digits-mlp",
        description="digits 8 × 8 of scikit-learn, two hidden layers; real data, no download",
        model=partial(_mlp, hidden, dropout),
        data=load_digits,
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=lr),
        metrics=("accuracy",),
        epochs=25,
        batch_size=64,
    )


def digits_cnn(channels: int = 32, dropout: float = 0.3, lr: float = 0.002) -> Recipe:
    """Three convolutions with batch normalisation."""
    return Recipe(
        name="digits-cnn",
        description="digits 8 × 8 of scikit-learn, three convolutions; real data, no download",
        model=partial(_cnn, channels, dropout),
        data=load_digits,
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=lr),
        metrics=("accuracy",),
        epochs=20,
        batch_size=64,
    )
