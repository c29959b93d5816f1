"""Shared memory without a name.

A segment is a memory file descriptor: it lives as long as somebody holds it and leaves nothing behind, however
its holders die. Every tensor that is cut from one starts on a 64-byte boundary, because kernels may round
differently on another alignment.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["ALIGNMENT_BYTES", "Segment", "aligned"]

ALIGNMENT_BYTES = 64


def aligned(size_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Segment:
    """A piece of anonymous shared memory, seen through tensors and arrays."""

    def __init__(self, fd: int, size_bytes: int, *, private: bool = False) -> None:
        """Map ``fd``. ``private`` maps copy-on-write: what this process writes, only this process sees."""
        self.fd = fd
        self.size_bytes = size_bytes
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        self._map = mmap.mmap(fd, max(size_bytes, 1), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, size_bytes: int, label: str) -> Segment:
        """Make a segment of zero bytes; pages cost memory only once they are written."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(f"manyhands-{label}", os.MFD_CLOEXEC)
        else:  # an unlinked file does the same where there is no memfd
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, max(size_bytes, 1))
        return cls(fd, size_bytes)

    def bytes(self, offset: int, size_bytes: int) -> torch.Tensor:
        """A uint8 view."""
        return self._bytes[offset : offset + size_bytes]

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A view of ``shape`` and ``dtype`` that starts at ``offset``."""
        count = int(np.prod(shape)) if len(shape) else 1
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def array(self, offset: int, shape: Sequence[int], dtype: type[np.generic]) -> np.ndarray:
        """A NumPy view."""
        count = int(np.prod(shape))
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(tuple(shape))

    def free(self, offset: int, size_bytes: int) -> None:
        """Give the whole pages in a range back to the system, for every process that maps them; they read as zeros."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first:
            self._map.madvise(mmap.MADV_REMOVE, first, stop - first)

    def drop_changes(self) -> None:
        """What this process wrote into a private mapping is gone: it reads what the others see."""
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def buffer(self) -> mmap.mmap:
        """The mapping itself, for callers that need its address."""
        return self._map

    def close(self) -> None:
        """Give up the descriptor. The memory goes when the last view of it goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
