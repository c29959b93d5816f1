"""Envelopes: how a message travels over a socket.

An envelope is a list of parts. The first is a head: a checksum, then a msgpack header (version, sender, kind, the sizes
of the parts that follow) with the message in it. The others are raw bytes of tensors. The checksum covers all of it.

Nothing here runs code that came over a socket, and nothing is allocated by a length that came over one: sizes in the
header are compared with what is there. Whatever is wrong with an envelope, decoding it raises ``FrameError``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from manyhands.errors import FrameError

__all__ = ["HEAD_BYTES", "PARTS", "PART_BYTES", "VERSION", "Envelope", "Envelopes", "Stream", "pour", "wire_bytes"]

VERSION = 1
HEAD_BYTES = 1 << 20
"""The most that a head may have."""
PART_BYTES = 4 << 20
"""The most that any other part may have; longer runs of bytes are cut."""
PARTS = 1 << 14
"""The most parts of an envelope."""
_CHECKSUM_BYTES = 4
_SHORT = 255  # the length of a part of so many bytes takes one byte, that of a longer one eight

M = TypeVar("M")


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    sender: int
    kind: str
    sizes: list[int]
    message: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Envelope(Generic[M]):
    """A message, who sent it, and the bytes that came with it."""

    sender: int
    message: M
    payload: Sequence[memoryview] = ()


class Envelopes(Generic[M]):
    """Encodes and decodes messages of the given types: dataclasses or msgspec structs, told apart by their names."""

    def __init__(self, types: Iterable[type[M]]) -> None:
        self._header = msgspec.msgpack.Decoder(_Header)
        self._encoder = msgspec.msgpack.Encoder()
        self._types = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in types}

    def encode(self, sender: int, message: M, payload: Sequence[Any] = ()) -> list[Any]:
        """The parts of the envelope. The payload are buffers of bytes; its parts are views of them."""
        kind = type(message).__name__
        assert kind in self._types, f"{kind} is not a message of this envelopes"
        parts = [part for buffer in payload for part in _cut(memoryview(buffer))]
        body = msgspec.Raw(self._encoder.encode(message))
        head = self._encoder.encode(_Header(VERSION, sender, kind, [len(part) for part in parts], body))
        assert len(head) + _CHECKSUM_BYTES <= HEAD_BYTES and len(parts) < PARTS, (
            "the message is too large for an envelope"
        )
        return [_checksum(head, parts).to_bytes(_CHECKSUM_BYTES, "little") + head, *parts]

    def decode(self, parts: Sequence[Any]) -> Envelope[M]:
        """The envelope; its payload are views of ``parts``."""
        if not 1 <= len(parts) <= PARTS:
            raise FrameError(f"an envelope of {len(parts)} parts; valid are 1 to {PARTS}")
        views = [memoryview(part) for part in parts]
        head, payload = views[0], views[1:]
        if not _CHECKSUM_BYTES < len(head) <= HEAD_BYTES:
            raise FrameError(f"a head of {len(head)} bytes; valid are {_CHECKSUM_BYTES + 1} to {HEAD_BYTES}")
        if int.from_bytes(head[:_CHECKSUM_BYTES], "little") != _checksum(head[_CHECKSUM_BYTES:], payload):
            raise FrameError("the checksum of an envelope is wrong: it was damaged on the way, or is none of ours")
        try:
            header = self._header.decode(head[_CHECKSUM_BYTES:])
            if header.version != VERSION:
                raise FrameError(f"an envelope of version {header.version}; valid is {VERSION}")
            if header.sizes != [len(part) for part in payload]:
                raise FrameError("the parts of an envelope are not of the sizes that its header says")
            if (decoder := self._types.get(header.kind)) is None:
                raise FrameError(f"an envelope of the unknown kind {header.kind[:40]!r}")
            return Envelope(header.sender, decoder.decode(header.message), payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FrameError(f"the header of an envelope cannot be read: {error}") from error


class Stream:
    """The bytes of a payload, one after the other, wherever they were cut."""

    def __init__(self, payload: Sequence[memoryview]) -> None:
        self._parts = [part for part in payload if len(part)]
        self._parts.reverse()
        self.left = sum(len(part) for part in self._parts)
        """How many bytes have not been read."""

    def fill(self, home: memoryview) -> None:
        """Copy as many bytes as there is room for into ``home``."""
        self._require(len(home))
        at = 0
        while at < len(home):
            piece = self._piece(len(home) - at)
            home[at : at + len(piece)] = piece
            at += len(piece)

    def take(self, count: int) -> memoryview:
        """The next bytes; a view of the payload where they lie together in it."""
        self._require(count)
        if count == 0:
            return memoryview(b"")
        piece = self._piece(count)
        if len(piece) == count:
            return piece
        home = memoryview(bytearray(count))
        home[: len(piece)] = piece
        self.fill(home[len(piece) :])
        return home

    def end(self) -> None:
        """All must have been read."""
        if self.left:
            raise FrameError(f"an envelope brought {self.left} bytes of tensors more than belong")

    def _require(self, count: int) -> None:
        if count > self.left:
            raise FrameError(f"an envelope has {self.left} more bytes of tensors where {count} belong")

    def _piece(self, most: int) -> memoryview:
        part = self._parts.pop()
        if len(part) > most:
            self._parts.append(part[most:])
            part = part[:most]
        self.left -= len(part)
        return part


def pour(payload: Sequence[memoryview], targets: Iterable[memoryview]) -> None:
    """Copy the bytes of a payload, one after the other, into ``targets``; they must fill them exactly."""
    homes, stream = list(targets), Stream(payload)
    want = sum(len(home) for home in homes)
    if stream.left != want:
        raise FrameError(f"an envelope brought {stream.left} bytes of tensors where {want} belong")
    for home in homes:
        stream.fill(home)


def wire_bytes(parts: Iterable[Any]) -> int:
    """What the parts of an envelope take on a link that is not encrypted: each has a flag and its length before it."""
    return sum(len(part) + (2 if len(part) <= _SHORT else 9) for part in parts)


def _cut(buffer: memoryview) -> list[memoryview]:
    return [buffer[start : start + PART_BYTES] for start in range(0, len(buffer), PART_BYTES)]


def _checksum(head: Any, parts: Iterable[Any]) -> int:
    total = zlib.crc32(head)
    for part in parts:
        total = zlib.crc32(part, total)
    return total
