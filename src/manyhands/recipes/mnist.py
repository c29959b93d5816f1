"""MNIST, 28 × 28 handwritten digits: a multilayer perceptron and a small convolutional network."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from manyhands.data.files import read_idx
from manyhands.errors import DataError
from manyhands.recipes.mnist_files import file_in, find
from manyhands.recipes.registry import Recipe, RecipeData

__all__ = ["Pixels", "load_mnist", "mnist_cnn", "mnist_mlp"]

VALIDATION_SAMPLES = 5_000
PIXEL_MEAN, PIXEL_DEVIATION = 0.1307, 0.3081


class Pixels(nn.Module):
    """Bytes to normalised floats inside the model, so that the data stays a quarter of the size in memory."""

    def forward(self, images: Tensor) -> Tensor:
        """Scale from 0..255 to mean 0 and deviation 1 over the training set."""
        return (images.float() / 255.0 - PIXEL_MEAN) / PIXEL_DEVIATION


def load_mnist(path: str = "") -> RecipeData:
    """60,000 training images, the last 5,000 of them for validation, and 10,000 to test; bytes, 1 × 28 × 28."""
    folder = find(path)
    parts: dict[str, Tensor] = {}
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        file = file_in(folder, f"{name}-ubyte")
        assert file is not None, "find() returns complete folders only"
        parts[name] = torch.as_tensor(read_idx(file))
    for part in ("train", "t10k"):
        images, labels = parts[f"{part}-images-idx3"], parts[f"{part}-labels-idx1"]
        if images.shape[1:] != (28, 28) or len(images) != len(labels):
            raise DataError(
                f"the MNIST files in {folder} hold {part} images of shape {tuple(images.shape)} and "
                f"{len(labels)} labels; valid: N images of 28 × 28 and N labels."
            )
    images, labels = parts["train-images-idx3"].unsqueeze(1), parts["train-labels-idx1"].long()
    cut = len(images) - VALIDATION_SAMPLES
    return RecipeData(
        train=(images[:cut], labels[:cut]),
        validation=(images[cut:], labels[cut:]),
        test=(parts["t10k-images-idx3"].unsqueeze(1), parts["t10k-labels-idx1"].long()),
    )


def _mlp(hidden: int) -> nn.Module:
    return nn.Sequential(Pixels(), nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def _cnn(channels: int) -> nn.Module:
    return nn.Sequential(
        Pixels(),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * 14 * 14, 10),
    )


def mnist_mlp(hidden: int = 256, lr: float = 0.001, path: str = "") -> Recipe:
    """784-256-10."""
    return Recipe(
        name="mnist-mlp",
        description="MNIST, one hidden layer of 256; files by --set path=FOLDER, MANYHANDS_MNIST or download",
        model=partial(_mlp, hidden),
        data=partial(load_mnist, path),
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=lr),
        metrics=("accuracy",),
        epochs=5,
        batch_size=128,
    )


def mnist_cnn(channels: int = 32, lr: float = 0.001, path: str = "") -> Recipe:
    """Convolution, pool, linear."""
    return Recipe(
        name="mnist-cnn",
        description="MNIST, one convolution of 32 channels; files by --set path=FOLDER, MANYHANDS_MNIST or download",
        model=partial(_cnn, channels),
        data=partial(load_mnist, path),
        loss="cross_entropy",
        optimizer=partial(torch.optim.Adam, lr=lr),
        metrics=("accuracy",),
        epochs=3,
        batch_size=128,
    )
