"""Envelopes: what comes out is what went in, or a FrameError."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.comm import envelope
from manyhands.comm.envelope import Envelopes, pour
from manyhands.errors import FrameError


@dataclass(frozen=True, slots=True)
class Small:
    shard: int
    name: str | None


@dataclass(frozen=True, slots=True)
class Other:
    chunks: tuple[int, ...]


ENVELOPES = Envelopes[Small | Other]([Small, Other])
MESSAGES = st.one_of(
    st.builds(Small, st.integers(0, 2**40), st.none() | st.text(max_size=20)),
    st.builds(Other, st.lists(st.integers(0, 99), max_size=20).map(tuple)),
)


def wire(message: Small | Other, payload: list[bytes], sender: int = 3) -> list[bytes]:
    return [bytes(part) for part in ENVELOPES.encode(sender, message, payload)]


@given(MESSAGES, st.lists(st.binary(max_size=50), max_size=4), st.integers(0, 2**31))
def test_a_frame_comes_out_as_it_went_in(message: Small | Other, payload: list[bytes], sender: int) -> None:
    envelope = ENVELOPES.decode(wire(message, payload, sender))
    assert (envelope.sender, envelope.message) == (sender, message)
    assert b"".join(envelope.payload) == b"".join(payload)


def test_long_runs_of_bytes_are_cut_and_put_together_again() -> None:
    payload = [b"a" * (envelope.PART_BYTES + 5), b"", b"b" * 3]
    parts = wire(Small(1, None), payload)
    assert [len(part) for part in parts[1:]] == [envelope.PART_BYTES, 5, 3]
    homes = [bytearray(7), bytearray(envelope.PART_BYTES), bytearray(1)]
    pour(ENVELOPES.decode(parts).payload, [memoryview(home) for home in homes])
    assert b"".join(homes) == b"".join(payload)


def test_bytes_that_do_not_fit_their_place_change_nothing() -> None:
    home = bytearray(4)
    for payload in (b"abc", b"abcde", b""):
        with pytest.raises(FrameError, match=f"{len(payload)} bytes of tensors where 4 belong"):
            pour([memoryview(payload)], [memoryview(home)])
    assert home == bytes(4)


@given(MESSAGES, st.lists(st.binary(min_size=1, max_size=30), max_size=3), st.data())
def test_any_flipped_bit_is_noticed(message: Small | Other, payload: list[bytes], data: st.DataObject) -> None:
    parts = wire(message, payload)
    part = data.draw(st.integers(0, len(parts) - 1))
    bit = data.draw(st.integers(0, 8 * len(parts[part]) - 1))
    damaged = bytearray(parts[part])
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError, match="checksum"):
        ENVELOPES.decode([*parts[:part], bytes(damaged), *parts[part + 1 :]])


@given(MESSAGES, st.data())
def test_parts_that_are_missing_doubled_or_exchanged_are_noticed(message: Small | Other, data: st.DataObject) -> None:
    parts = wire(message, [b"one", b"twos", b"three"])
    changed = data.draw(st.permutations(parts)) if data.draw(st.booleans()) else parts[: data.draw(st.integers(0, 3))]
    if changed == parts:
        changed = [*parts, parts[-1]]
    with pytest.raises(FrameError):
        ENVELOPES.decode(changed)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_noise_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        ENVELOPES.decode(parts)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=3))
def test_noise_with_a_good_checksum_is_refused(head: bytes, payload: list[bytes]) -> None:
    with pytest.raises(FrameError):
        ENVELOPES.decode([envelope._checksum(head, payload).to_bytes(4, "little") + head, *payload])


def signed(*header: object) -> list[bytes]:
    head = msgspec.msgpack.encode(list(header))
    return [envelope._checksum(head, []).to_bytes(4, "little") + head]


@pytest.mark.parametrize(
    "header, complaint",
    [
        ((envelope.VERSION + 1, 1, "Small", [], [1, None]), "version 2"),
        ((envelope.VERSION, 1, "Nobody", [], {}), "unknown kind 'Nobody'"),
        ((envelope.VERSION, 1, "Small", [2**32], {"shard": 1, "name": None}), "sizes"),
        ((envelope.VERSION, 1, "Small", [], {"shard": "x", "name": None}), "Expected `int`"),
        ((envelope.VERSION, 1, "Small", [], {"shard": 1}), "missing required field"),
        ((envelope.VERSION, 1, "Small", []), "at least length"),
    ],
)
def test_headers_that_are_wrong_are_refused_with_the_reason(header: tuple[object, ...], complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        ENVELOPES.decode(signed(*header))


def test_a_length_is_not_believed() -> None:
    """A msgpack string that says that it has 4 GiB."""
    head = b"\x95\x01\x01\xdb\xff\xff\xff\xff"
    with pytest.raises(FrameError, match="cannot be read"):
        ENVELOPES.decode([envelope._checksum(head, []).to_bytes(4, "little") + head])


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (Path.touch, (trace,))

    code = pickle.dumps(Bomb())
    for parts in (
        [code],
        [*wire(Small(1, None), []), code],
        [envelope._checksum(code, []).to_bytes(4, "little") + code],
    ):
        with pytest.raises(FrameError):
            ENVELOPES.decode(parts)
    assert not trace.exists()


def test_more_than_the_limits_is_refused() -> None:
    with pytest.raises(FrameError, match="parts; valid"):
        ENVELOPES.decode([b"x"] * (envelope.PARTS + 1))
    with pytest.raises(FrameError, match="a head of"):
        ENVELOPES.decode([bytes(envelope.HEAD_BYTES + 1)])
