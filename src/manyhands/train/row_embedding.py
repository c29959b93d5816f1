"""The worker's end of tables that are held by row: embedding layers that fetch the rows they are asked for.

The first time that a chunk needs a row, the row is copied from the table into the worker's place; it stays what it
is until the chunk is done. A layer computes with the few rows of its call, and what autograd finds out about them goes
into the place when the chunk is done. Outside of a chunk (evaluation) a layer looks straight into the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.comm.tables import RowPlace
from manyhands.errors import ModelError

__all__ = ["FetchRows", "RowEmbeddings"]


FetchRows = Callable[[int, torch.Tensor, torch.Tensor], None]


class _Rows:
    """The rows of one table that the chunk in progress has needed so far."""

    def __init__(
        self, fetch: Callable[[torch.Tensor, torch.Tensor], None], place: RowPlace, padding: int | None
    ) -> None:
        self._fetch_rows, self._place, self._padding = fetch, place, padding
        self.count = 0
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        self.count = 0
        self._calls.clear()

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """What ``nn.Embedding`` would return, with a graph that leads to the rows of this call alone."""
        distinct, where = torch.unique(ids.long(), return_inverse=True)
        positions = self._fetch(distinct)
        rows = self._place.values.index_select(0, positions).requires_grad_(torch.is_grad_enabled())
        self._calls.append((positions, rows))
        return rows.index_select(0, where.flatten()).view(*ids.shape, rows.shape[1])

    def _fetch(self, ids: torch.Tensor) -> torch.Tensor:
        """The positions of these rows (ascending, each once) in the place; copies those that are not there yet."""
        positions = torch.arange(self.count, self.count + len(ids))
        if self.count:
            known, order = self._place.ids[: self.count].sort()
            at = torch.searchsorted(known, ids).clamp_(max=self.count - 1)
            there = known[at] == ids
            positions = torch.where(there, order[at], self.count + (~there).cumsum(0) - 1)
            ids = ids[~there]
        new = slice(self.count, self.count + len(ids))
        if len(ids):
            self._fetch_rows(ids, self._place.values[new])
        self._place.ids[new] = ids
        self.count += len(ids)
        return positions

    def end(self) -> int | None:
        """Lay the gradients into the place; for how many rows, None when the table was not used."""
        place, calls = self._place, [(where, rows.grad) for where, rows in self._calls if rows.grad is not None]
        self._calls.clear()
        if not calls:
            return None
        gradients, touched = place.gradients[: self.count].zero_(), torch.zeros(self.count, dtype=torch.bool)
        for positions, gradient in calls:
            assert gradient is not None
            gradients.index_add_(0, positions, gradient)
            touched[positions] = True
        if self._padding is not None:
            touched &= place.ids[: self.count] != self._padding
        kept = touched.nonzero().flatten()
        if len(kept) < self.count:
            for part in (place.ids, place.values, place.gradients):
                part[: len(kept)] = part[kept]
        return len(kept)


class RowEmbeddings:
    """The layers of one worker's model whose weights are held by row."""

    def __init__(self, arena: Arena, model: nn.Module, home: int, fetch: FetchRows) -> None:
        """``home``: the place of this worker; ``fetch``: copies rows of a table, given by its number."""
        tables = arena.tables()
        self._brought = tables.brought[home]
        self._rows: list[_Rows] = []
        self._inside = False
        self.moved = (0, 0)
        """Rows that were copied from tables for the last chunk, and rows whose gradients it brings."""
        for index, table in enumerate(tables.specs):
            module = model.get_submodule(table.name.rpartition(".")[0])
            assert isinstance(module, nn.Embedding)
            rows = _Rows(partial(fetch, index), tables.place(home, index), module.padding_idx)
            self._rows.append(rows)
            module.forward = self._forward(module, rows)  # type: ignore[method-assign]
            module.weight.register_hook(_refuse(table.name))  # type: ignore[no-untyped-call]

    def _forward(self, module: nn.Embedding, rows: _Rows) -> Any:
        plain = module.forward

        def forward(input: torch.Tensor) -> torch.Tensor:
            by_row = self._inside and input.dtype in (torch.int64, torch.int32)  # of others torch has its own complaint
            return rows.look_up(input) if by_row else plain(input)

        return forward

    def begin(self) -> None:
        """A chunk begins."""
        for rows in self._rows:
            rows.begin()
        self._inside = True

    def give_up(self) -> None:
        """The chunk is not ours any more."""
        self._inside = False

    def end(self) -> None:
        """The chunk is computed: what was found out about its rows is complete."""
        self._inside = False
        counts = [rows.end() for rows in self._rows]
        self._brought[:] = [0 if count is None else count + 1 for count in counts]
        self.moved = (sum(rows.count for rows in self._rows), sum(count or 0 for count in counts))


def _refuse(name: str) -> Any:
    def refuse(gradient: torch.Tensor) -> NoReturn:
        raise ModelError(
            f"{name} is held by row (nn.Embedding with sparse=True), and the loss depends on it in another way than "
            "through its layer, for all rows at once; use the layer alone, or take nn.Embedding(sparse=False)"
        )

    return refuse
