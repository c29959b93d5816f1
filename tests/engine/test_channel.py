"""Frames between processes: whole, in order, with descriptors; time-outs and ends are told apart."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from manyhands.engine.channel import Channel, ChannelClosed


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    for number in range(50):
        ours.send("count", {"number": number, "nested": {"list": [1, None, b"\x00"]}})
    for number in range(50):
        message = theirs.receive(1)
        assert message is not None and message.kind == "count"
        assert message.body == {"number": number, "nested": {"list": [1, None, b"\x00"]}}
    theirs.send("empty")
    answer = ours.receive(1)
    assert answer is not None and (answer.kind, answer.body, answer.fds) == ("empty", {}, [])


def test_a_frame_larger_than_the_socket_passes_both_ways_at_once(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    load = os.urandom(5_000_000)
    sender = threading.Thread(target=lambda: [ours.send("big", {"load": load}) for _ in range(2)])
    sender.start()
    received = [theirs.receive(10) for _ in range(2)]
    sender.join()
    assert all(message is not None and message.body["load"] == load for message in received)


def test_descriptors_travel_and_are_not_inherited(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    read, write = os.pipe()
    ours.send("pipe", {"n": 1}, [write, read])
    ours.send("none", {"n": 2})
    first, second = theirs.receive(1), theirs.receive(1)
    assert first is not None and second is not None
    assert second.fds == [] and len(first.fds) == 2
    assert not set(first.fds) & {read, write}
    assert not any(os.get_inheritable(fd) for fd in first.fds)
    os.write(first.fds[0], b"through")
    assert os.read(read, 10) == b"through"
    for fd in (*first.fds, read, write):
        os.close(fd)


def test_who_stops_in_the_middle_of_a_frame_holds_nobody_up() -> None:
    """Whoever looks gets None at once, and the frame once the rest of it has come, with its descriptors."""
    read, write = os.pipe()
    sender, raw = Channel.pair()
    sender.send("big", {"load": bytes(range(256)) * 100}, [write])
    whole, fds, _, _ = socket.recv_fds(raw, 1 << 20, 4)
    ours, theirs = Channel.pair()
    begun = time.monotonic()
    for first, stop in ((0, 3), (3, 8), (8, 9), (9, len(whole) - 1)):
        if first:
            theirs.sendall(whole[first:stop])
        else:
            socket.send_fds(theirs, [whole[:stop]], fds)
        assert ours.receive(0) is None
    assert time.monotonic() - begun < 5
    theirs.sendall(whole[-1:])
    message = ours.receive(0)
    assert message is not None and message.body["load"] == bytes(range(256)) * 100
    os.write(message.fds[0], b"through")
    assert os.read(read, 10) == b"through"
    for fd in (*message.fds, *fds, read, write):
        os.close(fd)
    for end in (sender, raw, ours, theirs):
        end.close()


def test_nothing_to_read_is_none_after_the_time_out(ends: tuple[Channel, Channel]) -> None:
    ours, _ = ends
    for timeout_s in (0, 0.1):
        begun = time.monotonic()
        assert ours.receive(timeout_s) is None
        assert not ours.poll(timeout_s)
        assert 2 * timeout_s <= time.monotonic() - begun + 0.01 < 2 * timeout_s + 1


def test_the_end_is_an_error_after_what_was_sent_before_it(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.send("last")
    theirs.close()
    message = ours.receive(1)
    assert message is not None and message.kind == "last"
    with pytest.raises(ChannelClosed, match="closed the connection"):
        ours.receive(1)
    with pytest.raises(ChannelClosed, match="'hello' could not be delivered"):
        ours.send("hello")


def test_an_end_in_the_middle_of_a_frame_is_an_error() -> None:
    ours, raw = Channel.pair()
    raw.sendall((1000).to_bytes(8, "little") + b"only this")
    raw.close()
    with pytest.raises(ChannelClosed, match="in the middle of a message"):
        ours.receive(1)
    ours.close()


def test_a_reader_that_does_not_read_is_a_time_out(ends: tuple[Channel, Channel]) -> None:
    ours, _ = ends
    begun = time.monotonic()
    with pytest.raises(ChannelClosed, match="could not be delivered"):
        ours.send("big", {"load": bytes(20_000_000)}, timeout_s=0.2)
    assert time.monotonic() - begun < 5


def test_a_process_with_many_open_files_can_still_talk() -> None:
    """Descriptors above 1023: notebooks and servers have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1300:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    filler = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        left, right = socket.socketpair()
        ours, theirs = Channel(left), Channel(right)
        assert ours.fileno() > 1023
        ours.send("hello")
        message = theirs.receive(1)
        ours.close()
        theirs.close()
    finally:
        for fd in filler:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert message is not None and message.kind == "hello"
