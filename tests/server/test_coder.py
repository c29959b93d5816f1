"""How a part travels: what is decoded is what was sent, what is left out comes later, and both ends stay equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.comm.arena import Arena
from manyhands.comm.codecs import CODECS, resolve_codec
from manyhands.comm.envelope import Stream
from manyhands.errors import FrameError
from manyhands.server.coder import Coder, Remainder
from manyhands.server.part import Part
from manyhands.train.state import ModelState, Needs

SHARDS = 2


@pytest.fixture
def arena() -> Iterator[Arena]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 9), nn.Linear(9, 5).double())
    optimizer = mh.optimizer("sgd", lr=0.1)(model.parameters())
    state = ModelState(model, optimizer, Needs(servers=SHARDS, exchange=True), lanes=1, samples=0, stats=2, ring=1)
    state.arena.present[0] = 1
    for gradient in state.arena.gradients(0):
        gradient.copy_(torch.randn_like(gradient))
    yield state.arena
    state.arena.close()


def sent(coder: Coder, remainder: Remainder, arena: Arena) -> list[memoryview]:
    flags, _, *buffers = coder.part.update(0)
    return coder.close(flags, remainder.encode(flags, coder.part.of(arena.lane(0))), buffers)


def gradient_of(values: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes(values)), dtype=torch.uint8)  # type: ignore[call-overload]


def room(coder: Coder) -> int:
    return len(coder.part.update(0)[1])


@pytest.mark.parametrize("word", [*CODECS, "topk:0.2"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_what_is_left_out_of_an_update_comes_later(word: str, shard: int, arena: Arena) -> None:
    """What has arrived and what is left are together what was sent."""
    coder = Coder(Part(arena, shard, SHARDS), resolve_codec(word))
    remainder = Remainder(coder, room(coder))
    total, times = torch.zeros(room(coder) // 4), 5
    for _ in range(times):
        update = coder.open(sent(coder, remainder, arena))
        remainder.keep()
        total += gradient_of(update.values[1]).view(torch.float32)
    assert remainder._left is None or remainder._left.any()
    for _, dtype, where in coder.part.segments:
        wanted = coder.part.of(arena.lane(0))[where].view(dtype)
        if dtype == torch.float32:
            got = total[where.start // 4 : where.stop // 4]
            if remainder._left is not None:
                got = got + remainder._left[where].view(dtype)
            assert torch.allclose(got, times * wanted, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(gradient_of(update.values[1])[where].view(dtype), wanted)
    assert [bytes(b) for b in update.values[2:]] == [bytes(b) for b in coder.part.update(0)[2:]]


def test_an_update_that_had_no_effect_leaves_the_remainder_as_it_was(arena: Arena) -> None:
    coder = Coder(Part(arena, 0, SHARDS), resolve_codec("topk"))
    remainder = Remainder(coder, room(coder))
    first = [bytes(piece) for piece in sent(coder, remainder, arena)]
    assert [bytes(piece) for piece in sent(coder, remainder, arena)] == first
    remainder.keep()
    assert [bytes(piece) for piece in sent(coder, remainder, arena)] != first


@pytest.mark.parametrize("word", ["int8", "topk", "bf16"])
def test_both_ends_of_a_pull_stay_equal_and_come_near_the_parameters(word: str, arena: Arena) -> None:
    coder = Coder(Part(arena, 0, SHARDS), resolve_codec(word))
    live = coder.part.of(arena.plane(0))
    server, worker = live.clone(), live.clone()
    segments = [where for _, dtype, where in coder.part.segments if dtype == torch.float32]
    for where in segments:
        live[where].view(torch.float32).add_(torch.randn(len(live[where]) // 4))
    far = [(live[where].view(torch.float32) - server[where].view(torch.float32)).norm() for where in segments]
    for _ in range(30):
        frames = coder.difference(live, server)
        stream = Stream([memoryview(frame) for frame in frames])
        coder.follow(stream, worker)
        stream.end()
        assert torch.equal(server, worker)
    for where, before in zip(segments, far, strict=True):
        assert (live[where].view(torch.float32) - worker[where].view(torch.float32)).norm() < before
    if word == "int8":
        assert len(frames[0]) < len(live) / 3.5


def test_a_parameter_without_gradient_does_not_travel(arena: Arena) -> None:
    coder = Coder(Part(arena, 0, SHARDS), resolve_codec("bf16"))
    full = sum(map(len, sent(coder, Remainder(coder, room(coder)), arena)))
    arena.present[0, 0] = 0
    payload = sent(coder, Remainder(coder, room(coder)), arena)
    assert sum(map(len, payload)) < full
    update = coder.open(payload)
    number, _, where = coder.part.segments[0]
    assert number == 0 and not gradient_of(update.values[1])[where].any()


@pytest.mark.parametrize("word", [None, "int8"])
def test_what_is_no_update_is_refused(word: str | None, arena: Arena) -> None:
    coder = Coder(Part(arena, 0, SHARDS), resolve_codec(word))
    payload = [bytes(piece) for piece in coder.part.update(0)]
    if word is not None:
        payload = [bytes(piece) for piece in sent(coder, Remainder(coder, room(coder)), arena)]
    whole = b"".join(payload)
    damaged = [whole[:-1], whole + b"\0", whole[: len(payload[0]) + 2], b""]
    if word is not None:
        at = len(payload[0])
        damaged += [whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 :], whole[:at] + bytes(40) + whole[at + 40 :]]
    coder.open([memoryview(whole)])
    for wrong in damaged:
        with pytest.raises(FrameError):
            coder.open([memoryview(wrong)])


@pytest.mark.parametrize("word", [None, "int8"])
def test_a_backup_gets_the_update_as_the_primary_has_corrected_it(word: str | None, arena: Arena) -> None:
    coder = Coder(Part(arena, 0, SHARDS), resolve_codec(word))
    payload = coder.part.update(0) if word is None else sent(coder, Remainder(coder, room(coder)), arena)
    update = coder.open(payload)
    plain = gradient_of(update.values[1])
    live = coder.part.of(arena.plane(0))
    read = torch.zeros_like(live)
    coder.compensate(update, live, read, 0.5)
    for _, dtype, where in coder.part.segments:
        gradient, parameters = plain[where].view(dtype), live[where].view(dtype)
        expected = torch.addcmul(gradient, gradient * gradient, parameters, value=0.5)
        assert torch.equal(gradient_of(update.values[1])[where].view(dtype), expected)
    assert [bytes(v) for v in coder.open(update.payload).values] == [bytes(v) for v in update.values]
