"""The linear recipe finds the line that the table was made from."""

from __future__ import annotations

import torch

from manyhands.recipes import get, with_settings


def test_the_table_is_a_function_of_its_seed() -> None:
    recipe = get("linear")
    first, again = recipe.data(), recipe.data()
    other = with_settings(recipe, {"table_seed": "1"}).data()
    assert torch.equal(first.train[0], again.train[0])
    assert not torch.equal(first.train[0], other.train[0])
    assert [len(part[0]) for part in (first.train, first.validation, first.test)] == [6553, 819, 820]


def test_gradient_descent_reaches_the_noise_of_the_table() -> None:
    recipe = get("linear")
    data = recipe.data()
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    x, y = data.train
    for _ in range(recipe.epochs):
        for start in range(0, len(x), recipe.batch_size):
            batch = slice(start, start + recipe.batch_size)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        error = torch.nn.functional.mse_loss(model(data.test[0]), data.test[1]).item()
    assert 0.008 < error < 0.012, "the noise has a deviation of 0.1, so its square is what cannot be learned"
