"""The codec that sends the largest values alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from manyhands.comm.codec import Codec
from manyhands.errors import FrameError, UsageError

__all__ = ["TopK"]

_CHUNK = 4096  # a position in it takes 12 bits
_LEAST = 32  # a bias of ten numbers is worth its bytes: a hundredth of it would arrive a hundred steps late


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """The largest values of every 4,096, exact, with their positions in 12 bits each; the others are zero.

    A fraction of the values, but at least 32 of every tensor and of its last chunk, or all of them if they are fewer.
    """

    word: ClassVar[str] = "topk"
    fraction: float = 0.01

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise UsageError(
                f"the fraction of codec topk received {self.fraction!r}; valid: a number above 0 and up to 1, "
                "for example 'topk' or 'topk:0.05'"
            )

    @property
    def name(self) -> str:
        return self.word if self.fraction == TopK().fraction else f"{self.word}:{self.fraction!r}"

    @property
    def bits_per_value(self) -> float:
        return 44 * self._kept(_CHUNK) / _CHUNK

    def _kept(self, count: int) -> int:
        """How many of ``count`` values are sent."""
        return max(round(self.fraction * count), min(_LEAST, count))

    def _kept_in_all(self, count: int) -> int:
        return count // _CHUNK * self._kept(_CHUNK) + self._kept(count % _CHUNK)

    def _packed_bytes(self, count: int) -> int:
        kept = self._kept_in_all(count)
        return -(-12 * kept // 8) + 4 * kept

    def _pack(self, values: np.ndarray) -> bytes:
        positions, chosen = [], []
        for rows in _chunks(values):
            mask = _largest(rows, self._kept(rows.shape[1]))
            positions.append(np.nonzero(mask)[1])
            chosen.append(rows[mask])
        return _pack_positions(np.concatenate(positions)) + np.concatenate(chosen).astype("<f4").tobytes()

    def _unpack(self, packed: memoryview, out: np.ndarray) -> None:
        kept = self._kept_in_all(len(out))
        head = len(packed) - 4 * kept
        positions = _unpack_positions(np.frombuffer(packed[:head], np.uint8), kept)
        values = np.frombuffer(packed[head:], "<f4")
        out[:] = 0
        at = 0
        for rows in _chunks(out):
            each = self._kept(rows.shape[1])
            end = at + each * len(rows)
            places = positions[at:end].reshape(len(rows), each)
            if (places[:, -1] >= rows.shape[1]).any() or (np.diff(places, axis=1) <= 0).any():
                raise FrameError(
                    f"received a frame of codec {self.name} with positions that do not rise, or lie beyond the "
                    f"{rows.shape[1]} values of their chunk. The bytes were changed on the way."
                )
            np.put_along_axis(rows, places, values[at:end].reshape(places.shape), axis=1)
            at = end


def _largest(rows: np.ndarray, kept: int) -> np.ndarray:
    """A mask of the ``kept`` largest values, by size, of every row; of equal ones the first."""
    sizes = rows.view(np.int32) & 0x7FFFFFFF  # bits of positive numbers are in the order of the numbers
    cut = rows.shape[1] - kept
    limit = np.partition(sizes, cut, axis=1)[:, cut, None]
    above = sizes > limit
    equal = sizes == limit
    room = kept - above.sum(axis=1, keepdims=True)
    mask: np.ndarray = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int16) <= room))
    return mask


def _pack_positions(positions: np.ndarray) -> bytes:
    """Two positions of 12 bits in three bytes."""
    pairs = np.zeros((-(-len(positions) // 2), 2), np.uint16)
    pairs.reshape(-1)[: len(positions)] = positions
    first, second = pairs[:, 0], pairs[:, 1]
    packed = np.stack([first & 0xFF, first >> 8 | (second & 15) << 4, second >> 4], axis=1).astype(np.uint8)
    return packed.tobytes()[: -(-12 * len(positions) // 8)]


def _unpack_positions(packed: np.ndarray, count: int) -> np.ndarray:
    triples = np.zeros((-(-count // 2), 3), np.int64)
    triples.reshape(-1)[: len(packed)] = packed
    low, middle, high = triples[:, 0], triples[:, 1], triples[:, 2]
    return np.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], axis=1).reshape(-1)[:count]


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    """The whole chunks as rows, then what is left as one row; views of ``values``."""
    whole = len(values) // _CHUNK * _CHUNK
    for part, width in ((values[:whole], _CHUNK), (values[whole:], len(values) - whole)):
        if len(part):
            yield part.reshape(-1, width)
