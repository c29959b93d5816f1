"""The parameters and optimizer state of one shard, in memory that is private to the server that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from manyhands.comm.arena import Arena, ArenaSpec
from manyhands.comm.envelope import Stream, pour
from manyhands.core.policies import Apply
from manyhands.core.replication import MOST_TOGETHER
from manyhands.server.coder import Update
from manyhands.server.part import Part
from manyhands.server.row_share import Rows, RowShare
from manyhands.sync.apply import Applier
from manyhands.sync.optimizer_state import Template
from manyhands.sync.prediction import Prediction
from manyhands.sync.row_store import RowStore

__all__ = ["Store"]


class Store:
    """One shard. Two stores that began with the same state and executed the same updates are equal, bit by bit."""

    def __init__(self, spec: ArenaSpec, template: Template, shard: int, rows: RowShare | None = None) -> None:
        """``spec``: of the arena of the run. Of the private one, only the pages of this shard cost memory.
        ``rows``: the share of the shard in tables, where there are some."""
        # Its lanes are for the updates of a step; nobody needs to undo what dies with this process.
        own = msgspec.structs.replace(
            spec,
            lanes=MOST_TOGETHER,
            slots=1,
            samples=0,
            ring=1,
            exchange=0,
            keeps=True,
            undo_bytes=0,
            undo_units=0,
            tables=[],
        )
        self._arena = Arena(own)
        self.part = Part(self._arena, shard, spec.exchange)
        self._applier = Applier(self._arena, template, (), 0)
        self._runs = self._applier.batches(self.part.units)
        self._rates = [number for number, key in enumerate(template.hyper) if key.key == "lr"]
        self.rows = None if rows is None else RowStore(rows, template)
        self._prediction = Prediction(self._arena, self._runs)
        self._place: torch.Tensor | None = None
        self._count = 0
        self._waiting = 0
        self._rows_waiting: list[Sequence[Rows | None]] = []
        self._row = np.zeros(0)

    @property
    def count(self) -> int:
        """How many chunks have had their effect, from the beginning of the run."""
        return self._count

    def install(self, payload: Sequence[memoryview], count: int) -> None:
        """Take the state from ``payload``."""
        stream = Stream(payload)
        for home in self.part.state():
            stream.fill(home)
        if self.rows is not None:
            self.rows.install(stream)
        stream.end()
        self._applier.forget()
        self._count, self._waiting = count, 0
        self._rows_waiting.clear()
        self._prediction.forget()

    def execute(self, update: Update | None, row: np.ndarray, decision: Apply | None) -> None:
        """Take an update into the next step, and take the step if the decision says so.

        ``row``: the optimizer's numbers for this chunk; those of the first chunk of a step count. Without a decision
        the chunk was left out.
        """
        self._count += 1
        if decision is None or update is None:
            return
        present, gradient, *_ = self.part.update(self._waiting)
        pour(update.values, [present, gradient, *self.part.parameters()[1:]])
        if not self._waiting:
            self._row = row.copy()
        self._waiting += 1
        self._rows_waiting.append(update.rows)
        if not decision.step:
            return
        lanes = list(range(self._waiting))
        self._waiting = 0
        mend = None
        if len(lanes) == 1:
            self._row[self._rates] *= decision.scale
        elif decision.scale != 1:
            mend = partial(_scale, decision.scale)
        self._applier.begin_step(self._row, lanes)
        for run in self._runs:
            self._prediction.keep(run)
            self._applier.apply(run, lanes, self._count, 0.0, mend)
        if self.rows is not None:
            self.rows.apply(self._rows_waiting, self._row, decision.scale if mend is not None else 1.0)
        self._rows_waiting.clear()

    def values(self, ahead: float = 0.0) -> torch.Tensor:
        """The parameters as bytes, without buffers; ``ahead``: as they will probably be after so many steps."""
        place = self._arena.plane(0)
        if ahead:
            if self._place is None:
                self._place = torch.zeros(self._arena.plane_bytes, dtype=torch.uint8)
            if self._prediction.write(self._place, ahead):
                place = self._place
            self._prediction.begin()
        return self.part.of(place)

    def parameters(self, values: torch.Tensor | None = None) -> list[memoryview]:
        """What a worker reads; ``values``: instead of the parameters as they are."""
        return self.part.parameters(values)

    def state(self) -> list[memoryview]:
        """All of it."""
        return self.part.state() + ([] if self.rows is None else self.rows.state())

    def close(self) -> None:
        """Give the memory back."""
        self._arena.close()


def _scale(factor: float, gradient: torch.Tensor, start: int, present: np.ndarray) -> None:
    gradient.mul_(factor)
