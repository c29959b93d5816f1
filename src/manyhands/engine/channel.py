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
    return _ready(fd, select.POLLIN, timeout_s)


def _ready(fd: int, event: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(max(timeout_s, 0) * 1000))


class Channel:
    """One end of a connection. Frames are delivered whole and in order.

    Whoever waits for a frame waits as long as it wants, also in the middle of one: what has come of it is kept. So a
    process that is stopped while it sends holds nobody up.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._begin()

    def _begin(self) -> None:
        """Nothing of the next frame is here yet."""
        self._head, self._frame, self._got = bytearray(), bytearray(), 0
        self._fds: list[int] = []

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
        deadline = time.monotonic() + timeout_s
        try:
            while data:
                try:
                    data = data[socket.send_fds(self._socket, [data], list(fds)) if fds else self._socket.send(data) :]
                    fds = ()
                except BlockingIOError:
                    if not _ready(self._socket.fileno(), select.POLLOUT, deadline - time.monotonic()):
                        raise TimeoutError(f"nobody took it within {timeout_s} s") from None
        except OSError as error:
            raise ChannelClosed(f"a message {kind!r} could not be delivered: {error}") from error

    def poll(self, timeout_s: float = 0) -> bool:
        """Whether a message (or the end) can be read within ``timeout_s``."""
        return readable(self._socket.fileno(), timeout_s)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message; None when it is not here, or not all of it, within ``timeout_s``. Raises ChannelClosed at
        the end."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                while self._read():
                    pass
            except BlockingIOError:
                if not self.poll(deadline - time.monotonic()):
                    return None
                continue
            except OSError as error:
                raise ChannelClosed(f"the connection broke: {error}") from error
            (kind, body), fds = msgspec.msgpack.decode(self._frame), self._fds
            self._begin()
            return Message(kind, body, fds)

    def _read(self) -> bool:
        """Read on, never beyond the frame: what follows it has descriptors of its own. False when it is complete."""
        if len(self._head) < _LENGTH.size:
            part, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size - len(self._head), _MAX_FDS)
            for fd in fds:
                os.set_inheritable(fd, False)
            self._fds += fds
            self._check(len(part), begun=bool(self._head))
            self._head += part
            if len(self._head) == _LENGTH.size:
                self._frame = bytearray(_LENGTH.unpack(self._head)[0])
            return True
        if self._got == len(self._frame):
            return False
        count = self._socket.recv_into(memoryview(self._frame)[self._got :])
        self._check(count, begun=True)
        self._got += count
        return True

    def _check(self, count: int, *, begun: bool) -> None:
        if not count:
            raise ChannelClosed("the other process closed the connection" + " in the middle of a message" * begun)

    def close(self) -> None:
        """Close this end; the other side sees ChannelClosed."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())
