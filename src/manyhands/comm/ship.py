"""Sends Python objects from the caller to its own children.

Code and small values travel as a cloudpickle; large arrays and tensors do not: they are laid into one shared
segment, and each child maps it copy-on-write. Tensors that already lie in the arena travel as their place in it, those
that the user has put into shared memory as their descriptor, memory-mapped arrays as the name of their file. So any
number of workers costs one copy of the data, or none.

Only a process's own children are ever sent a pickle, and only they may send one back (an exception).
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.multiprocessing import get_sharing_strategy
from torch.nn.utils import parametrize

from manyhands.comm.segment import Segment, aligned
from manyhands.errors import UsageError

__all__ = ["Parcel", "Place", "load_exception", "load_value", "pack", "pack_exception", "pack_value", "unpack"]

LARGE_BYTES = 64 * 1024
_TAKEN_BYTES, _MOST_TAKEN = 1 << 20, 16  # of shared memory of the user's; a message carries few descriptors

_opened: list[Any] = []  # the segments that the object being unpacked refers to


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a segment that the receiver already has."""

    segment: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Parcel:
    """A packed object, and descriptors of the shared memory that must travel along with it."""

    code: bytes
    fds: list[int] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Give up the shared part."""
        while self.fds:
            os.close(self.fds.pop())


def _placed_tensor(segment: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    view: torch.Tensor = _opened[segment].tensor(offset, shape, dtype)
    return view


def _placed_parameter(
    data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any], hooks: Sequence[Callable[..., Any]]
) -> nn.Parameter:
    parameter = nn.Parameter(data, requires_grad)
    parameter.__dict__.update(attributes)
    for hook in hooks:
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    return parameter


def _parametrized(module: nn.Module, state: dict[str, Any]) -> None:
    """Make of an empty module of the plain class what ``register_parametrization`` had made of it."""
    module.__dict__.update(state)
    parametrize._inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)


def _shared_array(offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    raw = _opened[-1].bytes(offset, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    array: np.ndarray = raw.numpy().view(np.dtype(dtype)).reshape(shape)
    return array


def _file_array(path: str, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.memmap(path, dtype=np.dtype(dtype), mode="c", offset=offset, shape=shape)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickler that keeps large arrays out of the pickle."""

    def __init__(self, file: io.BytesIO, places: Mapping[int, Place]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = places
        self._known: dict[tuple[int, int], int] = {}  # (address, size) -> offset: storages that are shared stay shared
        self.pieces: list[tuple[int, np.ndarray]] = []
        self.size_bytes = 0
        self.taken: dict[int, int] = {}  # descriptor -> size of what the user has shared already

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and id(obj) in self._places:
            place = self._places[id(obj)]
            rebuilt = (_placed_tensor, (place.segment, place.offset, place.shape, place.dtype))
            if isinstance(obj, nn.Parameter):
                data = _Call(*rebuilt)
                hooks = list((obj._backward_hooks or {}).values())
                return _placed_parameter, (data, obj.requires_grad, dict(obj.__dict__), hooks)
            return rebuilt
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):  # of a class that torch has made for it
            plain = type(obj).__bases__[0]
            return plain.__new__, (plain,), obj.__dict__, None, None, _parametrized
        if isinstance(obj, _Call):
            return obj.function, obj.arguments
        if type(obj) is torch.Tensor and _is_large_tensor(obj):
            if (number := self._take_shared(obj)) is not None:
                return _placed_tensor, (-2 - number, _offset_bytes(obj), tuple(obj.shape), obj.dtype)
            offset = self._take(obj.numpy() if obj.dtype is not torch.bfloat16 else obj.view(torch.int16).numpy())
            return _placed_tensor, (-1, offset, tuple(obj.shape), obj.dtype)
        if type(obj) is torch.Tensor and _is_small_part(obj):
            # A pickle would take the whole storage along.
            return obj.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        if isinstance(obj, np.ndarray) and obj.nbytes >= LARGE_BYTES and obj.dtype.kind in "biufc":
            return self._reduce_array(obj)
        return super().reducer_override(obj)

    def _reduce_array(self, array: np.ndarray) -> Any:
        file = _memmap_of(array)
        if file is not None and array.flags.c_contiguous:
            offset = file.offset + array.ctypes.data - file.ctypes.data
            return _file_array, (str(Path(str(file.filename)).resolve()), offset, array.shape, array.dtype.str)
        return _shared_array, (self._take(np.ascontiguousarray(array)), array.shape, array.dtype.str)

    def _take_shared(self, tensor: torch.Tensor) -> int | None:
        """Which descriptor a tensor lies in that its user has put into shared memory, if it has."""
        storage = tensor.untyped_storage()
        if not storage.is_shared() or storage.nbytes() < _TAKEN_BYTES:
            return None
        if get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
            return None
        fd, size_bytes = storage._share_fd_cpu_()
        if fd < 0 or (fd not in self.taken and len(self.taken) == _MOST_TAKEN):
            return None
        self.taken[fd] = size_bytes
        return list(self.taken).index(fd)

    def _take(self, array: np.ndarray) -> int:
        key = (array.ctypes.data, array.nbytes)
        if key not in self._known:
            self._known[key] = self.size_bytes
            self.pieces.append((self.size_bytes, array))
            self.size_bytes = aligned(self.size_bytes + array.nbytes)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class _Call:
    """Pickles as the call of a function."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _is_large_tensor(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and tensor.nbytes >= LARGE_BYTES
        and not tensor.is_quantized
    )


def _offset_bytes(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _is_small_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows little of a large storage."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    return plain and tensor.nbytes < LARGE_BYTES <= tensor.untyped_storage().nbytes()


def _memmap_of(array: np.ndarray) -> np.memmap | None:
    """The file mapping that an array is a view of, if it is one."""
    found: Any = array
    last: np.memmap | None = None
    while isinstance(found, np.ndarray):
        if isinstance(found, np.memmap) and found.filename is not None:
            last = found
        found = found.base
    return last


def pack(obj: object, what: str, places: Mapping[int, Place] | None = None) -> Parcel:
    """Pack ``obj`` for a child. ``places`` maps ``id(tensor)`` to where the child will find that tensor."""
    file = io.BytesIO()
    packer = _Packer(file, places or {})
    try:
        packer.dump(obj)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        culprit = _find_culprit(obj)
        raise UsageError(
            f"{what} cannot be sent to a worker: {culprit or error}. "
            "Everything it refers to must be picklable; open files, locks and sockets inside the worker instead."
        ) from error
    parcel = Parcel(file.getvalue())
    if packer.pieces or packer.taken:
        segment = Segment.create(packer.size_bytes, "data")
        for offset, array in packer.pieces:
            target = segment.bytes(offset, array.nbytes).numpy()
            np.copyto(target, array.reshape(-1).view(np.uint8))
        parcel.fds = [segment.fd, *map(os.dup, packer.taken)]
        parcel.sizes_bytes = [packer.size_bytes, *packer.taken.values()]
    return parcel


def unpack(code: bytes, known: Sequence[Segment], fds: Sequence[int] = (), sizes_bytes: Sequence[int] = ()) -> Any:
    """Rebuild a packed object; ``known`` are the segments that places refer to, the others come with the parcel."""
    own = [Segment(fd, size, private=True) for fd, size in zip(fds, sizes_bytes, strict=True)]
    _opened[:] = [*known, *reversed(own)]  # whose numbers are negative, whatever is known
    try:
        return pickle.loads(code)
    finally:
        _opened.clear()


def _find_culprit(obj: object, path: str = "", depth: int = 3) -> str | None:
    """Name the attribute that cannot be pickled, e.g. ``.transform.lock (_thread.lock)``."""
    members: list[tuple[str, object]] = []
    if isinstance(obj, Mapping):
        members = [(f"{path}[{key!r}]", value) for key, value in obj.items()]
    elif isinstance(obj, (list, tuple)):
        members = [(f"{path}[{index}]", value) for index, value in enumerate(obj)]
    else:
        names = [*getattr(obj, "__dict__", ()), *getattr(type(obj), "__slots__", ())]
        members = [(f"{path}.{name}", getattr(obj, name)) for name in names if hasattr(obj, name)]
    for name, value in members:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return (_find_culprit(value, name, depth - 1) if depth else None) or f"{name} is a {type(value).__name__}"
    return None


def pack_value(value: object) -> bytes:
    """What a child's function returned, for its parent."""
    return bytes(cloudpickle.dumps(value))


def load_value(code: bytes) -> Any:
    """A value that a child of ours sent."""
    return pickle.loads(code)


def pack_exception(error: BaseException) -> bytes:
    """An exception as bytes, with as much of it as can be pickled."""
    # Taken apart: a class whose constructor wants other arguments than it hands on would not unpickle.
    attributes = {}
    for name, value in vars(error).items():
        with contextlib.suppress(Exception):
            attributes[name] = cloudpickle.dumps(value)
    try:
        return bytes(cloudpickle.dumps((type(error), error.args, attributes)))
    except Exception:
        return bytes(cloudpickle.dumps((RuntimeError, (f"{type(error).__name__}: {error}",), {})))


def load_exception(code: bytes) -> BaseException:
    """The exception that a child of ours sent."""
    kind, arguments, attributes = pickle.loads(code)
    error: BaseException = kind.__new__(kind, *arguments)
    for name, value in attributes.items():
        setattr(error, name, pickle.loads(value))
    return error
