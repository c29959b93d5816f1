"""The models and the synthetic MNIST-shaped data that every side of every benchmark trains on."""

import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

FEATURES = 784
CLASSES = 10
SLEEP_PER_ROW_S = 0.001
SLOWDOWN = 4.0


class Sleeper(nn.Module):
    """A linear model whose forward sleeps a fixed time per row: a worker's speed that does not depend on free cores.

    The worker whose slot is `slow_slot` sleeps `SLOWDOWN` times as long.
    """

    def __init__(self, *, slow_slot: int, own_slot: Callable[[], int | None]) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.slow_slot = slow_slot
        self.own_slot = own_slot

    def forward(self, x: Tensor) -> Tensor:
        slow = self.slow_slot >= 0 and self.own_slot() == self.slow_slot
        time.sleep(len(x) * SLEEP_PER_ROW_S * (SLOWDOWN if slow else 1.0))
        output: Tensor = self.linear(x)
        return output


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 13 * 13, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: _perceptron(FEATURES, 256, CLASSES),
    "wide": lambda: _perceptron(FEATURES, 2048, 2048, CLASSES),  # 5.8 million parameters
    "cnn": _cnn,
    "hundred": lambda: _perceptron(FEATURES, *[4400] * 6, CLASSES),  # 100 million parameters
}


def build(
    name: str, *, slow_slot: int = -1, own_slot: Callable[[], int | None] = lambda: None, seed: int = 0
) -> nn.Module:
    """The named model with seeded weights; `own_slot` tells the sleeper which worker it runs in."""
    torch.manual_seed(seed)
    if name == "sleeper":
        return Sleeper(slow_slot=slow_slot, own_slot=own_slot)
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; valid: {', '.join([*MODELS, 'sleeper'])}")
    return MODELS[name]()


def make_data(rows: int, *, storage: str = "memory", seed: int = 0) -> tuple[Tensor | np.memmap, Tensor]:
    """Seeded features and labels. With storage "shared" the features lie in shared memory, with "file" they are a
    memory-mapped file in the current folder."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    if storage == "memory":
        return torch.rand(rows, FEATURES, generator=generator), labels
    if storage == "shared":
        shared = torch.empty(rows, FEATURES).share_memory_()
        torch.rand(rows, FEATURES, generator=generator, out=shared)
        return shared, labels
    mapped = np.memmap("features.bin", dtype=np.float32, mode="w+", shape=(rows, FEATURES))
    for start in range(0, rows, 16_384):
        block = mapped[start : start + 16_384]
        block[:] = torch.rand(len(block), FEATURES, generator=generator).numpy()
    mapped.flush()
    return np.memmap("features.bin", dtype=np.float32, mode="r", shape=(rows, FEATURES)), labels
