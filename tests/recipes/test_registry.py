"""Recipes are found by name or file, and their settings are read by type."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

from manyhands.errors import UsageError
from manyhands.recipes import Recipe, RecipeData, get, names, with_settings

OWN_RECIPE = """
import torch
from torch import nn
from manyhands.recipes import Recipe, RecipeData

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(3, width)

    def forward(self, x):
        return self.layer(x)

def recipe(width: int = 2, lr=0.5, biased: bool = True, limit: int | None = None):
    return Recipe(
        name="own",
        description="mine",
        model=lambda: Net(width),
        data=lambda: RecipeData(train=(torch.zeros(4, 3), torch.zeros(4, width))),
        loss="mse",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        epochs=7,
    )
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "own_recipe.py"
    path.write_text(OWN_RECIPE)
    return path


@pytest.mark.parametrize("name", names())
def test_every_built_in_recipe_builds_a_model_without_touching_data(name: str) -> None:
    recipe = get(name)
    assert recipe.name == name
    assert recipe.source == name
    assert sum(parameter.numel() for parameter in recipe.model().parameters()) > 0
    optimizer = recipe.optimizer(recipe.model().parameters())
    assert optimizer.param_groups[0]["lr"] == recipe.options["lr"]


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown recipe 'digits-cn'.*Did you mean 'digits-cnn'.*\.py file"):
        get("digits-cn")


def test_a_file_defines_a_recipe_with_settings_from_its_parameters(own_file: Path) -> None:
    recipe = get(own_file)
    assert (recipe.name, recipe.epochs, recipe.source) == ("own", 7, str(own_file))
    assert recipe.options == {"width": 2, "lr": 0.5, "biased": True, "limit": None}
    changed = with_settings(recipe, {"width": "5", "lr": "0.25", "biased": "no", "limit": "9", "epochs": "3"})
    assert changed.options == {"width": 5, "lr": 0.25, "biased": False, "limit": 9, "epochs": 3}
    assert changed.epochs == 3
    assert changed.model().layer.weight.shape == (5, 3)


def test_settings_given_one_after_the_other_add_up(own_file: Path) -> None:
    recipe = with_settings(with_settings(get(own_file), {"epochs": "2", "lr": "0.1"}), {"width": "4"})
    assert (recipe.epochs, recipe.options["lr"], recipe.options["width"]) == (2, 0.1, 4)


def test_what_a_file_defines_reaches_a_process_that_cannot_import_it(own_file: Path, tmp_path: Path) -> None:
    packed = tmp_path / "model.pickle"
    packed.write_bytes(cloudpickle.dumps(get(own_file).model()))
    script = f"import pickle; print(type(pickle.load(open({str(packed)!r}, 'rb'))).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd="/", check=False
    )
    assert done.stdout.strip() == "Net", done.stderr


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"learning_rate": "1"}, r"unknown setting of recipe 'linear' 'learning_rate'.*Valid: batch_size, epochs"),
        ({"feature": "1"}, r"Did you mean 'features'"),
        ({"lr": "fast"}, r"lr='fast' is not valid: lr takes a value of type float"),
        ({"samples": "1.5"}, r"samples='1.5' is not valid: samples takes a value of type int"),
        ({"epochs": "0"}, r"epochs is 0; valid: a whole number of at least 1"),
        ({"batch_size": "-4"}, r"batch_size is -4; valid"),
    ],
)
def test_a_wrong_setting_says_what_is_valid(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_settings(get("linear"), settings)


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1", r"defines no recipe\(\)"),
        ("recipe = 3", r"defines recipe as a int"),
        ("def recipe(): return 3", r"returned a int; valid: a manyhands.recipes.Recipe"),
        ("def recipe(lr): return 3", r"parameters without a default: lr"),
    ],
)
def test_a_file_without_a_usable_recipe_says_so(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        get(path)


def test_a_missing_file_and_another_kind_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not exist; valid: a \.py file"):
        get(tmp_path / "nowhere.py")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UsageError, match="is not a Python file"):
        get(tmp_path / "notes.txt")


def test_an_error_of_the_users_file_keeps_its_type(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise KeyError('mine')")
    with pytest.raises(KeyError, match="mine"):
        get(path)
    assert "manyhands_recipe_broken" not in sys.modules


def test_a_recipe_made_by_hand_has_its_fields_as_settings() -> None:
    recipe = Recipe(
        name="hand",
        description="",
        model=lambda: nn.Linear(1, 1),
        data=lambda: RecipeData(train=None),
        loss="mse",
        optimizer=torch.optim.SGD,
    )
    assert with_settings(recipe, {"batch_size": "8"}).batch_size == 8
    with pytest.raises(UsageError, match="unknown setting"):
        with_settings(recipe, {"lr": "1"})


def test_a_built_in_model_is_plain_enough_to_pickle() -> None:
    model = get("gpt").model()
    assert len(pickle.loads(pickle.dumps(model.state_dict()))) == len(model.state_dict())
