"""The digits recipes: the whole data set in three disjoint parts, and a network that reads it well."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from manyhands.recipes import Recipe, get

pytestmark = pytest.mark.usefixtures("one_thread")


def train_plainly(recipe: Recipe, epochs: int) -> float:
    """Test accuracy after a plain PyTorch loop over the recipe."""
    data = recipe.data()
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    x, y = data.train
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(recipe.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return (model(data.test[0]).argmax(1) == data.test[1]).double().mean().item()


def test_the_parts_are_the_data_set_cut_in_three() -> None:
    data = get("digits-cnn").data()
    parts = (data.train, data.validation, data.test)
    assert sum(len(x) for x, _ in parts) == 1797
    assert len(data.test[0]) >= 350
    rows = sorted((*x.flatten().tolist(), int(label)) for xs, ys in parts for x, label in zip(xs, ys, strict=True))
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32) / 16.0
    assert rows == sorted((*row, int(label)) for row, label in zip(pixels.tolist(), labels, strict=True))
    for _, labels_of_part in parts:
        counts = torch.bincount(labels_of_part, minlength=10)
        assert counts.max() - counts.min() <= 0.1 * counts.sum() / 10 + 2, "each part has its share of every digit"


def test_the_cnn_reaches_98_percent_in_half_its_epochs() -> None:
    recipe = get("digits-cnn")
    assert train_plainly(recipe, recipe.epochs // 2) >= 0.98


def test_the_mlp_reaches_95_percent() -> None:
    recipe = get("digits-mlp")
    assert train_plainly(recipe, recipe.epochs) >= 0.95
