"""The policy ``mixing`` in a Trainer: workers make steps on parameters of their own, and bring them now and then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands.core.policies import Mixing
from manyhands.sync.clip import Clip
from manyhands.train.async_local import SpanRunner, WorkerState
from manyhands.train.optimizers import optimizer as optimizer_named
from manyhands.train.state import ModelState

__all__ = ["job_of_mixing", "lay_out_mixing"]


class OwnRunner(SpanRunner):
    """Computes the batches of a lease on the worker's own parameters, and brings what these have become."""

    def _contribute(self, rows: Sequence[int]) -> bool:
        for index, own in enumerate(self._inner.parameters):
            target = self._replica.place(index)
            assert target is not None
            with torch.no_grad():
                target.copy_(own)
        return any(rows)


def lay_out_mixing(
    policy: Mixing, model: nn.Module, optimizer: torch.optim.Optimizer, workers: int, servers: int, **shape: Any
) -> ModelState:
    """The state of a run. What is applied is the step that the policy decides on, as it is."""
    plain = optimizer_named("sgd", lr=1.0, fused=False)
    return WorkerState(model, optimizer, plain, workers=workers, servers=servers, span=policy.every, **shape)


def job_of_mixing(policy: Mixing, state: ModelState, clips: tuple[Clip, ...]) -> dict[str, Any]:
    """What workers and servers are told."""
    assert isinstance(state, WorkerState)
    runner = partial(OwnRunner, inner=state.inner, scalars=state.scalars, clips=clips, fragment_of=state.fragment_of)
    return {"template": state.template, "clips": (), "runner": runner, "policy": policy}
