"""The GPT recipe: windows of a text, a causal model, and learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyhands.errors import DataError, UsageError
from manyhands.recipes import get, with_settings
from manyhands.recipes.gpt import bits_per_byte

SMALL = {"context": "16", "layers": "1", "width": "32", "heads": "2", "dropout": "0", "lr": "0.01"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"many hands make light work. " * 400)
    return path


def test_the_default_model_has_one_to_two_million_parameters() -> None:
    count = sum(parameter.numel() for parameter in get("gpt").model().parameters())
    assert 1_000_000 <= count <= 2_000_000


def test_without_a_text_it_says_how_to_give_one() -> None:
    with pytest.raises(DataError, match="--set text=PATH"):
        get("gpt").data()


def test_a_text_that_is_missing_or_too_short_is_named(tmp_path: Path) -> None:
    recipe = get("gpt")
    with pytest.raises(DataError, match=r"nowhere.txt.*no such file"):
        with_settings(recipe, {"text": str(tmp_path / "nowhere.txt")}).data()
    short = tmp_path / "short.txt"
    short.write_bytes(b"too short")
    with pytest.raises(DataError, match="has 9 bytes; valid: at least 2561 bytes"):
        with_settings(recipe, {"text": str(short)}).data()


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UsageError, match="width 160 does not divide into 7 heads"):
        with_settings(get("gpt"), {"heads": "7"}).model()


def test_each_window_is_followed_by_its_next_bytes(text: Path) -> None:
    data = with_settings(get("gpt"), {"text": str(text), "context": "16"}).data()
    inputs, following = data.train
    assert torch.equal(inputs[:, 1:], following[:, :-1])
    assert torch.equal(inputs[1:, 0], following[:-1, -1])
    whole = text.read_bytes()
    assert bytes(inputs[3].tolist()) == whole[48:64]
    assert sum(len(part[0]) for part in (data.train, data.validation, data.test)) == (len(whole) - 1) // 16


def test_no_position_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = with_settings(get("gpt"), SMALL).model().eval()
    text = torch.randint(0, 256, (1, 16))
    changed = text.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_it_learns_a_text_that_repeats(text: Path) -> None:
    recipe = with_settings(get("gpt"), {"text": str(text), **SMALL})
    data = recipe.data()
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    x, y = data.train
    for _ in range(5):
        for start in range(0, len(x), recipe.batch_size):
            optimizer.zero_grad()
            recipe.loss(model(x[start : start + recipe.batch_size]), y[start : start + recipe.batch_size]).backward()
            optimizer.step()
    with torch.no_grad():
        assert bits_per_byte(model(data.test[0]), data.test[1]).item() < 2.0, "8 without any knowledge"
