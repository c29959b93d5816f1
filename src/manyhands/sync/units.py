"""Where parameters are cut into units: what one worker reduces and applies at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from manyhands.comm.arena import Unit
from manyhands.sync.factors import rows_together

__all__ = ["UNIT_BYTES", "cut_units"]

# A multiple of every vector width, so that where a tensor is cut changes no rounding: kernels treat the tail of a
# tensor differently, and only the last unit of a tensor has one. Small enough to share out small models evenly.
UNIT_BYTES = 128 * 1024


def cut_units(arena_entries: Sequence[Any], elementwise: bool, factored: Collection[int] = ()) -> list[Unit]:
    """Cut every parameter into units, or make each one a unit where the optimizer needs whole tensors.

    Those that are ``factored`` are cut between rows, where their products are.
    """
    units = []
    for index, entry in enumerate(arena_entries):
        end = entry.offset + entry.size_bytes
        size = UNIT_BYTES if elementwise else max(entry.size_bytes, 1)
        if index in factored:
            size = rows_together(entry.shape) * entry.size_bytes // entry.shape[0]
        units += [Unit(index, start, min(start + size, end)) for start in range(entry.offset, end, size)]
    return units
