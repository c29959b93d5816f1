"""How updates and parameters of a part travel: as they lie, or under a codec as frames, each after its length.

What is left out of the frames of an update stays with the worker that sends it (``Remainder``). Whoever receives an
update, a primary or its backup, decodes the same frames, so both hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manyhands.comm.codec import Codec, Fp32
from manyhands.comm.envelope import Stream
from manyhands.comm.frames import Frame
from manyhands.errors import FrameError
from manyhands.server.part import Part, size_bytes
from manyhands.server.row_share import Rows, RowShare

__all__ = ["Coder", "Remainder", "Update"]

_LENGTH_BYTES = 4
_FLOAT = torch.float32  # the type that codecs know; others travel as they are


@dataclass(slots=True)
class Update:
    """What a worker brings for a part."""

    payload: Sequence[memoryview]
    """As it travels."""
    values: Sequence[memoryview]
    """Which parameters have a gradient, the gradients, and buffers, as they lie in an arena."""
    rows: Sequence[Rows | None] = ()
    """Of tables that are held by row."""
    worker: int = 0
    """Who brought it, where that is known."""


class Coder:
    """Encodes and decodes for one part. Without ``codec`` everything travels as it lies."""

    def __init__(self, part: Part, codec: Codec | None, rows: RowShare | None = None) -> None:
        """``rows``: the share of the part in tables, where there are some; they travel as they are."""
        self.part, self.codec, self._rows = part, codec, rows
        self._sizes = [len(piece) for piece in part.update(0)]
        """Of the flags, the gradients, and each buffer."""

    # -- updates --------------------------------------------------------------------------------------------
    def open(self, payload: Sequence[memoryview]) -> Update:
        """The update that came as ``payload``; raises FrameError if it is none."""
        if self.codec is None and self._rows is None:
            if size_bytes(payload) != sum(self._sizes):
                raise FrameError(f"an update of {size_bytes(payload)} bytes where {sum(self._sizes)} belong")
            return Update(payload, payload)
        stream = Stream(payload)
        flags = stream.take(self._sizes[0])
        if self.codec is None:
            gradient = stream.take(self._sizes[1])
        else:
            decoded = torch.zeros(self._sizes[1], dtype=torch.uint8)
            self._decode(stream, decoded, flags)
            gradient = _bytes(decoded)
        buffers = [stream.take(size) for size in self._sizes[2:]]
        rows = [] if self._rows is None else self._rows.take(stream)
        stream.end()
        return Update(payload, [flags, gradient, *buffers], rows)

    def close(self, flags: memoryview, frames: Sequence[bytes], buffers: Sequence[memoryview]) -> list[memoryview]:
        """The payload of an update."""
        # It may be sent again when its place in the arena has been written anew: the pieces must be its own.
        return [memoryview(bytes(piece)) for piece in (flags, *frames, *buffers)]

    @torch.no_grad()
    def compensate(self, update: Update, live: torch.Tensor, read: torch.Tensor, strength: float) -> None:
        """Correct an update for how far the parameters have moved since they were read."""
        stream = Stream(update.values)
        flags, gradient = stream.take(self._sizes[0]), torch.empty(self._sizes[1], dtype=torch.uint8)
        stream.fill(_bytes(gradient))
        buffers = [stream.take(size) for size in self._sizes[2:]]
        for _, dtype, where in self.part.segments:
            values = gradient[where].view(dtype)
            values.addcmul_(values * values, live[where].view(dtype) - read[where].view(dtype), value=strength)
        update.values = [flags, _bytes(gradient), *buffers]
        frames = [] if self.codec is None else self._encode(Fp32(), gradient, flags, None)
        update.payload = update.values if self.codec is None else self.close(flags, frames, buffers)

    # -- parameters -----------------------------------------------------------------------------------------
    @torch.no_grad()
    def difference(self, live: torch.Tensor, has: torch.Tensor) -> list[bytes]:
        """Frames that lead from what a worker has to ``live``; ``has`` becomes what it will have then."""
        assert self.codec is not None
        moved, arrived = live.clone(), torch.empty_like(live)
        for _, dtype, where in self.part.segments:
            if dtype == _FLOAT:
                moved[where].view(dtype).sub_(has[where].view(dtype))
        frames = self._encode(self.codec, moved, None, arrived)
        self._move(has, arrived)
        return frames

    @torch.no_grad()
    def follow(self, stream: Stream, has: torch.Tensor) -> None:
        """Do to ``has`` what the server did: the two stay equal, bit by bit."""
        arrived = torch.empty_like(has)
        self._decode(stream, arrived, None)
        self._move(has, arrived)

    def _move(self, has: torch.Tensor, arrived: torch.Tensor) -> None:
        for _, dtype, where in self.part.segments:
            if dtype == _FLOAT:
                has[where].view(dtype).add_(arrived[where].view(dtype))
            else:
                has[where] = arrived[where]

    # -- frames ---------------------------------------------------------------------------------------------
    def encode(self, values: torch.Tensor, flags: memoryview, arrived: torch.Tensor) -> list[bytes]:
        """Frames of gradients where there are some; ``arrived`` becomes what will be decoded."""
        assert self.codec is not None
        return self._encode(self.codec, values, flags, arrived)

    def _encode(
        self, codec: Codec, values: torch.Tensor, flags: memoryview | None, arrived: torch.Tensor | None
    ) -> list[bytes]:
        pieces = []
        for number, dtype, where in self.part.segments:
            if flags is not None and not flags[number]:
                continue
            if dtype != _FLOAT:
                pieces.append(values[where].numpy().tobytes())
                if arrived is not None:
                    arrived[where] = values[where]
                continue
            frame = codec.encode(values[where].view(dtype))
            raw = frame.to_bytes()
            pieces += [len(raw).to_bytes(_LENGTH_BYTES, "little"), raw]
            if arrived is not None:
                codec.decode(frame, arrived[where].view(dtype))
        return [b"".join(pieces)]

    def _decode(self, stream: Stream, into: torch.Tensor, flags: memoryview | None) -> None:
        assert self.codec is not None
        for number, dtype, where in self.part.segments:
            if flags is not None and not flags[number]:
                continue
            if dtype != _FLOAT:
                stream.fill(_bytes(into[where]))
                continue
            size = int.from_bytes(stream.take(_LENGTH_BYTES), "little")
            self.codec.decode(Frame.from_bytes(stream.take(size)), into[where].view(dtype))


class Remainder:
    """What the frames of one worker have left out of the gradients of one part so far (error feedback)."""

    def __init__(self, coder: Coder, size: int) -> None:
        assert coder.codec is not None
        self._coder = coder
        self._left = None if coder.codec.exact else torch.zeros(size, dtype=torch.uint8)
        self._next = self._left

    @torch.no_grad()
    def encode(self, flags: memoryview, gradient: torch.Tensor) -> list[bytes]:
        """Frames of the gradient and of what was left out before. They count as sent once ``keep`` is called."""
        total, arrived = gradient.clone(), torch.empty_like(gradient)
        if self._left is None:
            return self._coder.encode(total, flags, arrived)
        wanted = [where for number, dtype, where in self._coder.part.segments if flags[number] and dtype == _FLOAT]
        for where in wanted:
            total[where].view(_FLOAT).add_(self._left[where].view(_FLOAT))
        frames = self._coder.encode(total, flags, arrived)
        self._next = self._left.clone()
        for where in wanted:
            values = total[where].view(_FLOAT)
            # Values that are not finite were sent as they are: nothing is left of them.
            left = torch.where(values.isfinite(), values - arrived[where].view(_FLOAT), 0.0)
            self._next[where].view(_FLOAT).copy_(left)
        return frames

    def keep(self) -> None:
        """The frames have had their effect."""
        self._left = self._next


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: np.ndarray = tensor.numpy()
    return memoryview(array)  # type: ignore[arg-type]
