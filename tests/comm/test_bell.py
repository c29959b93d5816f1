"""The bell between processes: no wake-up is lost, no wait is longer than its time-out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from manyhands.comm.bell import Bell
from manyhands.comm.segment import Segment
from manyhands.engine import local
from manyhands.engine.channel import Channel

STALL_S = 20.0


def pass_token(channel: Channel) -> None:
    """In a child: wait for the token, hand it on; count the waits that only a time-out ended."""
    message = channel.receive(30)
    assert message is not None
    segment = Segment(message.fds[0], 4096)
    token, bell = segment.array(0, (1,), np.int64), Bell(segment.buffer, 64)
    me, players, rounds = (message.body[key] for key in ("me", "players", "rounds"))
    late = 0
    channel.send("ready")
    for _ in range(rounds):
        while True:
            count = bell.count
            if token[0] >= 0 and token[0] % players == me:
                break
            begun = time.monotonic()
            bell.wait(count, STALL_S)
            late += time.monotonic() - begun >= STALL_S
        token[0] += 1
        bell.ring()
    channel.send("done", {"late": late})


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(4096, "test")
    yield made
    made.close()


def test_no_wake_up_is_lost_between_processes_under_load(segment: Segment) -> None:
    """Five processes on fewer cores pass one token round; every ring wakes all of them."""
    players, rounds = 5, 400
    segment.array(0, (1,), np.int64)[0] = -1  # nobody's turn until all are there
    children = [local.spawn("test_bell:pass_token") for _ in range(players)]
    for me, child in enumerate(children):
        child.channel.send("go", {"me": me, "players": players, "rounds": rounds}, [segment.fd])
    for child in children:
        assert child.channel.receive(30) is not None
    begun = time.monotonic()
    token, bell = segment.array(0, (1,), np.int64), Bell(segment.buffer, 64)
    token[0] = 0
    bell.ring()
    late = []
    for child in children:
        answer = child.channel.receive(60)
        assert answer is not None
        late.append(answer.body["late"])
        assert child.wait(10)
        child.close()
    assert late == [0] * players
    assert token[0] == players * rounds
    assert time.monotonic() - begun < STALL_S


def test_every_ring_counts_from_many_threads(segment: Segment) -> None:
    bell = Bell(segment.buffer, 0)
    threads = [threading.Thread(target=lambda: [bell.ring() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bell.count == 2000


def test_a_wait_ends_with_its_time_out_and_not_before(segment: Segment) -> None:
    bell = Bell(segment.buffer, 0)
    for timeout_s in (0.0, 0.05, 0.3):
        begun = time.monotonic()
        bell.wait(bell.count, timeout_s)
        assert timeout_s - 0.005 <= time.monotonic() - begun < timeout_s + 1.0


def test_a_ring_between_looking_and_sleeping_is_heard(segment: Segment) -> None:
    bell = Bell(segment.buffer, 0)
    count = bell.count
    bell.ring()
    begun = time.monotonic()
    bell.wait(count, 10)
    assert time.monotonic() - begun < 1


def test_a_ring_wakes_a_sleeper_at_once(segment: Segment) -> None:
    bell = Bell(segment.buffer, 0)
    timer = threading.Timer(0.1, bell.ring)
    timer.start()
    begun = time.monotonic()
    bell.wait(bell.count, 10)
    assert 0.05 < time.monotonic() - begun < 2
    timer.join()


def test_the_count_wraps_round(segment: Segment) -> None:
    segment.array(0, (1,), np.uint32)[0] = 2**32 - 1
    bell = Bell(segment.buffer, 0)
    assert bell.count == 2**32 - 1
    bell.ring()
    assert bell.count == 0
    assert segment.array(4, (1,), np.uint32)[0] == 0, "the ring wrote beyond its word"
