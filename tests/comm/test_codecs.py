"""Codecs: how far off the values are, how large the frames, and that no bytes from outside do harm."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.comm.codecs import CODECS, Codec, resolve_codec
from manyhands.comm.frames import Frame
from manyhands.comm.topk import TopK
from manyhands.errors import FrameError, UsageError

WORDS = (*CODECS, "int8:64", "int4:8", "sign:1024", "topk:0.2", "topk:1.0")
SMALL = 2.0**-118  # below it a scale has no digits left, and the block counts as zero
LENGTHS = st.integers(0, 9000) | st.sampled_from([255, 256, 257, 4095, 4096, 4097, 65_536, 70_001])


def codec_of(word: str) -> Codec:
    codec = resolve_codec(word)
    assert codec is not None
    return codec


def vector(length: int, seed: int, exponent: int = 0) -> torch.Tensor:
    """Values of very different sizes, with zeros and repetitions among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator) * 10.0 ** torch.randint(-6, 3, (length,), generator=generator)
    values[torch.rand(length, generator=generator) < 0.2] = 0.0
    values[torch.rand(length, generator=generator) < 0.1] = 1.5
    return values * 2.0**exponent


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, math.nan)
    codec.decode(Frame.from_bytes(codec.encode(values).to_bytes()), out)
    return out


def sizes(values: torch.Tensor, block: int) -> torch.Tensor:
    """The largest size in the block of every value."""
    rows = [part.abs().max().expand(len(part)) for part in values.split(block) if len(part)]
    return torch.cat(rows) if rows else values


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 2**32), st.integers(-140, 100))
@example(5, 0, -140)
def test_values_come_back_within_the_bounds_of_their_codec(length: int, seed: int, exponent: int) -> None:
    values = vector(length, seed, exponent)
    assert torch.equal(there_and_back(codec_of("fp32"), values), values)
    off = (there_and_back(codec_of("bf16"), values) - values).abs()
    assert (off <= values.abs() / 256 + SMALL).all()
    for word, block, levels in (("int8", 256, 127), ("int8:64", 64, 127), ("int4", 128, 7), ("int4:8", 8, 7)):
        off = (there_and_back(codec_of(word), values) - values).abs()
        limit = sizes(values, block) / (2 * levels) * (1 + 1e-5) + levels * SMALL
        assert (off <= limit).all(), word
    back = there_and_back(codec_of("sign"), values)
    for sent, came in zip(values.split(256), back.split(256), strict=True):
        assert torch.equal(came >= 0, sent >= 0) or not came.any()
        mean = 0.0 if not len(sent) else float(sent.double().abs().mean())
        torch.testing.assert_close(came.abs().double(), torch.full((len(came),), mean).double(), rtol=1e-6, atol=SMALL)


@given(LENGTHS, st.integers(0, 2**32), st.sampled_from([0.01, 0.2, 1.0]))
def test_topk_sends_the_largest_as_they_are(length: int, seed: int, fraction: float) -> None:
    values = vector(length, seed)
    back = there_and_back(TopK(fraction), values)
    for sent, came in zip(values.split(4096), back.split(4096), strict=True):
        kept = max(round(fraction * len(sent)), min(32, len(sent)))
        # A stable sort takes the first of equal values, as the codec promises.
        chosen = sent.abs().sort(descending=True, stable=True).indices[:kept]
        expected = torch.zeros_like(sent)
        expected[chosen] = sent[chosen]
        assert torch.equal(came, expected)


@given(LENGTHS, st.integers(0, 2**32), st.sampled_from(WORDS))
def test_the_same_values_give_the_same_bytes_and_the_size_is_known(length: int, seed: int, word: str) -> None:
    values, codec = vector(length, seed), codec_of(word)
    frame = codec.encode(values)
    shifted = torch.empty(length + 3)[3:].copy_(values)  # another alignment in memory
    assert codec_of(word).encode(shifted).to_bytes() == frame.to_bytes()
    assert codec.encode(there_and_back(codec, values)).size_bytes == frame.size_bytes == len(frame.to_bytes())
    assert len(frame.payload) == codec.payload_bytes(length)
    assert frame.size_bytes - len(frame.payload) <= 24


def test_what_the_bytes_of_each_codec_are() -> None:
    """A change of the format must not go unseen: two versions may talk to each other."""
    values = torch.tensor([1.0, -2.0, 0.0, 127.0])
    payloads = {word: codec_of(word).encode(values).payload.hex() for word in CODECS}
    assert payloads == {
        "fp32": "0000803f000000c0000000000000fe42",
        "bf16": "803f00c00000fe42",
        "int8": "0000803f" + "01fe007f",
        "int4": "92249141" + "88f8",
        "sign": "00000242" + "0d",
        "topk": "001000023000" + "0000803f000000c0000000000000fe42",
    }
    assert codec_of("int8").encode(values).to_bytes()[:8].hex() == "0700" + "92a4" + b"int8".hex()


@pytest.mark.parametrize("word, least", [("bf16", 1.99), ("int8", 3.9), ("int4", 7.4), ("topk", 50), ("sign", 28)])
def test_how_much_smaller_frames_are(word: str, least: float) -> None:
    """Header included, for tensors as they come in models: one with a ragged end."""
    codec = codec_of(word)
    for length in (62_720, 1_000_003):
        frame = codec.encode(vector(length, 1))
        assert 4 * length / frame.size_bytes >= least
        assert 8 * len(frame.payload) / length == pytest.approx(codec.bits_per_value, rel=0.05)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("share", [1e-4, 0.5, 1.0])
def test_what_is_not_finite_stays_so_and_the_rest_is_exact(word: str, bad: float, share: float) -> None:
    values = vector(70_000, 3)
    values[-max(int(share * len(values)), 1) :] = bad
    torch.testing.assert_close(there_and_back(codec_of(word), values), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("size", [2.0**125.9, 2.0**126, 3.4e38, -3.4e38])
def test_a_number_near_the_end_of_the_range_does_not_become_infinite(word: str, size: float) -> None:
    back = there_and_back(codec_of(word), torch.full((300,), size))
    assert torch.isfinite(back).all() and float(back.abs().max()) >= abs(size) * 0.99


def altered(frame: Frame, **changes: Any) -> Frame:
    return Frame(**{"codec": frame.codec, "values": frame.values, "payload": frame.payload} | changes)


@pytest.mark.parametrize("word", WORDS)
def test_a_frame_of_another_size_or_codec_is_refused(word: str) -> None:
    codec, out = codec_of(word), torch.zeros(5000)
    frame = codec.encode(vector(5000, 5))
    wrong = [
        altered(frame, payload=frame.payload[:-1]),
        altered(frame, payload=frame.payload + b"\0"),
        altered(frame, payload=b""),
        altered(frame, values=4999),
        altered(frame, values=2**62),
        altered(frame, values=2**62, payload=frame.payload * 3),
        altered(frame, codec="int5"),
        altered(frame, codec="fp32" if word != "fp32" else "bf16"),
        codec.encode(vector(4999, 5)),
    ]
    for received in wrong:
        with pytest.raises(FrameError, match=r"received a frame of .*valid here: "):
            codec.decode(received, out)
    codec.decode(frame, out)


@pytest.mark.parametrize("out", [torch.zeros(9, dtype=torch.float64), torch.zeros(3, 3), torch.zeros(18)[::2], [0.0]])
def test_a_tensor_of_another_kind_is_refused(out: Any) -> None:
    frame = codec_of("int8").encode(torch.zeros(9))
    for use in (codec_of("int8").encode, lambda tensor: codec_of("int8").decode(frame, tensor)):
        with pytest.raises(UsageError, match=r"a codec received .*; valid is a contiguous vector of torch.float32"):
            use(out)


def positions(*numbers: int) -> bytes:
    """Positions of 12 bits, written by other means than the codec's."""
    bits = sum(number << 12 * place for place, number in enumerate(numbers))
    return bits.to_bytes(-(-12 * len(numbers) // 8), "little")


@pytest.mark.parametrize("numbers", [(30, 40), (39, 30), (77, 99), (31, 4095), (35, 35), (3, 39)])
def test_positions_out_of_range_or_order_are_refused(numbers: tuple[int, int]) -> None:
    codec, out = TopK(), torch.zeros(40)  # 32 of them are sent
    values = np.arange(1, 33, dtype="<f4").tobytes()
    codec.decode(Frame(codec.name, 40, positions(*range(31), 39) + values), out)
    assert out.tolist() == [*range(1, 32), *[0.0] * 8, 32.0]
    with pytest.raises(FrameError, match="positions that do not rise, or lie beyond the 40 values"):
        codec.decode(Frame(codec.name, 40, positions(*range(30), *numbers) + values), out)


@pytest.mark.parametrize("word", ["bf16", "int8", "int4", "sign", "topk"])
def test_values_that_no_encoder_writes_are_refused(word: str) -> None:
    codec = codec_of(word)
    frame = codec.encode(torch.ones(16))
    payload = bytearray(frame.payload)
    at = 24 if word == "topk" else 0  # behind 16 positions
    for bits in (0x7FC0_0000, 0x7F80_0000, 0xFF80_0000):
        new = bits.to_bytes(4, "little")
        payload[at : at + 4] = new if word != "bf16" else new[2:] * 2
        with pytest.raises(FrameError, match="values that are not finite"):
            codec.decode(altered(frame, payload=bytes(payload)), torch.zeros(16))


@given(st.binary(max_size=200), st.sampled_from(WORDS))
def test_any_bytes_are_decoded_or_refused(raw: bytes, word: str) -> None:
    around = torch.full((60,), 7.0)
    around[10:50] = 0
    try:
        frame = Frame.from_bytes(raw)
    except FrameError:
        frame = Frame(word, 40, raw)
    with contextlib.suppress(FrameError):
        codec_of(word).decode(frame, around[10:50])
    assert (around[:10] == 7).all() and (around[50:] == 7).all()


@given(st.data(), st.sampled_from(WORDS))
def test_a_frame_with_changed_bytes_is_decoded_or_refused(data: st.DataObject, word: str) -> None:
    codec, values = codec_of(word), vector(300, 9)
    raw = bytearray(codec.encode(values).to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    out = torch.zeros(300)
    try:
        codec.decode(Frame.from_bytes(raw), out)
    except FrameError:
        return
    assert codec.exact or raw[3:8].find(b"fp32") >= 0 or torch.isfinite(out).all()


@pytest.mark.parametrize("head", [b"", b"\x05", b"\x00\x00", b"\xff\xff" + b"x" * 70, b"\x03\x00\x92", b"\x01\x00\xc1"])
def test_bytes_without_a_header_are_refused(head: bytes) -> None:
    with pytest.raises(FrameError, match=r"header"):
        Frame.from_bytes(head)


@pytest.mark.parametrize("header", [["int8", -1], ["int8", 2**64 - 1], ["", 4], ["x" * 40, 4], [4, "int8"], ["int8"]])
def test_headers_that_make_no_sense_are_refused(header: list[Any]) -> None:
    encoded = msgspec.msgpack.encode(header)
    raw = len(encoded).to_bytes(2, "little") + encoded + b"\0" * 8
    with pytest.raises(FrameError, match=r"header of a frame cannot be read|valid here: "):
        codec_of("int8").decode(Frame.from_bytes(raw), torch.zeros(4))


@pytest.mark.parametrize("word", WORDS)
def test_a_length_that_is_claimed_allocates_nothing(word: str) -> None:
    codec = codec_of(word)
    raw = Frame(codec.name, 2**60, b"\0" * 64).to_bytes()
    out = torch.zeros(16)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            codec.decode(Frame.from_bytes(raw), out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_words() -> None:
    assert resolve_codec(None) is None
    for word in WORDS:
        codec = codec_of(word)
        assert codec.name == word and resolve_codec(codec) is codec and resolve_codec(codec.name) == codec
    assert codec_of("topk:0.01") == codec_of("topk") and codec_of("int8:256").name == "int8"
    assert [word for word in CODECS if codec_of(word).exact] == ["fp32"]


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("int9", r"unknown codec 'int9'. Did you mean 'int\d'\? Valid: bf16, fp32, int4, int8, sign, topk"),
        (8, r"unknown codec 8\..* Valid: "),
        ("", r"unknown codec ''"),
        ("topk:2", r"fraction of codec topk received 2; valid: a number above 0 and up to 1"),
        ("topk:0", r"received 0; valid"),
        ("topk:nan", r"received nan; valid"),
        ("topk:few", r"received 'few'; valid"),
        ("topk:", r"received ''; valid"),
        ("int8:100", r"block of codec int8 received 100; valid: a power of two from 8 to 65536"),
        ("int4:0.5", r"received 0.5; valid"),
        ("sign:-8", r"received -8.0; valid"),
        ("bf16:3", r"codec received 'bf16:3'; bf16 has no setting, valid is 'bf16'"),
    ],
)
def test_words_that_make_no_sense(wrong: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_codec(wrong)
