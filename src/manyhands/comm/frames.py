"""A frame: the values of one update as bytes, with a header that says how they are encoded.

On a wire it is two bytes with the length of the header, the header, and the payload. What comes from a wire is not
trusted: a frame is checked against the place that it is decoded into, never the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from manyhands.errors import FrameError

__all__ = ["Frame"]

_LENGTH_BYTES = 2
_HEADER_BYTES = 64  # more than any header has


class _Header(msgspec.Struct, array_like=True, frozen=True):
    codec: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    values: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Frame:
    """``values`` values, encoded by the codec of that name into ``payload``."""

    codec: str
    values: int
    payload: bytes

    def _header(self) -> bytes:
        return msgspec.msgpack.encode(_Header(self.codec, self.values))

    @property
    def size_bytes(self) -> int:
        """What it takes on a wire, header and all."""
        return _LENGTH_BYTES + len(self._header()) + len(self.payload)

    def to_bytes(self) -> bytes:
        """As it goes on a wire."""
        header = self._header()
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header + self.payload

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview) -> Frame:
        """The frame that ``raw`` is, from its first byte to its last; the codec judges what is in it."""
        view = memoryview(raw).cast("B")
        size = int.from_bytes(view[:_LENGTH_BYTES], "little")
        start = _LENGTH_BYTES + size
        if not 0 < size <= _HEADER_BYTES or len(view) < start:
            raise FrameError(
                f"received {len(view)} bytes that announce a header of {size}; valid is a frame: {_LENGTH_BYTES} bytes "
                f"with the length of the header (at most {_HEADER_BYTES}), the header, the payload. The sender speaks "
                "another version, or bytes were lost."
            )
        try:
            header = msgspec.msgpack.decode(view[_LENGTH_BYTES:start], type=_Header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(
                f"the header of a frame cannot be read ({error}); valid is the name of a codec and the number of "
                "values. The sender speaks another version, or bytes were changed on the way."
            ) from error
        return cls(header.codec, header.values, bytes(view[start:]))
