"""Tensor files: the safetensors format, streamed to and from the disk with a checksum in the same pass.

The format is written here and not by its library because hashing the bytes on their way to the disk costs less
processor time than hashing the finished file: training goes on, on the same cores, while a checkpoint is written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import CheckpointDamaged, CheckpointError

__all__ = ["FileEntry", "PlannedFile", "plan_files", "read_tensors", "verify_file", "write_file"]

_CHUNK_BYTES = 4 * 1024**2
_ALIGNMENT_BYTES = 64
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """What a manifest knows about a file."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A tensor file that is about to be written; no byte of a tensor is touched before it is its turn."""

    name: str
    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def parts(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for tensor in self.tensors:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield _bytes_of(plain.reshape(-1).view(torch.uint8))


def plan_files(tensors: Mapping[str, Tensor], limit_bytes: int) -> list[PlannedFile]:
    """Divide tensors over files of at most ``limit_bytes``; a larger tensor gets a file of its own."""
    groups: list[dict[str, Tensor]] = [{}]
    filled = 0
    # Wide elements first: then every tensor begins at a multiple of its element size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"the tensor {name!r} cannot be saved: received {tensor.dtype}, {tensor.layout} on {tensor.device}; "
                f"valid are dense tensors with data, of {', '.join(str(dtype) for dtype in _DTYPE_NAMES)}."
            )
        if groups[-1] and filled + tensor.nbytes > limit_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += tensor.nbytes
    return [
        PlannedFile(name=f"tensors-{index:03d}.safetensors", header=_header(group), tensors=tuple(group.values()))
        for index, group in enumerate(groups)
    ]


def _header(group: Mapping[str, Tensor]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in group.items():
        end = start + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        described[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileEntry:
    """Write, hash and make durable in one pass; in large chunks, because each frees the interpreter meanwhile."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=_CHUNK_BYTES // 4) as file:
        for part in parts:
            for start in range(0, len(part), _CHUNK_BYTES):
                chunk = part[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, size_bytes=size, sha256=digest.hexdigest())


def verify_file(path: Path, entry: FileEntry) -> None:
    """Check the size and SHA-256 of a file, keeping nothing of it."""
    _read_verified(path, entry, torch.empty(min(entry.size_bytes, _CHUNK_BYTES), dtype=torch.uint8))


def read_tensors(path: Path, entry: FileEntry) -> dict[str, Tensor]:
    """The tensors of a file as views of its bytes, which are read once: those verified are those returned."""
    content = torch.empty(entry.size_bytes, dtype=torch.uint8)
    _read_verified(path, entry, content)
    return _parse(path, content)


def _read_verified(path: Path, entry: FileEntry, buffer: Tensor) -> None:
    """Read a file through ``buffer``, which holds all of it afterwards if it is large enough."""
    digest, position, view = hashlib.sha256(), 0, _bytes_of(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != entry.size_bytes:
                raise CheckpointDamaged(f"{path} is damaged: it has {actual} bytes, written were {entry.size_bytes}.")
            while position < actual:
                start = position if len(view) == actual else 0
                count = file.readinto(view[start : start + _CHUNK_BYTES])
                if not count:
                    break
                digest.update(view[start : start + count])
                position += count
    except OSError as error:
        raise CheckpointDamaged(f"{path} is damaged: {error.strerror}.") from error
    if digest.hexdigest() != entry.sha256:
        raise CheckpointDamaged(f"{path} is damaged: its SHA-256 is not the one of the bytes that were written.")


def _parse(path: Path, content: Tensor) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    try:
        start = 8 + int.from_bytes(_bytes_of(content[:8]), "little")
        if start > len(content):
            raise ValueError("its header is longer than the file")
        header = json.loads(bytes(_bytes_of(content[8:start])))
        header.pop("__metadata__", None)
        for name, described in header.items():
            first, last = described["data_offsets"]
            dtype, shape = _DTYPES[described["dtype"]], described["shape"]
            if last - first != math.prod(shape) * dtype.itemsize or not 0 <= first <= last <= len(content) - start:
                raise ValueError(f"the tensor {name!r} does not fit into the file")
            tensors[name] = content[start + first : start + last].view(dtype).view(shape)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointDamaged(f"{path} is not a safetensors file: {error}.") from error
    return tensors


def _bytes_of(tensor: Tensor) -> memoryview:
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.numpy()
    return array.data
