"""Local steps of workers that wait for nobody: how a worker computes an update of several batches, and what is kept.

A worker leases consecutive batches, makes a step of the user's optimizer with each on its own copy of the parameters,
and brings how far it moved. To the servers that is an update as any other; it is in the log once, with all its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.sync.client import Courier
from manyhands.train.local import LocalState, ShareRunner
from manyhands.train.state import Needs, state_in

__all__ = ["SpanRunner", "WorkerState"]


class SpanRunner(ShareRunner):
    """Computes the batches of a lease, each whole and with a step of the user's optimizer."""

    def _batches(self) -> range:
        assert isinstance(self._stepper, Courier)
        return range(self._stepper.step, self._stepper.step + self._stepper.span)

    def _weight(self, rows: Sequence[int]) -> tuple[int, int]:
        """The change has the weight of the rows of a step, where a whole batch weighs 1: however many steps a worker
        makes, a sample has the same say."""
        return sum(rows), sum(1 for count in rows if count) * self._course.batch_size

    def _contribute(self, rows: Sequence[int]) -> bool:
        """Nothing is brought where no step was finite."""
        return any(rows) and super()._contribute(rows)


class WorkerState(LocalState):
    """One model in one arena, with the outer optimizer's state, and the user's optimizer's state of every worker.

    What a worker keeps lies in its seat: whoever takes the seat after it goes on with it. In a checkpoint there is
    the mean, as workers come and go.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        outer: Callable[[Iterable[Any]], torch.optim.Optimizer],
        memory: Sequence[str] = (),
        *,
        workers: int,
        servers: int,
        span: int,
        **shape: int,
    ) -> None:
        """``workers``: the seats that begin with the state that is known; others begin without. ``span``: batches of
        an update, at most."""
        self._workers = workers
        needs = Needs(exchange=True, by_row=False, servers=servers, span=span)
        super().__init__(model, optimizer, outer, memory, needs, **shape)

    def _banks(self) -> list[tuple[int, int]]:
        exchange = self.arena.exchange()
        return [(count, slot) for slot, count in enumerate((exchange.asked - exchange.refused).tolist())]

    def _workers_tensors(self) -> dict[str, torch.Tensor]:
        """What a codec left out of changes; of the optimizers' state there is the mean."""
        found = super()._workers_tensors().items()
        return {
            name.replace("/residual/", "/change_residual/", 1): tensor
            for name, tensor in found
            if name.split("/")[2] == "residual"
        }

    def _give(self, step: int, state: Mapping[str, Mapping[str, Any]]) -> None:
        states = [state.get(entry.name, {}) for entry in self.arena.spec.parameters]
        for slot in range(self._workers):
            self._shares.write(0, slot, states)  # nobody has asked for anything yet

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Take the state of a checkpoint; every worker begins with the same."""
        super().load(tensors, step)
        self._give(step, state_in(tensors, "optimizer"))
