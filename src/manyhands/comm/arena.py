"""The arena: all state of a run on this host, once, in shared memory that the caller owns.

Parameters lie in one *plane*: a run of bytes in which every tensor has its offset. Optimizer state that has the
shape of its parameter lies in further planes with the same offsets, and so does the gradient of each lane; one
range of bytes therefore means the same elements in all of them. Units are fixed ranges of the plane, cut without
regard to the number of workers: the smallest piece that somebody reduces and updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from manyhands.comm.control import Control, ControlShape
from manyhands.comm.exchange import Exchange, ExchangeShape
from manyhands.comm.segment import Segment, aligned
from manyhands.comm.tables import Table, Tables, tables_bytes

__all__ = [
    "LEFT_OUT", "MOST_SERVERS", "MOST_WORKERS", "Arena", "ArenaSpec", "Entry", "Extra", "Unit", "dtype_of", "lay_out",
]  # fmt: skip

LEFT_OUT = "left_out"
"""The plane of what a codec has left out of sums so far; it is not the optimizer's."""
MOST_WORKERS = 64
"""The seats of an arena."""
MOST_SERVERS = 16


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class Entry(msgspec.Struct, frozen=True):
    """One named tensor at its offset in a plane."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * dtype_of(self.dtype).itemsize


class Extra(msgspec.Struct, frozen=True):
    """Optimizer state that is shaped unlike its parameter (the row and column factors of Adafactor)."""

    parameter: int
    key: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


class Unit(msgspec.Struct, frozen=True):
    """The bytes [start, stop) of the plane, all within one parameter."""

    parameter: int
    start: int
    stop: int


class ArenaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to map an arena."""

    parameters: list[Entry]
    fixed: list[Entry]
    buffers: list[Entry]
    planes: list[str] = []
    extras: list[Extra] = []
    scalars: list[str] = []
    units: list[Unit] = []
    factored: list[int] = []  # parameters whose gradient a lane may leave as its two factors
    lanes: int = 1
    slots: int = 1
    undo_bytes: int = 0
    undo_units: int = 0
    samples: int = 0
    stats: int = 1
    hyper: int = 1
    ring: int = 1
    memory: list[str] = []  # planes that each lane keeps from step to step, such as what a codec left out
    memory_numbers: int = 0  # single numbers that it keeps
    exchange: int = 0  # servers to which workers bring updates one by one; lanes are then places of workers
    ahead: bool = False  # workers have two places, and read the parameters themselves when they begin a chunk
    span: int = 1  # consecutive chunks that such an update may cover
    tables: list[Table] = []  # parameters that servers hold by row; they are not among the others
    keeps: bool = False  # a copy of the state is kept to go back to
    whole: bool = False  # one process applies a whole step; it keeps


def lay_out(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[Entry]:
    """Give every tensor its aligned offset."""
    entries, offset = [], 0
    for name, tensor in tensors:
        entries.append(Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset))
        offset = aligned(offset + tensor.nbytes)
    return entries


def _extent(entries: Sequence[Entry]) -> int:
    return aligned(entries[-1].offset + entries[-1].size_bytes) if entries else 0


@dataclass(slots=True)
class _Layout:
    """Hands out consecutive, aligned places."""

    size_bytes: int = 0
    places: dict[str, int] = field(default_factory=dict)

    def take(self, name: str, size_bytes: int) -> None:
        self.places[name] = self.size_bytes
        self.size_bytes = aligned(self.size_bytes + size_bytes)


class Arena:
    """Views of one arena. The caller creates it, workers attach to its descriptor."""

    def __init__(self, spec: ArenaSpec, fd: int | None = None) -> None:
        self.spec = spec
        self.plane_bytes = _extent(spec.parameters)
        self.buffer_bytes = _extent(spec.buffers)
        self._shape = shape = ControlShape(lanes=spec.lanes, units=len(spec.units), slots=spec.slots)
        layout = _Layout()
        layout.take("control", shape.size_bytes)
        layout.take("planes", self.plane_bytes * (1 + len(spec.planes)))
        layout.take("extras", max((e.offset + _nbytes(e) for e in spec.extras), default=0))
        layout.take("lanes", self.plane_bytes * spec.lanes)
        layout.take("fixed", _extent(spec.fixed))
        layout.take("buffers", self.buffer_bytes * (1 + spec.lanes))
        layout.take("scalars", 8 * len(spec.units) * len(spec.scalars))
        layout.take("norms", 8 * len(spec.units))
        layout.take("undo", aligned(spec.undo_bytes) * spec.slots)
        layout.take("undo_scalars", 8 * spec.slots * spec.undo_units * (len(spec.scalars) + 1))
        self._places = layout.places
        layout.take("kept", sum(aligned(size) for _, size in self._live()) if spec.keeps else 0)
        self._exchange_shape = ExchangeShape(
            workers=spec.lanes, servers=spec.exchange, ring=spec.ring, stats=spec.stats, span=spec.span
        )
        layout.take("exchange", self._exchange_shape.size_bytes if spec.exchange else 0)
        layout.take("pulls", self.plane_bytes * spec.lanes if spec.exchange else 0)
        layout.take("pulled_buffers", self.buffer_bytes * spec.lanes if spec.exchange else 0)
        layout.take("shown", self.plane_bytes * self._exchange_shape.windows if spec.ahead else 0)
        layout.take("tables", tables_bytes(spec.tables, spec.lanes, spec.exchange))
        layout.take("memory", 2 * spec.lanes * len(spec.memory) * self.plane_bytes)
        layout.take("memory_numbers", 8 * 2 * spec.lanes * spec.memory_numbers)
        layout.take("present", spec.lanes * max(len(spec.parameters), 1))
        layout.take("factor_rows", 8 * spec.lanes * len(spec.parameters))
        layout.take("stats", 8 * spec.ring * spec.lanes * spec.stats)
        layout.take("hyper", 8 * spec.ring * spec.hyper)
        layout.take("order", 8 * 2 * spec.samples)
        self.segment = Segment.create(layout.size_bytes, "arena") if fd is None else Segment(fd, layout.size_bytes)
        self.control = Control(shape, self.segment, self._places["control"])
        self.scalars = self._array("scalars", (len(spec.units), len(spec.scalars)), np.float64)
        self.norms = self._array("norms", (len(spec.units),), np.float64)
        self.undo_scalars = self._array(
            "undo_scalars", (spec.slots, spec.undo_units, len(spec.scalars) + 1), np.float64
        )
        self.present = self._array("present", (spec.lanes, max(len(spec.parameters), 1)), np.uint8)
        # Samples over which there are factors, instead of the gradient itself.
        self.factor_rows = self._array("factor_rows", (spec.lanes, len(spec.parameters)), np.int64)
        self._memory_numbers = self._array("memory_numbers", (2, spec.lanes, spec.memory_numbers), np.float64)
        self.stats = self._array("stats", (spec.ring, spec.lanes, spec.stats), np.float64)
        self.hyper = self._array("hyper", (spec.ring, spec.hyper), np.float64)
        self.order = self._array("order", (2, spec.samples), np.int64)

    def exchange(self) -> Exchange:
        """The words between workers and servers."""
        assert self.spec.exchange, "nobody brings updates to this arena"
        return Exchange(self._exchange_shape, self.segment, self._places["exchange"])

    def tables(self) -> Tables:
        """The parameters that servers hold by row."""
        spec = self.spec
        return Tables(spec.tables, spec.lanes, spec.exchange, self.segment, self._places["tables"])

    def _array(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, dtype)
        return self.segment.array(self._places[name], shape, dtype)

    # -- planes ---------------------------------------------------------------------------------------------
    def plane(self, index: int) -> torch.Tensor:
        """Bytes of plane ``index``: 0 holds the parameters, the others optimizer state."""
        return self.segment.bytes(self._places["planes"] + index * self.plane_bytes, self.plane_bytes)

    def lane(self, lane: int) -> torch.Tensor:
        """Bytes of a lane's gradient."""
        return self.segment.bytes(self._places["lanes"] + lane * self.plane_bytes, self.plane_bytes)

    def free_lanes(self) -> None:
        """No step will follow: the memory of the gradients can go."""
        self.segment.free(self._places["lanes"], self.plane_bytes * self.spec.lanes)

    def pull(self, slot: int) -> torch.Tensor:
        """Bytes of the parameters as a worker has them that computes updates on its own."""
        return self.segment.bytes(self._places["pulls"] + slot * self.plane_bytes, self.plane_bytes)

    def shown(self, window: int) -> torch.Tensor:
        """Bytes of the parameters as workers are to read them who read them themselves."""
        return self.segment.bytes(self._places["shown"] + window * self.plane_bytes, self.plane_bytes)

    def undo(self, slot: int) -> torch.Tensor:
        """Bytes of a worker's undo buffer."""
        size = aligned(self.spec.undo_bytes)
        return self.segment.bytes(self._places["undo"] + slot * size, size)

    def _live(self) -> list[tuple[int, int]]:
        """(place, bytes) of all that a step changes for good."""
        at, units = self._places, len(self.spec.units)
        return [
            (at["planes"], at["lanes"] - at["planes"]),  # with the extras
            (at["buffers"], self.buffer_bytes),  # the agreed ones
            (at["scalars"], 8 * units * len(self.spec.scalars)),
            (at["control"] + 8 * self._shape.ready_word, 8 * units),
        ]

    def live_and_kept(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(live, kept) pairs of bytes."""
        pairs, at = [], self._places["kept"]
        for place, size in self._live():
            pairs.append((self.segment.bytes(place, size), self.segment.bytes(at, size)))
            at += aligned(size)
        return pairs

    # -- tensors --------------------------------------------------------------------------------------------
    def parameter_offset(self, index: int) -> int:
        """Where parameter ``index`` lies in the segment."""
        return self._places["planes"] + self.spec.parameters[index].offset

    def fixed_offset(self, index: int) -> int:
        """Where frozen parameter ``index`` lies in the segment."""
        return self._places["fixed"] + self.spec.fixed[index].offset

    def parameters(self, plane: int = 0) -> list[torch.Tensor]:
        """The parameters, or the state plane ``plane`` in their shapes."""
        base = self._places["planes"] + plane * self.plane_bytes
        return [self._entry(base, e) for e in self.spec.parameters]

    def gradients(self, lane: int) -> list[torch.Tensor]:
        """The gradient buffers of a lane in the shapes of the parameters."""
        base = self._places["lanes"] + lane * self.plane_bytes
        return [self._entry(base, e) for e in self.spec.parameters]

    def memory(self, step: int, lane: int) -> dict[str, list[torch.Tensor]]:
        """What a lane keeps, by name and in the shapes of the parameters, as it is before ``step``.

        There are two banks, in turns: computing a step reads the one before it and writes the one after it, so that a
        lane whose worker died can be computed again.
        """
        found = {}
        for index, name in enumerate(self.spec.memory):
            number = (step % 2 * self.spec.lanes + lane) * len(self.spec.memory) + index
            base = self._places["memory"] + number * self.plane_bytes
            found[name] = [self._entry(base, e) for e in self.spec.parameters]
        return found

    def memory_numbers(self, step: int, lane: int) -> np.ndarray:
        """The single numbers that a lane keeps, as they are before ``step``; a writable view."""
        numbers: np.ndarray = self._memory_numbers[step % 2, lane]
        return numbers

    @torch.no_grad()
    def carry_over(self, step: int, lane: int) -> None:
        """The lane has nothing to do in ``step``: what it keeps stays as it is."""
        if self.spec.memory:
            size = len(self.spec.memory) * self.plane_bytes
            before, after = (
                self.segment.bytes(self._places["memory"] + (bank % 2 * self.spec.lanes + lane) * size, size)
                for bank in (step, step + 1)
            )
            after.copy_(before)
        self._memory_numbers[(step + 1) % 2, lane] = self._memory_numbers[step % 2, lane]

    def fixed(self) -> list[torch.Tensor]:
        """The frozen parameters."""
        return [self._entry(self._places["fixed"], e) for e in self.spec.fixed]

    def pulled(self, slot: int) -> list[torch.Tensor]:
        """The same in the shapes of the parameters."""
        return [self._entry(self._places["pulls"] + slot * self.plane_bytes, e) for e in self.spec.parameters]

    def shown_parameters(self, window: int) -> list[torch.Tensor]:
        """The parameters in a window, in their shapes."""
        return [self._entry(self._places["shown"] + window * self.plane_bytes, e) for e in self.spec.parameters]

    def pulled_buffers(self, slot: int) -> list[torch.Tensor]:
        """The buffers that such a worker starts from."""
        base = self._places["pulled_buffers"] + slot * self.buffer_bytes
        return [self._entry(base, e) for e in self.spec.buffers]

    def buffers(self, lane: int | None = None) -> list[torch.Tensor]:
        """The agreed buffers, or those that a lane left."""
        base = self._places["buffers"] + (0 if lane is None else 1 + lane) * self.buffer_bytes
        return [self._entry(base, e) for e in self.spec.buffers]

    def extra(self, index: int) -> torch.Tensor:
        """State tensor ``index`` of the extras."""
        extra = self.spec.extras[index]
        return self.segment.tensor(self._places["extras"] + extra.offset, extra.shape, dtype_of(extra.dtype))

    def _entry(self, base: int, entry: Entry) -> torch.Tensor:
        return self.segment.tensor(base + entry.offset, entry.shape, dtype_of(entry.dtype))

    def close(self) -> None:
        """Give up the descriptor."""
        self.segment.close()


def _nbytes(extra: Extra) -> int:
    return aligned(int(np.prod(extra.shape, dtype=np.int64)) * dtype_of(extra.dtype).itemsize)
