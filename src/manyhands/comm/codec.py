"""The shape of a codec: a vector of float32 values becomes a frame of bytes, and values again.

A vector is encoded in pieces that stay in the cache. The size of a payload follows from the number of values alone, so
a frame of another size is refused before anything is read. A vector that holds NaN, an infinity or a number near the
end of the range travels as it is, whatever the codec: its frame says ``fp32``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from manyhands.comm.frames import Frame
from manyhands.errors import FrameError, UsageError

__all__ = ["Bf16", "Codec", "Fp32"]

_PIECE = 1 << 16
_MOST = 2.0**126  # twice as much is still finite, so no rounding on the way makes an infinity


class Codec(ABC):
    """One way for values to travel. A subclass packs and unpacks one piece of at most 65,536 values."""

    word: ClassVar[str]
    exact: ClassVar[bool] = False
    """Whether every value arrives as it was sent; if not, what was lost is to be sent later (error feedback)."""

    @property
    def name(self) -> str:
        """The word that gives this codec, with its setting where that is not the usual one."""
        return self.word

    @property
    @abstractmethod
    def bits_per_value(self) -> float:
        """Of the payload, for a long vector."""

    @abstractmethod
    def _packed_bytes(self, count: int) -> int: ...

    @abstractmethod
    def _pack(self, values: np.ndarray) -> bytes: ...

    @abstractmethod
    def _unpack(self, packed: memoryview, out: np.ndarray) -> None: ...

    def payload_bytes(self, values: int) -> int:
        """The size of the payload of so many values."""
        pieces, rest = divmod(values, _PIECE)
        return pieces * self._packed_bytes(_PIECE) + (self._packed_bytes(rest) if rest else 0)

    def encode(self, values: torch.Tensor) -> Frame:
        """The frame of a vector."""
        given = _as_array(values)
        parts = []
        for piece in _pieces(given):
            if not self.exact and not _is_below(piece, _MOST):
                return Fp32().encode(values)
            parts.append(self._pack(piece))
        return Frame(self.name, len(given), b"".join(parts))

    def decode(self, frame: Frame, out: torch.Tensor) -> None:
        """Write the values of a frame into ``out``. After an error, what ``out`` holds means nothing."""
        target = _as_array(out)
        if frame.codec == Fp32.word and not self.exact:
            Fp32().decode(frame, out)
            return
        if frame.codec != self.name:
            raise FrameError(
                f"received a frame of codec {frame.codec[:40]!r}; valid here: {self.name} or {Fp32.word}. "
                "Give both ends the same codec."
            )
        size = self.payload_bytes(len(target))
        if frame.values != len(target) or len(frame.payload) != size:
            raise FrameError(
                f"received a frame of {frame.values} values in {len(frame.payload)} bytes; valid here: {len(target)} "
                f"values in {size} bytes. The two ends have different models, or bytes were lost."
            )
        at, payload = 0, memoryview(frame.payload)
        for piece in _pieces(target):
            packed = payload[at : at + self._packed_bytes(len(piece))]
            at += len(packed)
            with np.errstate(over="ignore", invalid="ignore"):
                self._unpack(packed, piece)
            if not self.exact and not _is_below(piece, 2 * _MOST):
                raise FrameError(
                    f"received a frame of codec {self.name} with values that are not finite; such values travel as "
                    f"{Fp32.word}. The bytes were changed on the way."
                )


@dataclass(frozen=True, slots=True)
class Fp32(Codec):
    """The values as they are."""

    word: ClassVar[str] = "fp32"
    exact: ClassVar[bool] = True

    @property
    def bits_per_value(self) -> float:
        return 32.0

    def _packed_bytes(self, count: int) -> int:
        return 4 * count

    def _pack(self, values: np.ndarray) -> bytes:
        return values.astype("<f4", copy=False).tobytes()

    def _unpack(self, packed: memoryview, out: np.ndarray) -> None:
        out[:] = np.frombuffer(packed, "<f4")


@dataclass(frozen=True, slots=True)
class Bf16(Codec):
    """The upper half of each value, rounded to the nearest (to even in the middle)."""

    word: ClassVar[str] = "bf16"

    @property
    def bits_per_value(self) -> float:
        return 16.0

    def _packed_bytes(self, count: int) -> int:
        return 2 * count

    def _pack(self, values: np.ndarray) -> bytes:
        bits = values.view(np.uint32)
        upper: np.ndarray = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return upper.astype("<u2").tobytes()

    def _unpack(self, packed: memoryview, out: np.ndarray) -> None:
        out.view(np.uint32)[:] = np.frombuffer(packed, "<u2").astype(np.uint32) << 16


def _as_array(values: torch.Tensor) -> np.ndarray:
    fits = isinstance(values, torch.Tensor) and values.dtype == torch.float32 and values.ndim == 1
    if not fits or not values.is_contiguous() or values.device.type != "cpu":
        shown = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else repr(values)
        raise UsageError(f"a codec received {shown}; valid is a contiguous vector of torch.float32 on the cpu")
    array: np.ndarray = values.detach().numpy()
    return array


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), _PIECE):
        yield values[start : start + _PIECE]


def _is_below(values: np.ndarray, most: float) -> bool:
    """Whether all values are numbers smaller than ``most`` in size."""
    with np.errstate(invalid="ignore"):
        return bool(values.max() < most and values.min() > -most)
