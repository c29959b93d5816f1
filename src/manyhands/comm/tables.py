"""Tables: parameters that are held by row, with their optimizer state, and the places through which rows travel.

A table lies in the arena once. A worker copies the rows that it needs into a place of its own and leaves their
gradients there; whoever holds a row applies them. Nothing here is ever copied whole.

Every place has room for all rows of its table. Shared memory costs something only once it is written, so the room is
free, and a batch may touch as many rows as there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from manyhands.comm.segment import Segment, aligned

__all__ = ["RowPlace", "Table", "Tables", "batch_rows", "tables_bytes"]

_BATCH_BYTES = 1 << 19
_SERVER_WORDS = ("finished", "mark", "undo_table", "undo_rows")


class Table(msgspec.Struct, frozen=True):
    """A parameter of ``rows`` × ``width`` numbers of type float32."""

    name: str
    rows: int
    width: int
    group: int  # of the optimizer
    rule: str  # by which a row is updated
    planes: list[str] = []  # optimizer state, each as large as the table

    @property
    def plane_bytes(self) -> int:
        return aligned(4 * self.rows * self.width)

    @property
    def place_bytes(self) -> int:
        return aligned(8 * self.rows) + 2 * self.plane_bytes


def batch_rows(table: Table) -> int:
    """How many rows a server saves and changes together."""
    return max(_BATCH_BYTES // (4 * table.width), 1)


def _undo_bytes(tables: Sequence[Table]) -> int:
    return max((batch_rows(t) * (8 + 4 * t.width * (1 + len(t.planes))) for t in tables), default=0) + 64


def _words(tables: Sequence[Table], workers: int, servers: int) -> int:
    return servers * (len(_SERVER_WORDS) + 2 * len(tables)) + workers * len(tables)


def tables_bytes(tables: Sequence[Table], workers: int, servers: int) -> int:
    """The room that they need."""
    if not tables:
        return 0
    planes = sum((1 + len(table.planes)) * table.plane_bytes for table in tables)
    places = workers * sum(table.place_bytes for table in tables)
    return aligned(8 * _words(tables, workers, servers)) + planes + servers * aligned(_undo_bytes(tables)) + places


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The rows of one table with which a worker computes: which, as they were read, and their gradients."""

    ids: torch.Tensor
    values: torch.Tensor
    gradients: torch.Tensor


class Tables:
    """Views of the tables of one arena. Arrays are words that the others see."""

    def __init__(self, specs: Sequence[Table], workers: int, servers: int, segment: Segment, offset: int) -> None:
        self.specs, self.servers, self._segment = specs, servers, segment
        words = segment.array(offset, (_words(specs, workers, servers),), np.int64)
        split = servers * len(_SERVER_WORDS), 2 * servers * len(specs)
        rows = words[: split[0]].reshape(len(_SERVER_WORDS), servers)
        self.finished, self.mark, self.undo_table, self.undo_rows = rows
        """Of a server: the last batch of rows that is changed; the one being changed, 0 outside; what it saved."""
        self.steps = words[split[0] : sum(split)].reshape(2, servers, len(specs))
        """How many steps each table has seen, as its server counts them before an even and before an odd entry."""
        self.brought = words[sum(split) :].reshape(workers, len(specs))
        """Rows + 1 of each table for which a worker brings gradients; 0 when it did not use the table."""
        at = offset + aligned(8 * len(words))
        self.planes: list[list[torch.Tensor]] = []
        """Of each table: the values, then the optimizer state."""
        self.offsets: list[int] = []
        """Where the values of each table lie in the segment."""
        for table in specs:
            self.offsets.append(at)
            count = 1 + len(table.planes)
            places = [at + index * table.plane_bytes for index in range(count)]
            self.planes.append([segment.tensor(place, (table.rows, table.width), torch.float32) for place in places])
            at += count * table.plane_bytes
        self._undo, self._undo_bytes = at, aligned(_undo_bytes(specs))
        self._places = at + servers * self._undo_bytes

    def place(self, worker: int, index: int) -> RowPlace:
        """Where a worker has its rows of table ``index``."""
        table, sizes = self.specs[index], [spec.place_bytes for spec in self.specs]
        at = self._places + worker * sum(sizes) + sum(sizes[:index])
        shape = (table.rows, table.width)
        values = at + aligned(8 * table.rows)
        return RowPlace(
            self._segment.tensor(at, (table.rows,), torch.int64),
            self._segment.tensor(values, shape, torch.float32),
            self._segment.tensor(values + table.plane_bytes, shape, torch.float32),
        )

    def brought_gradients(self, worker: int) -> list[torch.Tensor]:
        """The gradients that a worker has in its places, table by table."""
        counts = self.brought[worker].tolist()
        return [self.place(worker, index).gradients[: count - 1] for index, count in enumerate(counts) if count]

    def undo(self, server: int, index: int, rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Where a server saves rows of table ``index`` before it changes them: which, then plane by plane."""
        table, at = self.specs[index], self._undo + server * self._undo_bytes
        size = 4 * rows * table.width
        starts = [at + 8 * rows + plane * size for plane in range(1 + len(table.planes))]
        return (
            self._segment.tensor(at, (rows,), torch.int64),
            [self._segment.tensor(start, (rows, table.width), torch.float32) for start in starts],
        )
