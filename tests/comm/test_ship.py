"""Objects for children: large arrays are shared and not copied, and what cannot travel is named."""

from __future__ import annotations

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


def send(obj: object) -> tuple[Any, ship.Parcel]:
    """What a child would get."""
    parcel = ship.pack(obj, "the thing")
    received = ship.unpack(parcel.code, [], parcel.fds, parcel.sizes_bytes)
    parcel.close()
    return received, parcel


def mapped_from(address: int) -> str:
    """What is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, stop = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < stop:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return "nothing"


def in_segment(address: int) -> bool:
    return "manyhands-data" in mapped_from(address)


def test_large_arrays_lie_in_the_segment_and_not_in_the_pickle() -> None:
    data = {"tensor": torch.randn(LARGE), "array": np.random.default_rng(0).normal(size=LARGE), "small": torch.ones(3)}
    received, parcel = send(data)
    assert len(parcel.code) < 10_000
    assert in_segment(received["tensor"].data_ptr()) and in_segment(received["array"].ctypes.data)
    assert torch.equal(received["tensor"], data["tensor"]) and torch.equal(received["small"], data["small"])
    assert np.array_equal(received["array"], data["array"])
    assert received["tensor"].data_ptr() % 64 == 0


def test_what_a_child_writes_only_the_child_sees() -> None:
    data = torch.zeros(LARGE)
    parcel = ship.pack(data, "the thing")
    copies = [ship.unpack(parcel.code, [], parcel.fds, parcel.sizes_bytes) for _ in range(2)]
    copies[0].fill_(5)
    assert not copies[1].any() and not data.any()
    parcel.close()


def test_later_changes_of_the_caller_are_not_sent() -> None:
    data = np.zeros(LARGE, np.float32)
    parcel = ship.pack(data, "the thing")
    data[:] = 1
    assert not ship.unpack(parcel.code, [], parcel.fds, parcel.sizes_bytes).any()
    parcel.close()


def measure(channel: Channel) -> None:
    """In a child: read all of the data, then tell how the mapping of it is accounted."""
    message = channel.receive(30)
    assert message is not None
    array = ship.unpack(message.body["code"], [], message.fds, message.body["sizes_bytes"])
    total = float(array.sum())
    sizes: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = "manyhands-data" in line or "/dev/shm/torch_" in line
        elif inside and line.endswith("kB"):
            name, value, _ = line.split()
            sizes[name] = sizes.get(name, 0) + int(value)
    # A copy would be anonymous memory. "Private" says nothing here: so is a page that the other child has not read yet.
    channel.send("measured", {"sum": total, "rss": sizes["Rss:"], "copied": sizes["Anonymous:"]})
    channel.receive(30)


@pytest.mark.parametrize("shared", [False, True], ids=["array", "tensor in shared memory"])
def test_two_children_read_one_copy(shared: bool) -> None:
    array: Any = np.ones(8 << 20, np.float32)  # 32 MiB
    if shared:
        array = torch.from_numpy(array).share_memory_()
    parcel = ship.pack(array, "the thing")
    children = [local.spawn("test_ship:measure") for _ in range(2)]
    for child in children:
        child.channel.send("data", {"code": parcel.code, "sizes_bytes": parcel.sizes_bytes}, parcel.fds)
    answers = [child.channel.receive(30) for child in children]
    for child, answer in zip(children, answers, strict=True):
        assert answer is not None
        assert answer.body["sum"] == len(array)
        assert answer.body["rss"] >= 32 * 1024
        assert answer.body["copied"] < 1024, "the child has a copy of its own"
        child.channel.close()
        assert child.wait(10)
        child.close()
    parcel.close()


def test_a_tensor_in_shared_memory_is_taken_as_it_is() -> None:
    data = torch.arange(1 << 19, dtype=torch.float32).reshape(-1, 64).share_memory_()
    other, small = torch.ones(1 << 18).bfloat16().repeat(4).share_memory_(), torch.ones(LARGE).share_memory_()
    received, parcel = send({"all": data, "end": data[-2048:], "other": other, "small": small})
    assert parcel.sizes_bytes == [small.nbytes, data.nbytes, other.nbytes]
    assert "/dev/shm/torch_" in mapped_from(received["all"].data_ptr())
    assert received["end"].data_ptr() - received["all"].data_ptr() == (len(data) - 2048) * 64 * 4
    assert in_segment(received["small"].data_ptr())
    for name, value in {"all": data, "end": data[-2048:], "other": other, "small": small}.items():
        assert received[name].dtype == value.dtype and torch.equal(received[name], value)
    received["all"].fill_(-1)
    assert data[0, 1] == 1, "the child wrote into the user's tensor"
    assert data.sum() > 0, "giving up the parcel took the user's memory along"


def test_more_tensors_in_shared_memory_than_a_message_can_carry() -> None:
    data = [torch.full((1 << 18,), float(number)).share_memory_() for number in range(20)]
    received, parcel = send(data)
    assert len(parcel.sizes_bytes) == 17
    assert all(torch.equal(one, other) for one, other in zip(received, data, strict=True))


def test_a_memory_map_travels_as_the_name_of_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.arange(3 * LARGE, dtype=np.float32).reshape(3, LARGE))
    table = np.load(tmp_path / "table.npy", mmap_mode="r")
    received, parcel = send({"all": table, "row": table[1]})
    assert not parcel.sizes_bytes and len(parcel.code) < 10_000
    assert np.array_equal(received["all"], table) and np.array_equal(received["row"], table[1])
    assert isinstance(received["row"], np.memmap)
    received["all"][0, 0] = -1
    assert np.load(tmp_path / "table.npy")[0, 0] == 0, "the child wrote into the user's file"


def test_tied_tensors_stay_tied_and_one_array_travels_once() -> None:
    weight = torch.randn(LARGE)
    received, parcel = send([weight, weight, weight.view(2, -1), weight.numpy()])
    assert received[0].data_ptr() == received[1].data_ptr() == received[2].data_ptr() == received[3].ctypes.data
    assert parcel.sizes_bytes == [4 * LARGE]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    received, _ = send(model)
    assert received[1].weight is received[0].weight


def test_a_placed_tensor_is_found_where_it_lies() -> None:
    arena = Segment.create(4096, "test")
    model = nn.Linear(4, 2)
    model.weight.note = "kept"  # type: ignore[attr-defined]
    place = ship.Place(0, 128, (2, 4), torch.float32)
    arena.tensor(128, (2, 4), torch.float32).fill_(7)
    parcel = ship.pack(model, "the model", {id(model.weight): place})
    received = ship.unpack(parcel.code, [arena])
    assert isinstance(received.weight, nn.Parameter) and received.weight.requires_grad
    assert received.weight.note == "kept"
    assert received.weight.data_ptr() == arena.bytes(128, 1).data_ptr()
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
    received, _ = send({"value": value})
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
    received, _ = send(value)
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
