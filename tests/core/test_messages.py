"""Every message survives the wire, and the times that all must agree on are checked."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from manyhands.core.chunks import Chunks
from manyhands.core.messages import (
    Ask,
    Beat,
    Entry,
    Grant,
    Lease,
    Message,
    Pull,
    Pulled,
    Push,
    Pushed,
    Refused,
    Replicate,
    Replicated,
    Report,
    Saved,
    Snapshot,
    State,
    Timing,
    View,
    Views,
    Working,
)
from manyhands.core.policies import Apply
from manyhands.errors import UsageError

VIEWS = Views(2, (View(0, 2, 7, 4, None, 1), View(1, 2, 9, 4, 5, 1)))
MESSAGES = [
    Ask(3, 2, None),
    Ask(4, 2, 11),
    VIEWS,
    Lease(3, 11, False, VIEWS),
    Working(2, 11),
    Pull(0, 2, 7, 11),
    Pulled(0, 2, 11, 40),
    Push(0, 2, 7, 11, 40, b"update"),
    Pushed(0, 2, 7, 11),
    Refused(0, 8),
    State(1, 2, 9, 12, 11, Chunks(10, (12, 13))),
    Replicate(1, 9, (Entry(13, 9, 11, Apply(0.5, step=False), b"update"),)),
    Replicate(1, 9, (Entry(13, 9, 11, None, b"update"),)),
    Replicated(1, 9, 13),
    Beat(12.5, (Report(1, 9, "in sync"),)),
    Grant(12.5, VIEWS),
    Snapshot(1, 2, 9, 3, Chunks(12)),
    Saved(1, 2, 3),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Any) -> None:
    wire = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(wire, type=type(message)) == message


def test_no_message_is_left_out() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


def test_the_coordinator_waits_longer_than_the_slowest_clock_holds_a_lease() -> None:
    timing = Timing(lease_s=1.0, drift=0.1)
    slowest_lease, fastest_wait = timing.lease_s / 0.9, timing.wait_s / 1.1
    assert fastest_wait >= slowest_lease - 1e-9
    assert Timing(lease_s=1.0, drift=0.0).wait_s == 1.0


@pytest.mark.parametrize("wrong", [{"beat_s": 0.6}, {"beat_s": 0.0}, {"drift": 1.0}, {"drift": -0.1}])
def test_times_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="valid:"):
        Timing(**wrong)
