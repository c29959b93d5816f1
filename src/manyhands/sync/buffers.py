"""Settles the buffers of a model (BatchNorm's averages and the like) after a step: one copy from those of the lanes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyhands.comm.arena import Arena

__all__ = ["settle_buffers"]


def settle_buffers(arena: Arena, rows: Sequence[int]) -> None:
    """The mean of the lanes' buffers, by rows and in lane order; whole numbers are those of the first lane."""
    lanes = [lane for lane, count in enumerate(rows) if count]
    total = sum(rows)
    columns = zip(arena.buffers(), *(arena.buffers(lane) for lane in lanes), strict=True)
    for agreed, *copies in columns:
        if len(copies) == 1 or not (agreed.is_floating_point() or agreed.is_complex()):
            agreed.copy_(copies[0])
            continue
        mean = torch.zeros_like(agreed)
        for lane, copy in zip(lanes, copies, strict=True):
            mean.add_(copy, alpha=rows[lane] / total)
        agreed.copy_(mean)
