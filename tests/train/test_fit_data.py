"""fit with every kind of data. All kinds that hold the same rows end in the same weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from jobs import QUIET, ROWS, X, Y, digest_of, mlp, train
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import manyhands as mh


class Rows(Dataset[Any]):
    """A map-style data set, told apart from a TensorDataset by its type."""

    def __init__(self, noise: str | None = None) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index] + self._draw(), int(Y[index])

    def _draw(self) -> float:
        match self.noise:
            case "torch":
                return float(torch.randn(()))
            case "numpy":
                return float(np.random.normal())
            case "random":
                return random.gauss(0, 1)
            case _:
                return 0.0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return samples()


def samples() -> Iterator[tuple[np.ndarray, int]]:
    return ((x.numpy(), int(y)) for x, y in zip(X, Y, strict=True))


@pytest.fixture(scope="module")
def shuffled() -> str:
    return digest_of()


@pytest.fixture(scope="module")
def in_order() -> str:
    return digest_of(fit={"shuffle": False})


SAME = {
    "numpy": lambda: (X.numpy(), Y.numpy()),
    "numpy of other types": lambda: (X.numpy().astype(np.float64), Y.numpy().astype(np.int8)),
    "numpy in Fortran order": lambda: (np.asfortranarray(X.numpy()), Y.numpy()),
    "pandas": lambda: (pandas.DataFrame(X.numpy()), pandas.Series(Y.numpy(), name="class")),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Dataset": lambda: Rows(),
    "Subset of everything": lambda: Subset(TensorDataset(X, Y), range(ROWS)),
    "list of pairs as a Dataset": lambda: DataLoader(
        [(x, int(y)) for x, y in zip(X, Y, strict=True)], 16, shuffle=True
    ),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_rows_give_the_same_weights(kind: str, shuffled: str) -> None:
    assert digest_of(mlp(), SAME[kind]()) == shuffled


ORDERED = {
    "generator": samples,
    "IterableDataset": Stream,
    "DataLoader in order": lambda: DataLoader(TensorDataset(X, Y), batch_size=16),
    "DataLoader of a stream": lambda: DataLoader(Stream(), batch_size=16),
}


@pytest.mark.parametrize("kind", ORDERED)
def test_what_has_an_order_keeps_it(kind: str, in_order: str) -> None:
    assert digest_of(mlp(), ORDERED[kind]()) == in_order


def test_a_loader_gives_its_batch_size_and_collate_function(shuffled: str) -> None:
    def collate(rows: list[Any]) -> Any:
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])

    loader = DataLoader(Rows(), batch_size=16, shuffle=True, collate_fn=collate)
    assert digest_of(mlp(), loader, fit={"batch_size": None}) == shuffled
    assert digest_of(mlp(), DataLoader(Rows(), batch_size=4), fit={"shuffle": True}) == shuffled


def test_a_loader_that_drops_the_last_batch() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, drop_last=True)
    assert digest_of(mlp(), loader) == digest_of(mlp(), (X[:80], Y[:80]), fit={"shuffle": False})


def test_a_memory_map_is_read_where_it_lies(tmp_path: Path, shuffled: str) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    assert digest_of(mlp(), (np.load(tmp_path / "x.npy", mmap_mode="r"), Y.numpy())) == shuffled


class Named(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.body(torch.cat([left, right], dim=1))


def test_several_inputs_by_name_and_by_place(shuffled: str) -> None:
    for inputs in ({"right": X[:, 2:], "left": X[:, :2].numpy()}, (X[:, :2], X[:, 2:])):
        model = Named()
        trainer, _ = train(model, (inputs, Y))
        assert mh.digest(model.body) == shuffled
        assert torch.equal(
            trainer.predict((inputs, Y)), trainer.predict(inputs if isinstance(inputs, dict) else (inputs, Y))
        )


@pytest.mark.parametrize("library", ["torch", "numpy", "random"])
def test_augmentation_is_bound_to_the_lane(library: str, shuffled: str) -> None:
    found = {digest_of(mlp(), Rows(library), workers=workers, fit={"lanes": 3}) for workers in (1, 3)}
    assert len(found) == 1
    assert found != {digest_of(mlp(), Rows(), workers=1, fit={"lanes": 3})}


def test_augmentation_differs_between_epochs_and_samples() -> None:
    class Noise(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.rand(1), torch.zeros(1)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    def spread(output: torch.Tensor, target: torch.Tensor) -> float:
        return float(output.std())

    def mean(output: torch.Tensor, target: torch.Tensor) -> float:
        return float(output.mean())

    model = Mean()
    _, history = train(
        model, Noise(), loss="mse", metrics=[spread, mean], optimizer=mh.optimizer("sgd", lr=0.0), fit={"epochs": 2}
    )
    assert min(history.metrics["spread"]) > 0.1
    assert history.metrics["mean"][0] != history.metrics["mean"][1]


def test_large_data_is_shared_with_the_workers_and_what_they_write_stays_theirs() -> None:
    """A data set that writes on its own array must change neither the caller's nor another worker's."""
    table = np.zeros((ROWS, 2000), np.float32)

    class Scribbler(Dataset[Any]):
        def __init__(self) -> None:
            self.table = table

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            row = torch.from_numpy(self.table[index, :6].copy()) + X[index]
            if mh.worker_slot() is not None:
                self.table[index] = 1 + mh.worker_slot()
            return row, int(Y[index])

    train(mlp(), Scribbler(), workers=2)
    assert not table.any()


def test_uint8_images_stay_bytes_and_rows_of_one_class_are_fine() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is torch.uint8
            return self.layer(x.flatten(1).float() / 255)

    images = np.random.default_rng(0).integers(0, 256, (20, 4, 4), np.uint8)
    trainer, history = train(
        Images(), (images, np.zeros(20, bool)), metrics=["accuracy"], fit={"epochs": 2, "batch_size": 8}
    )
    assert history.metrics["loss"][1] < history.metrics["loss"][0]
    assert trainer.predict(images).shape == (20, 2)


def test_validation_data_may_be_of_another_kind() -> None:
    trainer, history = train(mlp(), (X, Y), fit={"validation": Rows()})
    assert history.metrics["val_loss"] == [trainer.evaluate((X.numpy(), Y.numpy()))["loss"]]


def test_one_row_and_fewer_rows_than_lanes() -> None:
    trainer, history = train(mlp(), (X[:1], Y[:1]), fit={"lanes": 2})
    assert history.metrics["loss"][0] == pytest.approx(mh.Trainer(mlp(), workers=1).evaluate((X[:1], Y[:1]))["loss"])
    assert digest_of(mlp(), (X[:17], Y[:17]), workers=1, fit={"lanes": 4}) == digest_of(
        mlp(), (X[:17], Y[:17]), workers=4, fit={"lanes": 4}
    )
    assert trainer.fit((X[:1], Y[:1]), **QUIET).epochs == [0]
