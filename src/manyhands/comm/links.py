"""Links: the sockets of one process, over which it exchanges envelopes with the others of its run.

Processes have numbers. One that listens has an address by its number: a Unix socket in a folder that is private to the
user, or a port of this host; any other address is refused without keys for encryption. One that does not listen is
reached through the link that it opened itself.

Who opens a link must show the token of the run (or, with encryption, its key) in the handshake. Until then nothing of
what it sends gets past the connection; then it gets no further than the checks of the envelope. What is refused is
counted, never answered. Envelopes may be lost: whoever needs an answer asks again.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shutil
import tempfile
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Generic, TypeVar

import msgspec
import psutil
import zmq
from zmq.utils import z85

from manyhands.comm.envelope import HEAD_BYTES, PART_BYTES, PARTS, Envelope, Envelopes, wire_bytes
from manyhands.errors import EngineError, FrameError, UsageError

__all__ = ["Links", "Traffic", "Wire", "check_address", "make_keys", "make_wire"]

_NAME = b"manyhands"
_PREFIX = "manyhands-"
_LONGEST_ROOT = 60  # the path of a socket must have less than 108 characters
_QUEUE = 256  # envelopes that wait on one link, in each direction
_BACKLOG = 64
_HANDSHAKE_MS = 10_000
_TURN_ENVELOPES = 64
_SEAL_BYTES = 256  # that encryption may add
_REFUSALS = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH

M = TypeVar("M")


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes of a run reach each other. It is a secret: whoever has it is one of them."""

    token: str
    folder: str | None = None
    """Where the Unix sockets are; None: ports."""
    detour: str | None = None
    """A folder to open links through instead of ``folder``, where somebody passes envelopes on."""
    host: str = "127.0.0.1"
    first_port: int = 0
    keys: tuple[str, str] | None = None
    """Public and secret key of the run; with them links are encrypted."""

    def home(self, number: int) -> str:
        """Where process ``number`` listens."""
        return self._address(self.folder, number)

    def way(self, number: int) -> str:
        """Where others reach it."""
        return self._address(self.detour or self.folder, number)

    def _address(self, folder: str | None, number: int) -> str:
        return f"ipc://{folder}/{number}" if folder else f"tcp://{self.host}:{self.first_port + number}"


def make_keys() -> tuple[str, str]:
    """A new pair of public and secret key."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def make_wire() -> Wire:
    """A wire over Unix sockets in a new private folder; also removes folders that dead processes left."""
    root = tempfile.gettempdir()
    if len(root) > _LONGEST_ROOT:
        root = "/tmp"
    for name in os.listdir(root):
        owner = name.removeprefix(_PREFIX).split("-")[0]
        path = os.path.join(root, name)
        if name.startswith(_PREFIX) and owner.isdigit() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):
                if os.stat(path).st_uid == os.getuid():
                    shutil.rmtree(path)
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root)  # with mode 0700
    return Wire(token=secrets.token_hex(32), folder=folder)


def check_address(address: str, wire: Wire) -> None:
    """Refuse to listen where others than this user or this host could knock, unless links are encrypted."""
    if not wire.token:
        raise UsageError("a socket received no token; valid is a random one, such as secrets.token_hex(32)")
    if address.startswith("ipc://"):
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and wire.keys is None:
        raise UsageError(
            f"listening at {address} would be open to other hosts; valid without encryption are Unix sockets and "
            "127.0.0.1. Give the wire keys (make_keys) to encrypt its links."
        )


@dataclass(slots=True)
class Traffic:
    """What went over a link, in bytes on the wire (the handshake aside, and without what encryption adds)."""

    envelopes_out: int = 0
    bytes_out: int = 0
    envelopes_in: int = 0
    bytes_in: int = 0


@dataclass(slots=True)
class Links(Generic[M]):
    """The sockets of process ``number``. Used by one thread."""

    wire: Wire
    number: int
    envelopes: Envelopes[M]
    listens: bool = False
    traffic: dict[int, Traffic] = field(default_factory=dict)
    refused: int = 0
    """Handshakes that failed."""
    malformed: int = 0
    """Envelopes that were dropped because something was wrong with them."""
    unsent: int = 0
    """Envelopes that were dropped because there was no way, or too many waited for it."""
    _context: zmq.Context[Any] = field(default_factory=lambda: zmq.Context(io_threads=1))
    _poller: zmq.Poller = field(default_factory=zmq.Poller)
    _router: zmq.Socket[bytes] | None = None
    _guard: zmq.Socket[bytes] | None = None
    _monitor: zmq.Socket[bytes] | None = None
    _opened: dict[int, zmq.Socket[bytes]] = field(default_factory=dict)
    _routes: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.listens:
            try:
                self._listen(self.wire.home(self.number))
            except BaseException:
                self.close()
                raise

    # -- sockets --------------------------------------------------------------------------------------------
    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = _QUEUE
        socket.maxmsgsize = max(HEAD_BYTES, PART_BYTES) + _SEAL_BYTES
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.sndtimeo = socket.rcvtimeo = 0
        return socket

    def _listen(self, address: str) -> None:
        check_address(address, self.wire)
        # Whoever knocks is judged by us, in the order of our other work: the guard is a socket of this process.
        self._guard = self._context.socket(zmq.REP)
        self._guard.linger = 0
        self._guard.bind("inproc://zeromq.zap.01")
        self._router = self._socket(zmq.ROUTER)
        self._router.router_mandatory = True
        self._router.backlog = _BACKLOG
        self._router.zap_domain = _NAME
        if self.wire.keys is None:
            self._router.plain_server = True
        else:
            self._router.curve_server = True
            self._router.curve_secretkey = self.wire.keys[1].encode()
        self._monitor = self._router.get_monitor_socket(_REFUSALS)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            raise EngineError(f"cannot listen at {address}: {error}") from error
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)  # the folder has kept others out until now
        for socket in (self._guard, self._router, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def _open(self, number: int) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.DEALER)
        socket.reconnect_ivl, socket.reconnect_ivl_max = 10, 200
        if self.wire.keys is None:
            socket.plain_username, socket.plain_password = _NAME, self.wire.token.encode()
        else:
            public, secret = (key.encode() for key in self.wire.keys)
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = public, public, secret
        socket.connect(self.wire.way(number))
        self._poller.register(socket, zmq.POLLIN)
        self._opened[number] = socket
        return socket

    def watch(self, fd: int) -> None:
        """Let ``receive`` also return when there is something to read from ``fd``."""
        self._poller.register(fd, zmq.POLLIN)

    def forget(self, number: int) -> None:
        """Process ``number`` has ended."""
        self._routes.pop(number, None)
        if (socket := self._opened.pop(number, None)) is not None:
            self._poller.unregister(socket)
            socket.close()

    def keep(self, numbers: Container[int | None]) -> None:
        """Close the links that were opened to others than ``numbers``."""
        for number in [number for number in self._opened if number not in numbers]:
            self.forget(number)

    def close(self) -> None:
        """Close the sockets; nothing is waited for."""
        if self._router is not None and self._monitor is not None:
            self._router.disable_monitor()
        self._context.destroy(linger=0)
        if self.listens and self.wire.folder is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.wire.home(self.number).removeprefix("ipc://"))

    # -- envelopes ---------------------------------------------------------------------------------------------
    def send(self, to: int, message: M, payload: Sequence[Any] = ()) -> bool:
        """Send a message to process ``to``; False when it was dropped at once. Never waits."""
        parts = self.envelopes.encode(self.number, message, payload)
        try:
            if (route := self._routes.get(to)) is not None and self._router is not None:
                self._router.send_multipart([route, *parts], zmq.NOBLOCK)
            else:
                (self._opened.get(to) or self._open(to)).send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            self._routes.pop(to, None)
            self.unsent += 1
            return False
        traffic = self.traffic.setdefault(to, Traffic())
        traffic.envelopes_out += 1
        traffic.bytes_out += wire_bytes(parts)
        return True

    def receive(self, timeout_s: float) -> list[Envelope[M]]:
        """The envelopes that have come; waits for the first of them, at most ``timeout_s``."""
        ready = dict(self._poller.poll(int(max(timeout_s, 0) * 1000 + 0.5)))
        envelopes: list[Envelope[M]] = []
        if self._guard is not None and self._guard in ready:
            self._judge(self._guard)
        if self._monitor is not None and self._monitor in ready:
            with contextlib.suppress(zmq.Again):
                while self._monitor.recv_multipart(zmq.NOBLOCK):
                    self.refused += 1
        for socket in ready:
            if socket is self._router or socket in self._opened.values():
                assert isinstance(socket, zmq.Socket)
                envelopes += self._read(socket)
        return envelopes

    def _read(self, socket: zmq.Socket[bytes]) -> list[Envelope[M]]:
        envelopes: list[Envelope[M]] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(_TURN_ENVELOPES):
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                route = parts.pop(0).bytes if socket is self._router else None
                try:
                    envelope = self.envelopes.decode([part.buffer for part in parts[: PARTS + 1]])
                except FrameError:
                    self.malformed += 1
                    continue
                if route is not None:
                    self._routes[envelope.sender] = route
                traffic = self.traffic.setdefault(envelope.sender, Traffic())
                traffic.envelopes_in += 1
                traffic.bytes_in += wire_bytes(parts)
                envelopes.append(envelope)
        return envelopes

    def _judge(self, guard: zmq.Socket[bytes]) -> None:
        """Let in whoever shows the token, or has the key of the run."""
        with contextlib.suppress(zmq.Again):
            version, request, _, _, _, mechanism, *shown = guard.recv_multipart(zmq.NOBLOCK)
            if mechanism == b"PLAIN" and self.wire.keys is None and len(shown) == 2:
                known = hmac.compare_digest(shown[1], self.wire.token.encode())
            elif mechanism == b"CURVE" and self.wire.keys is not None and len(shown) == 1:
                known = hmac.compare_digest(shown[0], z85.decode(self.wire.keys[0].encode()))
            else:
                known = False
            guard.send_multipart([version, request, b"200" if known else b"400", b"", b"", b""])
