"""Messages between a process and its child: small frames over a Unix socket pair, with file descriptors."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from manyhands.errors import ChannelClosed

__all__ = ["Channel", "Message", "readable"]

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 32


@dataclass(slots=True)
class Message:
    """What one side tells the other."""

    kind: str
    body: dict[str, Any]
    fds: list[int] = field(default_factory=list)


def readable(fd: int, timeout_s: float) -> bool:
    """Whether ``fd`` can be read, or has ended, within ``timeout_s``. Unlike select, for any number of files."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class Channel:
    """One end of a connection. Frames are delivered whole and in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(True)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A connected channel and the raw socket for the other process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(
        self, kind: str, body: dict[str, Any] | None = None, fds: Sequence[int] = (), timeout_s: float = 30
    ) -> None:
        """Send one message. Raises ChannelClosed when nobody takes it within ``timeout_s``."""
        frame = msgspec.msgpack.encode((kind, body or {}))
        data = memoryview(_LENGTH.pack(len(frame)) + frame)
        self._socket.settimeout(timeout_s)
        try:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            self._socket.sendall(data[sent:])
        except (OSError, TimeoutError) as error:
            raise ChannelClosed(f"a message {kind!r} could not be delivered: {error}") from error

    def poll(self, timeout_s: float = 0) -> bool:
        """Whether a message (or the end) can be read within ``timeout_s``."""
        return readable(self._socket.fileno(), timeout_s)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message; None when none begins within ``timeout_s``. Raises ChannelClosed at the end."""
        if not self.poll(timeout_s):
            return None
        deadline = time.monotonic() + 30  # a frame that has begun must end
        head, fds = self._read_head(deadline)
        frame = self._read(_LENGTH.unpack(head)[0], deadline)
        kind, body = msgspec.msgpack.decode(frame)
        return Message(kind, body, fds)

    def _read_head(self, deadline: float) -> tuple[bytes, list[int]]:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _MAX_FDS)
        except (OSError, TimeoutError) as error:
            raise ChannelClosed(f"the connection broke: {error}") from error
        for fd in fds:
            os.set_inheritable(fd, False)
        if not head:
            raise ChannelClosed("the other process closed the connection")
        return head + self._read(_LENGTH.size - len(head), deadline), list(fds)

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        got = 0
        while got < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                count = self._socket.recv_into(view[got:])
            except (OSError, TimeoutError) as error:
                raise ChannelClosed(f"the connection broke: {error}") from error
            if not count:
                raise ChannelClosed("the other process closed the connection in the middle of a message")
            got += count
        return bytes(data)

    def close(self) -> None:
        """Close this end; the other side sees ChannelClosed."""
        self._socket.close()
