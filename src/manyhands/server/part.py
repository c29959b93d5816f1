"""The part of a state that one shard has, in any arena: which bytes they are, and in which order they travel.

Arenas of the caller, of workers and of servers have the same planes and units, so the bytes of a part fit everywhere.
The first part has the buffers of the model beside its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from manyhands.comm.arena import Arena, dtype_of
from manyhands.core.placement import place_units

__all__ = ["Part", "size_bytes"]


def size_bytes(pieces: Sequence[memoryview]) -> int:
    """How many bytes these are."""
    return sum(piece.nbytes for piece in pieces)


class Part:
    """Shard ``shard`` of ``shards``, in ``arena``. What it returns are views: writing to them is changing the state."""

    def __init__(self, arena: Arena, shard: int, shards: int) -> None:
        self._arena = arena
        units = arena.spec.units
        owners = place_units([unit.stop - unit.start for unit in units], dict.fromkeys(range(shards), 1.0))
        self.units = [number for number, owner in enumerate(owners) if owner == shard]
        self._rows = slice(self.units[0], self.units[-1] + 1) if self.units else slice(0, 0)
        self._bytes = slice(units[self.units[0]].start, units[self.units[-1]].stop) if self.units else slice(0, 0)
        self._has_buffers = shard == 0
        parameters = {units[number].parameter for number in self.units}
        self.segments = self._cut()
        """The runs of values of one parameter: its number, its type, and which bytes of the part they are."""
        self._extras = [number for number, extra in enumerate(arena.spec.extras) if extra.parameter in parameters]

    def _cut(self) -> list[tuple[int, torch.dtype, slice]]:
        spec, found = self._arena.spec, list[tuple[int, torch.dtype, slice]]()
        for unit in (spec.units[number] for number in self.units):
            start, stop = unit.start - self._bytes.start, unit.stop - self._bytes.start
            if found and found[-1][0] == unit.parameter:
                found[-1] = (unit.parameter, found[-1][1], slice(found[-1][2].start, stop))
            else:
                found.append((unit.parameter, dtype_of(spec.parameters[unit.parameter].dtype), slice(start, stop)))
        return found

    def of(self, plane: torch.Tensor) -> torch.Tensor:
        """Our bytes of a plane."""
        return plane[self._bytes]

    def state(self) -> list[memoryview]:
        """All that a server holds: parameters, optimizer state, buffers."""
        arena = self._arena
        planes = [arena.plane(index)[self._bytes] for index in range(1 + len(arena.spec.planes))]
        tensors = [*planes, *map(arena.extra, self._extras), *self._buffers(arena.buffers())]
        numbers = [arena.scalars[self._rows], arena.control.unit_ready[self._rows]]
        return [*map(_of_tensor, tensors), *map(_of_array, numbers)]

    def parameters(self, values: torch.Tensor | None = None) -> list[memoryview]:
        """What a worker reads; ``values``: instead of the parameters as they are."""
        values = self._arena.plane(0)[self._bytes] if values is None else values
        return [_of_tensor(t) for t in (values, *self._buffers(self._arena.buffers()))]

    def pulled(self, slot: int) -> list[memoryview]:
        """Where it goes at the worker in ``slot``."""
        buffers = self._buffers(self._arena.pulled_buffers(slot))
        return [_of_tensor(t) for t in (self._arena.pull(slot)[self._bytes], *buffers)]

    def update(self, lane: int) -> list[memoryview]:
        """What a worker brings: which parameters have a gradient, their gradients, and the buffers that it left."""
        tensors = (self._arena.lane(lane)[self._bytes], *self._buffers(self._arena.buffers(lane)))
        return [_of_array(self._arena.present[lane]), *map(_of_tensor, tensors)]

    def _buffers(self, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        return buffers if self._has_buffers else []


def _of_tensor(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _of_array(array: np.ndarray) -> memoryview:
    assert array.flags.c_contiguous
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
