"""Limits on the gradient: small transforms of the reduced gradient, applied in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from manyhands.errors import UsageError

__all__ = ["Clip", "ClipNorm", "ClipValue", "resolve_clip"]


@runtime_checkable
class Clip(Protocol):
    """A transform of the reduced gradient. ``needs_norm`` asks for the global norm to be known first."""

    @property
    def needs_norm(self) -> bool: ...

    def __call__(self, gradient: torch.Tensor, norm: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ClipNorm:
    """Scale the whole gradient down to a global 2-norm of at most ``limit``."""

    limit: float
    needs_norm = True

    def __post_init__(self) -> None:
        _check("ClipNorm", self.limit)

    def __call__(self, gradient: torch.Tensor, norm: float) -> None:
        scale = self.limit / (norm + 1e-6)
        if scale < 1:
            gradient.mul_(scale)


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Cut every element to [-limit, limit]."""

    limit: float
    needs_norm = False

    def __post_init__(self) -> None:
        _check("ClipValue", self.limit)

    def __call__(self, gradient: torch.Tensor, norm: float) -> None:
        gradient.clamp_(-self.limit, self.limit)


def _check(name: str, limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise UsageError(f"{name} received {limit!r}; valid is a number above 0")


def resolve_clip(clip: float | Clip | Sequence[Clip] | None) -> tuple[Clip, ...]:
    """A number means a global norm; a sequence is applied in its order."""
    if clip is None:
        return ()
    if isinstance(clip, (int, float)) and not isinstance(clip, bool):
        return (ClipNorm(float(clip)),)
    chain = tuple(clip) if isinstance(clip, (list, tuple)) else (clip,)
    for item in chain:
        if not isinstance(item, Clip):
            raise UsageError(
                f"clip received {item!r}; valid: a number, mh.ClipNorm(x), mh.ClipValue(x), or several in a list"
            )
    if any(item.needs_norm for item in chain[1:]):
        raise UsageError("clip: the norm is taken of the gradient as it was computed, so ClipNorm must come first")
    return chain
