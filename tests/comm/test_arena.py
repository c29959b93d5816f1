"""The arena: where everything lies, that nothing overlaps, and that two mappings of it are one memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
import torch

from manyhands.comm.arena import Arena, ArenaSpec, Extra, Unit, dtype_of, lay_out

TENSORS = [
    ("layer.weight", torch.zeros(5, 7)),
    ("scale", torch.zeros(())),
    ("half", torch.zeros(3, dtype=torch.bfloat16)),
    ("none", torch.zeros(0, 4)),
    ("double", torch.zeros(2, 2, dtype=torch.float64)),
]


@pytest.fixture
def spec() -> ArenaSpec:
    entries = lay_out(TENSORS)
    return ArenaSpec(
        parameters=entries,
        fixed=lay_out([("frozen", torch.zeros(9))]),
        buffers=lay_out([("mean", torch.zeros(4)), ("count", torch.zeros((), dtype=torch.int64))]),
        planes=["exp_avg", "exp_avg_sq"],
        extras=[Extra(0, "rows", (5,), "float32", 0), Extra(0, "columns", (7,), "float32", 64)],
        scalars=["step"],
        units=[Unit(number, e.offset, e.offset + e.size_bytes) for number, e in enumerate(entries) if e.size_bytes],
        lanes=3,
        slots=2,
        undo_bytes=1000,
        undo_units=4,
        samples=11,
        stats=3,
        hyper=2,
        ring=5,
    )


@pytest.fixture
def arena(spec: ArenaSpec) -> Iterator[Arena]:
    made = Arena(spec)
    yield made
    made.close()


def views(arena: Arena) -> dict[str, torch.Tensor]:
    """Every view that an arena gives."""
    found = {f"plane {plane} {index}": t for plane in range(3) for index, t in enumerate(arena.parameters(plane))}
    found |= {f"gradient {lane} {index}": t for lane in range(3) for index, t in enumerate(arena.gradients(lane))}
    found |= {f"buffer {lane} {index}": t for lane in (None, 0, 1, 2) for index, t in enumerate(arena.buffers(lane))}
    found |= {f"fixed {index}": t for index, t in enumerate(arena.fixed())}
    found |= {f"extra {index}": arena.extra(index) for index in range(2)}
    found |= {f"undo {slot}": arena.undo(slot) for slot in range(2)}
    tables = ("scalars", "norms", "undo_scalars", "present", "stats", "hyper", "order")
    found |= {name: torch.from_numpy(getattr(arena, name)) for name in tables}
    control = arena.control
    words = {"lane_done": control.lane_done, "lane_bad": control.lane_bad, "unit_done": control.unit_done}
    words |= {"unit_ready": control.unit_ready, "norm_done": control.norm_done}
    words |= {f"lane_owner {plan}": control.lane_owner(plan) for plan in range(8)}
    words |= {f"unit_owner {plan}": control.unit_owner(plan) for plan in range(8)}
    return found | {name: torch.from_numpy(array) for name, array in words.items()}


def test_nothing_overlaps_and_everything_is_inside(arena: Arena) -> None:
    ranges = sorted(
        (view.data_ptr(), view.data_ptr() + view.nbytes, name) for name, view in views(arena).items() if view.nbytes
    )
    start = arena.segment.bytes(0, 1).data_ptr()
    assert ranges[0][0] >= start and ranges[-1][1] <= start + arena.segment.size_bytes
    for (_, end, one), (begin, _, other) in itertools.pairwise(ranges):
        assert end <= begin, f"{one} runs into {other}"


def test_every_tensor_is_aligned_in_every_plane_and_lane(arena: Arena) -> None:
    for name, view in views(arena).items():
        if name.startswith(("plane", "gradient", "buffer", "fixed", "extra", "undo 0", "undo 1")) and view.nbytes:
            assert view.data_ptr() % 64 == 0, name


def test_a_range_of_bytes_means_the_same_elements_everywhere(arena: Arena, spec: ArenaSpec) -> None:
    entry = spec.parameters[0]
    arena.parameters(1)[0].fill_(2)
    arena.gradients(2)[0].fill_(3)
    window = slice(entry.offset, entry.offset + entry.size_bytes)
    assert arena.plane(1)[window].view(torch.float32).eq(2).all()
    assert arena.lane(2)[window].view(torch.float32).eq(3).all()
    assert not arena.plane(0)[window].any() and not arena.lane(1)[window].any()


def test_another_mapping_is_the_same_memory(arena: Arena, spec: ArenaSpec) -> None:
    """The specification travels as plain data."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(spec)))
    other = Arena(msgspec.convert(plain, ArenaSpec, strict=False), os.dup(arena.segment.fd))
    assert other.spec == spec
    for number, (mine, theirs) in enumerate(zip(views(arena).values(), views(other).values(), strict=True)):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        if mine.numel():
            mine.fill_(number % 100)
            assert torch.equal(mine, theirs)
    other.close()


def test_shapes_and_types_are_those_of_the_tensors(arena: Arena) -> None:
    for (_, tensor), view in zip(TENSORS, arena.parameters(), strict=True):
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
    assert arena.parameter_offset(0) % 64 == 0
    assert dtype_of("bfloat16") is torch.bfloat16


def test_an_arena_for_inference_needs_no_lanes_of_gradients() -> None:
    made = Arena(ArenaSpec(parameters=[], fixed=lay_out(TENSORS), buffers=[]))
    assert [tuple(view.shape) for view in made.fixed()] == [tuple(tensor.shape) for _, tensor in TENSORS]
    assert made.parameters() == [] and made.order.size == 0
    made.close()


def test_what_a_lane_keeps_has_two_banks(spec: ArenaSpec) -> None:
    kept = msgspec.structs.replace(spec, memory=["residual", "moment"], memory_numbers=2)
    with closing(Arena(kept)) as arena:
        for lane, step in itertools.product(range(3), range(2)):
            for number, (_, views) in enumerate(sorted(arena.memory(step, lane).items())):
                for view in views:
                    view.fill_(100 * lane + 10 * step + number)
            arena.memory_numbers(step, lane)[:] = lane + step / 2
        for lane, step in itertools.product(range(3), range(4)):
            found = arena.memory(step, lane)
            for number, name in enumerate(("moment", "residual")):
                expected = 100 * lane + 10 * (step % 2) + number
                assert all((view == expected).all() for view in found[name])
            assert arena.memory_numbers(step, lane).tolist() == [lane + step % 2 / 2] * 2
