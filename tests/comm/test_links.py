"""Links: envelopes travel between those who know the token, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.comm.envelope import Envelope, Envelopes
from manyhands.comm.links import Links, Wire, check_address, make_keys, make_wire
from manyhands.errors import EngineError, UsageError


@dataclass(frozen=True, slots=True)
class Word:
    text: str


ENVELOPES = Envelopes[Word]([Word])
PATIENCE_S = 10.0


@contextlib.contextmanager
def pair(wire: Wire) -> Iterator[tuple[Links[Word], Links[Word]]]:
    """A listener with the number 1, and a caller with the number 2."""
    closing = contextlib.closing
    with closing(Links(wire, 1, ENVELOPES, listens=True)) as listener, closing(Links(wire, 2, ENVELOPES)) as caller:
        yield listener, caller


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = make_wire()
    yield made
    assert made.folder is not None
    shutil.rmtree(made.folder)


def until(
    listener: Links[Word], enough: Callable[[list[Envelope[Word]]], bool], *others: Links[Word]
) -> list[Envelope[Word]]:
    envelopes: list[Envelope[Word]] = []
    end = time.monotonic() + PATIENCE_S
    while not enough(envelopes):
        assert time.monotonic() < end, "nothing came"
        envelopes += listener.receive(0.01)
        for other in others:
            other.receive(0)
    return envelopes


class Relay:
    """Passes bytes on between whoever knocks at ``door`` and ``home``, and counts them."""

    def __init__(self, door: Path, home: Path) -> None:
        self.passed, self._home = 0, home
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(door))
        self._server.listen(1)
        self._server.settimeout(10)
        self._thread = threading.Thread(target=self._pass_on)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        self._server.close()

    def _pass_on(self) -> None:
        caller, home = self._server.accept()[0], socket.socket(socket.AF_UNIX)
        with caller, home:
            home.connect(str(self._home))
            other = {caller: home, home: caller}
            while True:
                for end in select.select([caller, home], [], [], 10)[0]:
                    data = end.recv(1 << 20)
                    if not data:
                        return
                    self.passed += len(data)
                    other[end].sendall(data)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("kind", ["unix", "port", "encrypted port"])
def test_envelopes_travel_both_ways_and_are_counted(wire: Wire, kind: str) -> None:
    if kind != "unix":
        keys = make_keys() if kind == "encrypted port" else None
        wire = Wire(token=wire.token, first_port=free_port() - 1, keys=keys)
    big = os.urandom(5 << 20)
    with pair(wire) as (listener, caller):
        assert caller.send(1, Word("hello"), [big])
        (envelope,) = until(listener, bool)
        assert (envelope.sender, envelope.message.text) == (2, "hello")
        assert b"".join(envelope.payload) == big
        assert listener.send(2, Word("and you"))
        (answer,) = until(caller, bool, listener)
        assert (answer.sender, answer.message.text) == (1, "and you")
        assert listener.traffic[2].bytes_in == caller.traffic[1].bytes_out > len(big)
        assert listener.traffic[2].envelopes_out == caller.traffic[1].envelopes_in == 1
        assert listener.refused == listener.malformed == 0


def test_the_counted_bytes_are_those_on_the_wire(wire: Wire) -> None:
    """Somebody passes the bytes of the link on, and counts them."""
    assert wire.folder is not None
    with tempfile.TemporaryDirectory() as detour, Relay(Path(detour) / "1", Path(wire.folder) / "1") as relay:
        with pair(msgspec.structs.replace(wire, detour=detour)) as (listener, caller):
            caller.send(1, Word("the link is there after this"))
            until(listener, bool)
            handshake = relay.passed - caller.traffic[1].bytes_out
            for size in (0, 1, 255, 256, 70_000, 9 << 20):
                assert caller.send(1, Word("x" * (size % 300)), [bytes(size), bytes(3)])
                until(listener, bool)
                assert listener.send(2, Word("y" * (size % 300)), [bytes(size)])
                until(caller, bool, listener)
        traffic = caller.traffic[1]
        assert relay.passed == handshake + traffic.bytes_out + traffic.bytes_in
        assert 0 < handshake < 1000


def test_sockets_are_the_users_own_and_are_gone_afterwards(wire: Wire) -> None:
    assert wire.folder is not None
    folder = Path(wire.folder)
    with pair(wire):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (path,) = folder.iterdir()
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(folder.iterdir()) == []


def test_folders_of_the_dead_are_removed(wire: Wire) -> None:
    assert wire.folder is not None
    gone = psutil.Popen(["true"])
    gone.wait(PATIENCE_S)
    left = Path(wire.folder).with_name(f"manyhands-{gone.pid}-left")
    left.mkdir()
    another = make_wire()
    assert another.folder is not None
    shutil.rmtree(another.folder)
    assert not left.exists()
    assert Path(wire.folder).exists()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5000", "tcp://10.0.0.7:5000", "tcp://[::]:5000", "tcp://*:5000"])
def test_an_open_address_needs_encryption(address: str) -> None:
    with pytest.raises(UsageError, match="open to other hosts; valid"):
        check_address(address, Wire(token="t"))
    check_address(address, Wire(token="t", keys=make_keys()))
    with pytest.raises(UsageError, match="no token"):
        check_address(address, Wire(token="", keys=make_keys()))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5000", "tcp://[::1]:5000", "ipc:///tmp/x/1"])
def test_this_host_needs_none(address: str) -> None:
    check_address(address, Wire(token="t"))


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"cannot listen at tcp://127.0.0.1:{port}"):
            Links(Wire(token="t", first_port=port - 1), 1, ENVELOPES, listens=True)


@pytest.mark.parametrize("credentials", ["none", "wrong token", "wrong key"])
def test_strangers_are_not_let_in(wire: Wire, credentials: str) -> None:
    keys = make_keys() if credentials == "wrong key" else None
    wire = msgspec.structs.replace(wire, keys=keys)
    with pair(wire) as (listener, caller), zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        if credentials == "wrong token":
            stranger.plain_username, stranger.plain_password = b"manyhands", wire.token[:-1].encode() + b"x"
        if credentials == "wrong key":
            assert keys is not None
            public, secret = make_keys()
            stranger.curve_serverkey = keys[0].encode()
            stranger.curve_publickey, stranger.curve_secretkey = public.encode(), secret.encode()
        stranger.connect(wire.home(1))
        for _ in range(3):
            stranger.send_multipart(ENVELOPES.encode(2, Word("let me in")))
        until(listener, lambda _: listener.refused > 0)
        caller.send(1, Word("it is me"))
        envelopes = until(listener, bool, caller)
        assert [envelope.message.text for envelope in envelopes] == ["it is me"]
        assert not stranger.poll(50), "a stranger got an answer"
        stranger.close()


def test_envelopes_that_are_no_frames_are_counted_and_not_answered(wire: Wire) -> None:
    with pair(wire) as (listener, caller):
        caller.send(1, Word("first"))
        until(listener, bool)
        insider = caller._opened[1]
        good = [bytes(part) for part in ENVELOPES.encode(2, Word("damaged"), [b"12345"])]
        for parts in ([b""], [b"noise"], [pickle.dumps(print)], [good[0], b"12346"], good[:1], [*good, b"more"]):
            insider.send_multipart(parts)
        caller.send(1, Word("last"))
        assert [envelope.message.text for envelope in until(listener, bool)] == ["last"]
        assert listener.malformed == 6
        assert caller.receive(0.05) == []


GREETING = bytes([0xFF, *[0] * 8, 0x7F, 3, 0]) + b"PLAIN".ljust(20, b"\0") + bytes(32)


def raw(wire: Wire, data: bytes, listener: Links[Word], *, to_the_end: bool = False) -> None:
    """Send bytes to the socket as they are, and wait until the other side hangs up."""
    with socket.socket(socket.AF_UNIX) as knock:
        knock.settimeout(PATIENCE_S)
        knock.connect(wire.home(1).removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            knock.sendall(data)
            while to_the_end and knock.recv(4096):
                pass
        listener.receive(0.005)


@settings(max_examples=40)
@given(noise=st.binary(max_size=300), greets=st.booleans())
def test_noise_at_the_door_does_no_harm(noise: bytes, greets: bool) -> None:
    wire = make_wire()
    try:
        with pair(wire) as (listener, caller):
            raw(wire, (GREETING if greets else b"") + noise, listener)
            caller.send(1, Word("hello"))
            assert [envelope.message.text for envelope in until(listener, bool, caller)] == ["hello"]
    finally:
        assert wire.folder is not None
        shutil.rmtree(wire.folder)


def test_a_length_of_four_gigabytes_costs_nothing(wire: Wire) -> None:
    with pair(wire) as (listener, caller):
        before = psutil.Process().memory_info().rss
        for flags in (0x02, 0x06):  # a long message, a long command
            raw(
                wire, GREETING + bytes([flags]) + struct.pack(">Q", 4 << 30) + b"x" * 100_000, listener, to_the_end=True
            )
        caller.send(1, Word("hello"))
        until(listener, bool, caller)
        assert psutil.Process().memory_info().rss - before < 32 << 20


def test_who_does_not_listen_is_given_up_when_it_is_gone(wire: Wire) -> None:
    with contextlib.closing(Links(wire, 1, ENVELOPES, listens=True)) as listener:
        with contextlib.closing(Links(wire, 2, ENVELOPES)) as caller:
            caller.send(1, Word("hello"))
            until(listener, bool)
        end = time.monotonic() + PATIENCE_S
        while listener.send(2, Word("still there?")):
            assert time.monotonic() < end
            listener.receive(0.01)
        assert listener.unsent == 1
