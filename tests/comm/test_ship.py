"""Objects for children: large arrays are shared and not copied, and what cannot travel is named."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.comm import ship
from manyhands.comm.segment import Segment
from manyhands.engine import local
from manyhands.engine.channel import Channel
from manyhands.errors import UsageError

LARGE = ship.LARGE_BYTES // 4  # numbers of four bytes


def send(obj: object, **options: Any) -> tuple[Any, Segment | None, ship.Parcel]:
    """What a child would get, and the mapping it lies in."""
    parcel = ship.pack(obj, "the thing", **options)
    own = Segment(os.dup(parcel.fds[0]), parcel.segment_bytes, private=True) if parcel.fds else None
    received = ship.unpack(parcel.code, [], own)
    parcel.close()
    if own is not None:
        own.close()
    return received, own, parcel


def is_inside(address: int, segment: Segment | None) -> bool:
    assert segment is not None
    return 0 <= address - segment.bytes(0, 1).data_ptr() < segment.size_bytes


def test_large_arrays_lie_in_the_segment_and_not_in_the_pickle() -> None:
    data = {"tensor": torch.randn(LARGE), "array": np.random.default_rng(0).normal(size=LARGE), "small": torch.ones(3)}
    received, own, parcel = send(data)
    assert len(parcel.code) < 10_000
    assert is_inside(received["tensor"].data_ptr(), own) and is_inside(received["array"].ctypes.data, own)
    assert torch.equal(received["tensor"], data["tensor"]) and torch.equal(received["small"], data["small"])
    assert np.array_equal(received["array"], data["array"])
    assert received["tensor"].data_ptr() % 64 == 0


def test_what_a_child_writes_only_the_child_sees() -> None:
    data = torch.zeros(LARGE)
    parcel = ship.pack(data, "the thing")
    copies = [
        ship.unpack(parcel.code, [], Segment(parcel.fds[0], parcel.segment_bytes, private=True)) for _ in range(2)
    ]
    copies[0].fill_(5)
    assert not copies[1].any() and not data.any()
    parcel.close()


def test_later_changes_of_the_caller_are_not_sent() -> None:
    data = np.zeros(LARGE, np.float32)
    parcel = ship.pack(data, "the thing")
    data[:] = 1
    assert not ship.unpack(parcel.code, [], Segment(parcel.fds[0], parcel.segment_bytes, private=True)).any()
    parcel.close()


def measure(channel: Channel) -> None:
    """In a child: read all of the data, then tell how the mapping of it is accounted."""
    message = channel.receive(30)
    assert message is not None
    own = Segment(message.fds[0], message.body["segment_bytes"], private=True)
    array = ship.unpack(message.body["code"], [], own)
    total = float(array.sum())
    sizes: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = "manyhands-data" in line
        elif inside and line.endswith("kB"):
            name, value, _ = line.split()
            sizes[name] = sizes.get(name, 0) + int(value)
    channel.send(
        "measured", {"sum": total, "rss": sizes["Rss:"], "private": sizes["Private_Clean:"] + sizes["Private_Dirty:"]}
    )
    channel.receive(30)


def test_two_children_read_one_copy() -> None:
    array = np.ones(8 << 20, np.float32)  # 32 MiB
    parcel = ship.pack(array, "the thing")
    children = [local.spawn("test_ship:measure") for _ in range(2)]
    for child in children:
        child.channel.send("data", {"code": parcel.code, "segment_bytes": parcel.segment_bytes}, parcel.fds)
    answers = [child.channel.receive(30) for child in children]
    for child, answer in zip(children, answers, strict=True):
        assert answer is not None
        assert answer.body["sum"] == len(array)
        assert answer.body["rss"] >= 32 * 1024
        assert answer.body["private"] < 1024, "the child has a copy of its own"
        child.channel.close()
        assert child.wait(10)
        child.close()
    parcel.close()


def test_a_memory_map_travels_as_the_name_of_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.arange(3 * LARGE, dtype=np.float32).reshape(3, LARGE))
    table = np.load(tmp_path / "table.npy", mmap_mode="r")
    received, own, parcel = send({"all": table, "row": table[1]})
    assert own is None and len(parcel.code) < 10_000
    assert np.array_equal(received["all"], table) and np.array_equal(received["row"], table[1])
    assert isinstance(received["row"], np.memmap)
    received["all"][0, 0] = -1
    assert np.load(tmp_path / "table.npy")[0, 0] == 0, "the child wrote into the user's file"


def test_tied_tensors_stay_tied_and_one_array_travels_once() -> None:
    weight = torch.randn(LARGE)
    received, own, _parcel = send([weight, weight, weight.view(2, -1), weight.numpy()])
    assert received[0].data_ptr() == received[1].data_ptr() == received[2].data_ptr() == received[3].ctypes.data
    assert own is not None and own.size_bytes == 4 * LARGE
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    received, _, _ = send(model)
    assert received[1].weight is received[0].weight


def test_a_placed_tensor_is_found_where_it_lies() -> None:
    arena = Segment.create(4096, "test")
    model = nn.Linear(4, 2)
    model.weight.note = "kept"  # type: ignore[attr-defined]
    place = ship.Place(0, 128, (2, 4), torch.float32)
    arena.tensor(128, (2, 4), torch.float32).fill_(7)
    parcel = ship.pack(model, "the model", {id(model.weight): place})
    received = ship.unpack(parcel.code, [arena], None)
    assert isinstance(received.weight, nn.Parameter) and received.weight.requires_grad
    assert received.weight.note == "kept"
    assert is_inside(received.weight.data_ptr(), arena)
    assert received.weight.detach().eq(7).all() and torch.equal(received.bias, model.bias)
    arena.close()


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(LARGE).bfloat16().repeat(2),
        torch.randn(LARGE).to(torch.complex64),
        torch.randn(2, LARGE).t(),
        torch.arange(LARGE * 4) % 2 == 0,
        torch.randn(LARGE, requires_grad=True),
        torch.zeros(0, 5),
        torch.eye(200).to_sparse(),
        torch.randn(LARGE).expand(3, LARGE),
    ],
    ids=["bfloat16", "complex", "transposed", "bool", "gradient", "empty", "sparse", "expanded"],
)
def test_tensors_of_every_kind_arrive_as_they_were(value: torch.Tensor) -> None:
    received, _, _ = send({"value": value})
    got = received["value"]
    assert (got.dtype, got.shape, got.requires_grad) == (value.dtype, value.shape, value.requires_grad)
    assert torch.equal(got.to_dense(), value.to_dense())


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a" * 50] * 5000),
        np.zeros(20000, dtype=[("x", "f4"), ("y", "i8")]),
        np.arange(LARGE * 2, dtype=np.float32)[::2],
        np.asfortranarray(np.arange(2.0 * LARGE).reshape(2, -1)),
        np.arange(LARGE, dtype=">f8"),
        np.array([None, {}] * 10000, object),
    ],
    ids=["text", "records", "strided", "fortran", "big-endian", "objects"],
)
def test_arrays_of_every_kind_arrive_as_they_were(value: np.ndarray) -> None:
    received, _, _ = send(value)
    assert received.dtype == value.dtype and np.array_equal(received, value)


class Outer:
    def __init__(self, inner: object) -> None:
        self.fine = 1
        self.inner = inner


class Slotted:
    __slots__ = ("fine", "inner")

    def __init__(self, inner: object) -> None:
        self.fine, self.inner = 1, inner


@pytest.mark.parametrize(
    "thing, name",
    [
        (Outer(threading.Lock()), r"\.inner is a lock"),
        (Outer({"a": [1, threading.Lock()]}), r"\.inner\['a'\]\[1\] is a lock"),
        (Slotted(Outer(threading.Lock())), r"\.inner\.inner is a lock"),
        (Outer(number for number in range(3)), r"\.inner is a generator"),
    ],
    ids=["attribute", "nested", "slots", "generator"],
)
def test_what_cannot_travel_is_named(thing: object, name: str) -> None:
    with pytest.raises(UsageError, match=rf"the thing cannot be sent to a worker: .*{name}.*must be picklable"):
        ship.pack(thing, "the thing")


class Particular(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def test_exceptions_come_back_with_their_type() -> None:
    error = ship.load_exception(ship.pack_exception(KeyError("a")))
    assert isinstance(error, KeyError) and error.args == ("a",)


def test_an_exception_whose_constructor_takes_other_arguments_keeps_its_type() -> None:
    """It pickles but does not unpickle by itself, as many exceptions of users."""
    error = ship.load_exception(ship.pack_exception(Particular(3, "odd")))
    assert isinstance(error, Particular)
    assert (str(error), error.code) == ("odd", 3)


def test_of_an_exception_that_cannot_travel_at_least_the_words_arrive() -> None:
    held = ship.load_exception(ship.pack_exception(ValueError(threading.Lock())))
    assert "ValueError" in f"{type(held).__name__} {held}"
