"""What a server does for the rows of tables: applies the updates that the log names to those rows that it holds.

A row changes only when an update has a gradient for it (lazily, as torch's own optimizers treat sparse gradients).
Before a batch of rows changes, the rows and their optimizer state are saved and the server's mark names the batch;
the caller puts them back if the server dies over it. ``finished`` is written once the batch is changed: from then on it
is not put back, and a successor does not do it again. So each update has exactly one effect on each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from manyhands.comm.arena import Arena
from manyhands.comm.tables import batch_rows
from manyhands.core.placement import place_rows
from manyhands.sync.optimizer_state import Template

__all__ = ["RULES", "RowApplier", "RowRule", "add_up", "recover_rows"]

_BATCH_BITS = 24  # of the number of a batch; the rest is the number of the log entry


@dataclass(frozen=True, slots=True)
class RowRule:
    """How rows are updated."""

    planes: tuple[str, ...]
    """The optimizer state of a row, by torch's names; it begins with that of the caller's optimizer, or with zeros."""
    apply: Callable[[Sequence[torch.Tensor], torch.Tensor, Mapping[str, Any], int], None]
    """Changes (values, *state) by a gradient, the optimizer's numbers, and the number of the step from 1."""


def _sgd(rows: Sequence[torch.Tensor], gradient: torch.Tensor, numbers: Mapping[str, Any], step: int) -> None:
    rows[0].add_(gradient, alpha=-numbers["lr"])


def _adagrad(rows: Sequence[torch.Tensor], gradient: torch.Tensor, numbers: Mapping[str, Any], step: int) -> None:
    values, total = rows
    rate = numbers["lr"] / (1 + (step - 1) * numbers["lr_decay"])
    total.addcmul_(gradient, gradient)
    values.addcdiv_(gradient, total.sqrt().add_(numbers["eps"]), value=-rate)


def _adam(rows: Sequence[torch.Tensor], gradient: torch.Tensor, numbers: Mapping[str, Any], step: int) -> None:
    values, mean, square = rows
    rate, (beta1, beta2) = numbers["lr"], numbers["betas"]
    if decay := numbers.get("weight_decay"):  # decoupled, or it would have been refused
        values.mul_(1 - rate * decay)
    mean.lerp_(gradient, 1 - beta1)
    square.lerp_(gradient * gradient, 1 - beta2)
    rate *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    values.addcdiv_(mean, square.sqrt().add_(numbers["eps"]), value=-rate)


RULES: dict[str, RowRule] = {
    "sgd": RowRule((), _sgd),
    "adagrad": RowRule(("sum",), _adagrad),
    "adam": RowRule(("exp_avg", "exp_avg_sq"), _adam),
}


def add_up(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that several updates bring, each once, and the sum of their gradients, times ``factor``."""
    ids, gradient = parts[0]
    if len(parts) > 1:
        ids, where = torch.unique(torch.cat([part[0] for part in parts]), return_inverse=True)
        gradient = torch.zeros(len(ids), gradient.shape[1]).index_add_(0, where, torch.cat([p[1] for p in parts]))
    return ids, gradient if factor == 1 else gradient * factor


class RowApplier:
    """The rows of one server."""

    def __init__(self, arena: Arena, index: int, template: Template, beat: Callable[[], None]) -> None:
        """``index``: which of the servers this is; ``beat``: called after every batch of rows, as a sign of life."""
        self._tables, self._index, self._template, self._beat = arena.tables(), index, template, beat
        self._holder = template.build(())  # only its numbers are used

    @torch.no_grad()
    def apply(self, number: int, members: Sequence[int], hyper: np.ndarray, factor: float, compensation: float) -> None:
        """Apply entry ``number`` of the log, but for what a predecessor has finished of it."""
        tables = self._tables
        self._template.set_hyper(self._holder, hyper.tolist())
        # Two banks in turns: a successor that does an entry again counts from the same number.
        before, after = (tables.steps[turn % 2, self._index] for turn in (number, number + 1))
        batch = number << _BATCH_BITS
        for index, table in enumerate(tables.specs):
            bringing = [slot for slot in members if tables.brought[slot, index]]
            after[index] = before[index] + bool(bringing)
            if not bringing:
                continue
            ids, gradient = self._collect(index, bringing, factor, compensation)
            size = batch_rows(table)
            for first in range(0, len(ids), size):
                batch += 1
                if batch > tables.finished[self._index]:
                    part = slice(first, first + size)
                    self._change(index, ids[part], gradient[part], batch, int(after[index]))
                    self._beat()

    def _collect(
        self, index: int, slots: Sequence[int], factor: float, compensation: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Our rows of a table that the members bring, each once, and the sum of their gradients."""
        return add_up([self._brought(slot, index, compensation) for slot in slots], factor)

    def _brought(self, slot: int, index: int, compensation: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Our part of what one worker brings. Its place stays as it is, so that it can be done again."""
        place, count = self._tables.place(slot, index), int(self._tables.brought[slot, index]) - 1
        ids, gradient, read = place.ids[:count], place.gradients[:count], place.values[:count]
        if self._tables.servers > 1:
            ours = torch.from_numpy(np.flatnonzero(place_rows(ids.numpy(), self._tables.servers) == self._index))
            ids, gradient, read = ids[ours], gradient[ours], read[ours]
        if compensation:
            moved = self._tables.planes[index][0].index_select(0, ids) - read
            gradient = torch.addcmul(gradient, gradient * gradient, moved, value=compensation)
        return ids, gradient

    def _change(self, index: int, ids: torch.Tensor, gradient: torch.Tensor, batch: int, step: int) -> None:
        tables, table = self._tables, self._tables.specs[index]
        numbers = self._holder.param_groups[table.group]
        saved_ids, saved = tables.undo(self._index, index, len(ids))
        saved_ids.copy_(ids)
        for plane, kept in zip(tables.planes[index], saved, strict=True):
            torch.index_select(plane, 0, ids, out=kept)
        tables.undo_table[self._index], tables.undo_rows[self._index] = index, len(ids)
        tables.mark[self._index] = batch
        rows = [kept.clone() for kept in saved]
        RULES[table.rule].apply(rows, -gradient if numbers.get("maximize") else gradient, numbers, step)
        # Each number is stored once, in its final form: whoever reads meanwhile sees the old or the new one.
        for plane, changed in zip(tables.planes[index], rows, strict=True):
            plane.index_copy_(0, ids, changed)
        tables.finished[self._index] = batch
        tables.mark[self._index] = 0


def recover_rows(arena: Arena, slot: int) -> bool:
    """Put back the rows that a dead server was changing; True when there were any."""
    server = slot - arena.spec.slots + arena.spec.exchange
    if not arena.spec.tables or server < 0:
        return False
    tables = arena.tables()
    half_done = tables.mark[server] not in (0, tables.finished[server])
    if half_done:
        index = int(tables.undo_table[server])
        ids, saved = tables.undo(server, index, int(tables.undo_rows[server]))
        for plane, kept in zip(tables.planes[index], saved, strict=True):
            plane.index_copy_(0, ids, kept)
    tables.mark[server] = 0
    return bool(half_done)
