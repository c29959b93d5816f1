"""The rows of tables that one shard has, with their optimizer state, in memory that is private to its server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from manyhands.comm.envelope import Stream
from manyhands.server.row_share import Rows, RowShare, bytes_of
from manyhands.sync.optimizer_state import Template
from manyhands.sync.rows import RULES, add_up

__all__ = ["RowStore"]


class RowStore:
    """Rows of one shard. A row changes only when an update has a gradient for it."""

    def __init__(self, share: RowShare, template: Template) -> None:
        self._share, self._template = share, template
        self._holder = template.build(())  # only its numbers are used
        self._planes = [
            [torch.empty(len(ids), table.width) for _ in range(1 + len(table.planes))]
            for ids, table in zip(share.ids, share.specs, strict=True)
        ]
        self._steps = np.zeros(len(share.specs), np.int64)

    def state(self) -> list[memoryview]:
        """All of it; views."""
        return [*(bytes_of(plane) for group in self._planes for plane in group), memoryview(self._steps.view(np.uint8))]  # type: ignore[arg-type]

    def install(self, stream: Stream) -> None:
        """Take the state."""
        for home in self.state():
            stream.fill(home)

    def read(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows of table ``index``."""
        return self._planes[index][0].index_select(0, self._share.positions(index, ids))

    @torch.no_grad()
    def apply(self, updates: Sequence[Sequence[Rows | None]], row: np.ndarray, factor: float) -> None:
        """Take a step with the rows of these updates, and the optimizer's numbers of ``row``."""
        self._template.set_hyper(self._holder, row.tolist())
        for index, table in enumerate(self._share.specs):
            parts = [part for part in (rows[index] for rows in updates) if part is not None]
            if not parts:
                continue
            self._steps[index] += 1
            ids, gradient = add_up(parts, factor)
            at, planes, numbers = self._share.positions(index, ids), self._planes[index], self._holder.param_groups
            group = numbers[table.group]
            rows = [plane.index_select(0, at) for plane in planes]
            RULES[table.rule].apply(rows, -gradient if group.get("maximize") else gradient, group, self._steps[index])
            for plane, changed in zip(planes, rows, strict=True):
                plane.index_copy_(0, at, changed)
