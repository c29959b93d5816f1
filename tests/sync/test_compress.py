"""The compressor: nothing is lost but put off, a lane can be sent again, and bytes are counted as those of a ring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from rig import SHAPES, make_parameters
from torch import nn

from manyhands.comm.arena import LEFT_OUT
from manyhands.comm.codecs import CODECS, Codec, resolve_codec
from manyhands.sync.compress import Answer, Compressor, memory_of
from manyhands.train.state import ModelState, Needs

LOSSY = [word for word in CODECS if word != "fp32"]
LANES = 2


def codec_of(word: str) -> Codec:
    codec = resolve_codec(word)
    assert codec is not None
    return codec


@contextmanager
def state_for(word: str, shapes: list[tuple[tuple[int, ...], torch.dtype]] = SHAPES) -> Iterator[ModelState]:
    model = nn.ParameterList(make_parameters(shapes))
    memory = memory_of(codec_of(word))
    state = ModelState(
        model, torch.optim.SGD(model.parameters()), Needs(memory=memory), lanes=LANES, samples=0, stats=1, ring=1
    )
    with closing(state.arena):
        yield state


def fill(state: ModelState, lane: int, seed: int) -> list[torch.Tensor]:
    """A gradient in the lane; returns a copy of it."""
    generator = torch.Generator().manual_seed(seed)
    for gradient in state.arena.gradients(lane):
        gradient.copy_(torch.randn(gradient.shape, generator=generator) * 1e-2)
    state.arena.present[lane] = 1
    return [gradient.clone() for gradient in state.arena.gradients(lane)]


def residual(state: ModelState, step: int, lane: int) -> list[torch.Tensor]:
    return state.arena.memory(step, lane)["residual"]


@pytest.mark.parametrize("word", LOSSY)
def test_what_is_left_out_is_sent_later(word: str) -> None:
    """All that was sent and what is still kept add up to all gradients, for each lane by itself."""
    with state_for(word) as state:
        compressor = Compressor(state.arena, codec_of(word), 0)
        for lane in range(LANES):
            wanted = [torch.zeros(shape, dtype=torch.float64) for shape, _ in SHAPES]
            sent = [torch.zeros(shape, dtype=torch.float64) for shape, _ in SHAPES]
            for step in range(7):
                for total, gradient in zip(wanted, fill(state, lane, 10 * step + lane), strict=True):
                    total += gradient
                compressor.run(step, lane)
                for total, gradient in zip(sent, state.arena.gradients(lane), strict=True):
                    total += gradient
            for total, arrived, kept in zip(wanted, sent, residual(state, 7, lane), strict=True):
                torch.testing.assert_close(arrived + kept, total, rtol=0, atol=1e-6)
            assert not torch.equal(sent[0], wanted[0]) and residual(state, 7, lane)[0].any()


@pytest.mark.parametrize("word", CODECS)
def test_a_lane_is_sent_again_to_the_same_bits(word: str) -> None:
    """As after a death: from half-written memory of the next step, and by another compressor."""
    with state_for(word) as state:
        for step in range(4):
            fill(state, 1, step)
            Compressor(state.arena, codec_of(word), 0).run(step, 1)
            first = [tensor.clone() for tensor in state.arena.gradients(1)]
            kept = [tensor.clone() for tensor in residual(state, step + 1, 1)] if memory_of(codec_of(word)) else []
            for tensor in residual(state, step + 1, 1) if kept else []:
                tensor.fill_(9.0 if tensor.dtype == torch.float32 else 0.0)
            fill(state, 1, step)
            Compressor(state.arena, codec_of(word), 1).run(step, 1)
            again = [*state.arena.gradients(1), *(residual(state, step + 1, 1) if kept else [])]
            assert all(torch.equal(one, other) for one, other in zip([*first, *kept], again, strict=True))


def test_fp32_changes_no_bit_and_keeps_nothing() -> None:
    assert memory_of(codec_of("fp32")) == memory_of(None) == ()
    with state_for("fp32") as state:
        before = fill(state, 0, 1)
        before[0].view(-1)[5] = torch.nan
        state.arena.gradients(0)[0].view(-1)[5] = torch.nan
        Compressor(state.arena, codec_of("fp32"), 0).run(0, 0)
        for one, other in zip(before, state.arena.gradients(0), strict=True):
            assert one.view(torch.uint8).equal(other.view(torch.uint8))


@pytest.mark.parametrize("word", ["int8", "topk"])
def test_a_parameter_without_gradient_sends_nothing_and_keeps_its_residual(word: str) -> None:
    with state_for(word) as state:
        arena, compressor = state.arena, Compressor(state.arena, codec_of(word), 0)
        fill(state, 0, 1)
        compressor.run(0, 0)
        before = residual(state, 1, 0)[0].clone()
        assert before.any()
        sent = arena.control.slot_value(0, "sent_bytes")
        fill(state, 0, 2)
        arena.present[0] = 0
        arena.gradients(0)[0].zero_()
        compressor.run(1, 0)
        assert torch.equal(residual(state, 2, 0)[0], before) and not arena.gradients(0)[0].any()
        assert arena.control.slot_value(0, "sent_bytes") == sent


def test_other_types_travel_as_they_are() -> None:
    number = [dtype for _, dtype in SHAPES].index(torch.float64)
    with state_for("topk") as state:
        before = fill(state, 0, 1)[number]
        Compressor(state.arena, codec_of("topk"), 0).run(0, 0)
        assert torch.equal(state.arena.gradients(0)[number], before)
        assert not residual(state, 1, 0)[number].any()


@pytest.mark.parametrize("word", LOSSY)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_arrives_and_does_not_stay(word: str, bad: float) -> None:
    with state_for(word) as state:
        fill(state, 0, 1)
        state.arena.gradients(0)[0].view(-1)[7:9000] = bad
        Compressor(state.arena, codec_of(word), 0).run(0, 0)
        assert not torch.isfinite(state.arena.gradients(0)[0].view(-1)[7:9000]).any()
        assert torch.isfinite(state.arena.gradients(0)[0].view(-1)[9000:]).all()
        assert all(torch.isfinite(kept).all() for kept in residual(state, 1, 0))


@pytest.mark.parametrize("step", [4, 7])
def test_a_lane_without_work_carries_over_what_it_keeps(step: int) -> None:
    with state_for("int8") as state:
        for lane in range(LANES):
            for bank in range(2):
                for index, kept in enumerate(residual(state, bank, lane)):
                    kept.fill_(100 * lane + 10 * bank + index)
        state.arena.carry_over(step, 1)
        for lane, bank in ((0, step), (0, step + 1), (1, step), (1, step)):
            expected = 100 * lane + 10 * (bank % 2)
            found = residual(state, step + 1 if lane == 1 else bank, lane)
            assert [float(kept.view(-1)[-1]) for kept in found] == [expected + i for i in range(len(SHAPES))]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("word", CODECS)
def test_bytes_are_those_of_a_ring(word: str, workers: int) -> None:
    """Each worker holds one lane and an equal share of the units: the formulas hold to the byte."""
    values = 4 * 32_768  # four units
    with state_for(word, [((values,), torch.float32)]) as state:
        arena, codec = state.arena, codec_of(word)
        arena.control.write_plan(0, 0, [0] * LANES, np.arange(4) * workers // 4)
        for slot in range(workers):
            compressor = Compressor(arena, codec, slot)
            fill(state, 0, slot)
            header_bytes = codec.encode(arena.gradients(0)[0]).size_bytes - codec.payload_bytes(values)
            compressor.begin_step()
            compressor.run(0, 0)
            sent, received = (arena.control.slot_value(slot, f"{name}_bytes") for name in ("sent", "received"))
            away = (workers - 1) / workers
            assert sent == int((values * codec.bits_per_value / 8 + header_bytes) * away)
            assert received == 4 * values * away
            if word == "fp32":
                assert sent + received == int(8 * values * away + header_bytes * away)


def test_what_sums_lack_waits_for_a_step_in_which_their_parameter_takes_part() -> None:
    """As where fragments have their turns: of a parameter without a change nothing travels, and nothing is lost."""
    model = nn.ParameterList(make_parameters([((64,), torch.float32), ((64,), torch.float32)]))
    state = ModelState(
        model, torch.optim.SGD(model.parameters()), Needs(answers=True, memory=memory_of(codec_of("topk:0.1"))),
        lanes=1, samples=0, stats=1, ring=1,
    )  # fmt: skip
    with closing(state.arena):
        left = state.arena.plane(1 + state.arena.spec.planes.index(LEFT_OUT)).view(torch.float32)
        left.fill_(0.5)
        sums = torch.zeros(128)
        Answer(state.arena, codec_of("topk:0.1"))(sums, 0, np.array([0, 1], np.uint8))
        assert (left[:64] == 0.5).all() and not sums[:64].any()
        torch.testing.assert_close(left[64:] + sums[64:], torch.full((64,), 0.5))
        assert sums[64:].any()
