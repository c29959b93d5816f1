"""``manyhands demo``: the main job in one command."""

from __future__ import annotations

from dataclasses import replace

from manyhands.commands.options import DEFAULT_OUTPUT, DEFAULT_TRAINING, Output, TrainingOptions
from manyhands.commands.training import prepare, run_job

__all__ = ["demo"]

WORKERS = "2"


def demo(*, options: TrainingOptions = DEFAULT_TRAINING, output: Output = DEFAULT_OUTPUT) -> int:
    """Train on real handwritten digits with worker processes, test the result, print a summary."""
    return run_job(prepare("digits-cnn", replace(options, workers=options.workers or WORKERS)), output)
