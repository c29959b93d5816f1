"""Codecs of a few bits per value, with one scale for each block of values."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from manyhands.comm.codec import Codec
from manyhands.errors import UsageError

__all__ = ["Int4", "Int8", "Scaled", "Sign"]

_BLOCKS = tuple(1 << power for power in range(3, 17))
_SMALLEST = np.float32(2.0**-126)  # a scale below it would have lost its digits


@dataclass(frozen=True, slots=True)
class Scaled(Codec):
    """Whole numbers of a few bits, and one scale for each block of values."""

    block: int = 256

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block not in _BLOCKS:
            raise UsageError(
                f"the block of codec {self.word} received {self.block!r}; valid: a power of two from {min(_BLOCKS)} "
                f"to {max(_BLOCKS)}, for example {self.word!r} or '{self.word}:128'"
            )

    @property
    def name(self) -> str:
        return self.word if self.block == type(self)().block else f"{self.word}:{self.block}"

    @property
    @abstractmethod
    def _bits(self) -> int: ...

    @property
    def bits_per_value(self) -> float:
        return self._bits + 32 / self.block

    def _packed_bytes(self, count: int) -> int:
        return 4 * -(-count // self.block) + -(-count * self._bits // 8)

    def _pack(self, values: np.ndarray) -> bytes:
        rows = _blocks(values, self.block)
        scales, codes = self._quantize(rows)
        return scales.astype("<f4").tobytes() + self._squeeze(codes.reshape(-1)[: len(values)])

    def _unpack(self, packed: memoryview, out: np.ndarray) -> None:
        count = -(-len(out) // self.block)
        scales = np.frombuffer(packed[: 4 * count], "<f4")
        codes = self._spread(np.frombuffer(packed[4 * count :], np.uint8), len(out))
        out[:] = codes
        full = len(out) // self.block
        out[: full * self.block].reshape(full, self.block)[:] *= scales[:full, None]
        out[full * self.block :] *= scales[full:]

    def _quantize(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The scale of every row, and whole numbers up to ``2 ** (bits - 1) - 1`` in size."""
        scales = np.abs(rows).max(axis=1) / np.float32(2 ** (self._bits - 1) - 1)
        scales[scales < _SMALLEST] = 0
        steps = np.where(scales > 0, scales, np.float32(np.inf))
        return scales, np.rint(rows / steps[:, None]).astype(np.int8)

    @abstractmethod
    def _squeeze(self, codes: np.ndarray) -> bytes:
        """The codes as bits."""

    @abstractmethod
    def _spread(self, packed: np.ndarray, count: int) -> np.ndarray:
        """The bits as codes."""


@dataclass(frozen=True, slots=True)
class Int8(Scaled):
    """Whole numbers from -127 to 127 times the scale of the block."""

    word: ClassVar[str] = "int8"

    @property
    def _bits(self) -> int:
        return 8

    def _squeeze(self, codes: np.ndarray) -> bytes:
        return codes.tobytes()

    def _spread(self, packed: np.ndarray, count: int) -> np.ndarray:
        return packed.view(np.int8)


@dataclass(frozen=True, slots=True)
class Int4(Scaled):
    """Whole numbers from -7 to 7 times the scale of the block, two in a byte."""

    word: ClassVar[str] = "int4"
    block: int = 128

    @property
    def _bits(self) -> int:
        return 4

    def _squeeze(self, codes: np.ndarray) -> bytes:
        halves = np.zeros(len(codes) + len(codes) % 2, np.uint8)
        halves[: len(codes)] = codes + 8
        packed: np.ndarray = halves[0::2] | halves[1::2] << 4
        return packed.tobytes()

    def _spread(self, packed: np.ndarray, count: int) -> np.ndarray:
        halves = np.empty(2 * len(packed), np.int8)
        halves[0::2], halves[1::2] = packed & 15, packed >> 4
        return halves[:count] - np.int8(8)


@dataclass(frozen=True, slots=True)
class Sign(Scaled):
    """The sign of each value; the scale is the mean size of the values in the block."""

    word: ClassVar[str] = "sign"

    @property
    def _bits(self) -> int:
        return 1

    def _pack(self, values: np.ndarray) -> bytes:
        sums = np.abs(_blocks(values, self.block)).astype(np.float64)
        while sums.shape[1] > 1:  # halves onto each other: the same order of additions on any machine
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        counts = np.minimum(len(values) - self.block * np.arange(len(sums)), self.block)
        means: np.ndarray = (sums[:, 0] / counts).astype("<f4")
        return means.tobytes() + self._squeeze(values)

    def _squeeze(self, codes: np.ndarray) -> bytes:
        packed: np.ndarray = np.packbits(codes >= 0, bitorder="little")
        return packed.tobytes()

    def _spread(self, packed: np.ndarray, count: int) -> np.ndarray:
        bits = np.unpackbits(packed, count=count, bitorder="little").view(np.int8)
        return 2 * bits - np.int8(1)


def _blocks(values: np.ndarray, block: int) -> np.ndarray:
    """The values as rows of ``block``; zeros fill up the last one."""
    if len(values) % block == 0:
        return values.reshape(-1, block)
    rows = np.zeros((len(values) // block + 1, block), np.float32)
    rows.reshape(-1)[: len(values)] = values
    return rows
