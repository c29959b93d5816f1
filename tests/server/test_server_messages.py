"""Messages of a run: each of them travels, and comes back as it was."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from manyhands.core import messages as core
from manyhands.core.chunks import Chunks
from manyhands.core.policies import Apply
from manyhands.errors import FrameError
from manyhands.server.coder import Update
from manyhands.server.messages import ENVELOPES, Fetch, Fetched, PulledRows, PullRows, Stale, bare, filled

VIEW = core.View(1, 2, 3, 4, None, 5)
VIEWS = core.Views(2, (VIEW, dataclasses.replace(VIEW, shard=0, backup=7)))
ENTRY = core.Entry(8, 3, 21, Apply(0.5), None)
STATE = core.State(1, 2, 3, 8, 8, Chunks(5, (7, 9)))
MESSAGES = [
    core.Ask(1, 2, None),
    core.Ask(1, 2, 3),
    VIEWS,
    core.Lease(1, None, False, VIEWS),
    core.Working(2, 4),
    core.Pull(1, 2, 3, 4),
    core.Pulled(1, 2, 4, 8),
    core.Push(1, 2, 3, 4, 8, None),
    core.Pushed(1, 2, 3, 4),
    core.Refused(1, 3),
    STATE,
    core.Replicate(1, 3, (ENTRY,)),
    core.Replicate(1, 3, (dataclasses.replace(ENTRY, decision=None),)),
    core.Replicated(1, 3, 8),
    core.Beat(1.25, (core.Report(1, 3, "in sync"),)),
    core.Grant(1.25, VIEWS),
    core.Snapshot(1, 2, 3, 4, Chunks(5)),
    core.Saved(1, 2, 3),
    Fetch(1, 2, 3),
    Fetched(2, STATE),
    Stale(1, 2, 3, 4),
    PullRows(1, 2, 3, 4, 0, 7),
    PulledRows(1, 2, 4, 7),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_travels(message: object) -> None:
    envelope = ENVELOPES.decode([bytes(part) for part in ENVELOPES.encode(9, message, [b"bytes"])])
    assert (envelope.sender, envelope.message) == (9, message)
    assert b"".join(envelope.payload) == b"bytes"


def test_no_message_is_forgotten() -> None:
    assert set(typing.get_args(core.Message)) <= {type(message) for message in MESSAGES}


def test_tensors_travel_beside_the_message() -> None:
    payload = [memoryview(b"gradient")]
    push = core.Push(1, 2, 3, 4, 8, payload)
    assert b"gradient" not in bytes(ENVELOPES.encode(1, bare(push))[0])
    assert filled(bare(push), payload) == push
    assert filled(STATE, payload).data is payload
    assert bare(STATE) is STATE


def test_the_entries_of_a_step_travel_together_each_with_its_own_bytes() -> None:
    pieces = [[memoryview(b"one"), memoryview(b"gradient")], [], [memoryview(b"another")]]
    updates = [Update(piece, piece) if piece else None for piece in pieces]
    message = core.Replicate(1, 3, tuple(dataclasses.replace(ENTRY, update=update) for update in updates))
    payload = [part for piece in pieces for part in piece]
    without = bare(message)
    assert [entry.update for entry in without.entries] == [11, 0, 7]
    assert [entry.update for entry in filled(without, payload).entries] == pieces
    for wrong in (payload[:-1], [*payload, memoryview(b"more")], [memoryview(b"onegradientanother")]):
        with pytest.raises(FrameError, match="entries"):
            filled(without, wrong)


def test_a_message_of_a_wrong_shape_is_refused() -> None:
    head = bytes(ENVELOPES.encode(1, core.Beat(1.0, (core.Report(0, 1, "in sync"),)))[0])
    bad = ENVELOPES.encode(1, dataclasses.replace(core.Beat(1.0, ()), reports=(core.Report(0, 1, "asleep"),)))  # type: ignore[arg-type]
    assert ENVELOPES.decode([head]).sender == 1
    with pytest.raises(FrameError, match="asleep"):
        ENVELOPES.decode([bytes(part) for part in bad])
