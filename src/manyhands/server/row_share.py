"""The rows of tables that one shard has: which they are, and how they lie between a whole table and a shard's own.

A shard keeps its rows one after the other, in the order of their numbers. Its state is plane after plane of every
table, then how many steps each table has seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from manyhands.comm.envelope import Stream
from manyhands.comm.tables import Table, Tables
from manyhands.core.placement import place_rows
from manyhands.errors import FrameError

__all__ = ["RowShare", "Rows", "bytes_of", "pack"]

Rows = tuple[torch.Tensor, torch.Tensor]
"""Numbers of rows, and a gradient for each."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor; a view."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class RowShare:
    """What shard ``shard`` of ``shards`` has of tables."""

    def __init__(self, specs: Sequence[Table], shard: int, shards: int) -> None:
        self.specs = specs
        self.ids = [
            torch.from_numpy(np.flatnonzero(place_rows(np.arange(table.rows), shards) == shard)) for table in specs
        ]
        """By table: the numbers of the rows, ascending."""

    @property
    def size_bytes(self) -> int:
        """Of the state."""
        planes = [4 * len(ids) * t.width * (1 + len(t.planes)) for ids, t in zip(self.ids, self.specs, strict=True)]
        return sum(planes) + 8 * len(self.specs)

    def positions(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Where rows lie in this shard; raises FrameError if one does not."""
        mine = self.ids[index]
        at = torch.searchsorted(mine, ids).clamp_(max=max(len(mine) - 1, 0))
        if len(ids) and (not len(mine) or not torch.equal(mine[at], ids)):
            raise FrameError(f"rows of {self.specs[index].name} that another shard has, or nobody")
        return at

    # -- updates --------------------------------------------------------------------------------------------
    def take(self, stream: Stream) -> list[Rows | None]:
        """The rows of an update, table by table; None for a table that was not used."""
        found: list[Rows | None] = []
        for brought, table in zip(_numbers(stream, len(self.specs)).tolist(), self.specs, strict=True):
            if not 0 <= brought <= table.rows + 1:
                raise FrameError(f"an update of {brought - 1} rows of {table.name}, which has {table.rows}")
            if not brought:
                found.append(None)
                continue
            ids, size = _numbers(stream, brought - 1), 4 * table.width * (brought - 1)
            self.positions(len(found), ids)
            found.append((ids, _floats(stream, size).view(-1, table.width)))
        return found

    # -- the state, in an arena that has whole tables --------------------------------------------------------
    def gather(self, tables: Tables) -> list[memoryview]:
        """The state of this shard; a copy."""
        planes = [plane[ids] for ids, group in zip(self.ids, tables.planes, strict=True) for plane in group]
        return [*map(bytes_of, planes), memoryview(tables.steps[0, 0].tobytes())]

    def scatter(self, stream: Stream, tables: Tables) -> None:
        """Take the state of this shard."""
        for ids, group in zip(self.ids, tables.planes, strict=True):
            for plane in group:
                plane[ids] = _floats(stream, 4 * len(ids) * plane.shape[1]).view(-1, plane.shape[1])
        tables.steps[:] = _numbers(stream, len(self.specs)).numpy()


def pack(rows: Sequence[Rows | None]) -> list[memoryview]:
    """The rows of an update, as ``take`` reads them."""
    counts = np.array([0 if one is None else len(one[0]) + 1 for one in rows], np.int64)
    return [memoryview(counts.tobytes()), *(bytes_of(part) for one in rows if one is not None for part in one)]


def _numbers(stream: Stream, count: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(stream.take(8 * count), np.int64).copy())


def _floats(stream: Stream, size: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(stream.take(size), np.float32).copy())
