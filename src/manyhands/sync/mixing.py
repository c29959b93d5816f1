"""What servers do for workers that keep parameters of their own: elastic averaging (1412.6651).

When a worker brings its parameters, they and those of the servers move towards each other, by the same step. The
worker's lie in its place in the arena, and only servers write them: a worker that dies before it has brought anything,
or brings what somebody else has brought already, goes on from where it was.
"""

from __future__ import annotations

import numpy as np
import torch

from manyhands.comm.arena import Arena
from manyhands.sync.apply import Mend

__all__ = ["mix_with"]


def mix_with(arena: Arena, slot: int, beta: float) -> Mend:
    """Replaces what the worker of ``slot`` has brought by the step of the servers' parameters, and takes the same step
    with the worker's own, the other way. Done again from the same parameters, it does the same."""
    live, own = arena.plane(0), arena.pull(slot)

    def mix(brought: torch.Tensor, start: int, present: np.ndarray) -> None:
        part = slice(start, start + brought.nbytes)
        step = (live[part].view(brought.dtype) - brought).mul_(beta)
        torch.add(brought, step, out=own[part].view(brought.dtype))
        brought.copy_(step)

    return mix
