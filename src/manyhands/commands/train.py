"""``manyhands train RECIPE``: train a recipe into a run folder."""

from __future__ import annotations

from manyhands.commands.options import DEFAULT_OUTPUT, DEFAULT_TRAINING, Output, TrainingOptions
from manyhands.commands.training import prepare, run_job

__all__ = ["train"]


def train(recipe: str, /, *, options: TrainingOptions = DEFAULT_TRAINING, output: Output = DEFAULT_OUTPUT) -> int:
    """Train a recipe with worker processes, into a run folder.

    Parameters
    ----------
    recipe
        A built-in name (see: manyhands recipes) or a .py file that defines recipe().
    """
    return run_job(prepare(recipe, options), output)
