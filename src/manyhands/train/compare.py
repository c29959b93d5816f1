"""Whether two sets of named tensors are those of one model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manyhands.errors import CheckpointMismatch

__all__ = ["differences", "mismatch"]


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """Which tensors of two models have other names, shapes or types."""
    problems = [f"{n.removeprefix('model/')} is missing" for n in ours if n not in theirs]
    problems += [f"{n.removeprefix('model/')} is not in this model" for n in theirs if n not in ours]
    for name, tensor in ours.items():
        other = theirs.get(name)
        if other is not None and (other.shape != tensor.shape or other.dtype != tensor.dtype):
            problems.append(
                f"{name.removeprefix('model/')} is {tuple(other.shape)} {other.dtype} there, "
                f"{tuple(tensor.shape)} {tensor.dtype} here"
            )
    return problems


def mismatch(problems: list[str], advice: str) -> CheckpointMismatch:
    """The error that lists which tensors differ."""
    shown = "; ".join(problems[:8]) + (" …" if len(problems) > 8 else "")
    return CheckpointMismatch(f"the checkpoint is of another model: {shown}. What to do: {advice}.")
