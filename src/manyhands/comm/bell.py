"""One bell in shared memory: whoever changed something rings it, whoever waits for a change hears it.

On Linux this is a futex. Ringing increments the word and wakes the sleepers in one atomic system call, so a
change between looking and sleeping is never missed; no process can die holding anything.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time

__all__ = ["Bell"]

_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE_OP = 0, 5
_ADD_ONE = 1 << 28 | 1 << 12  # operation ADD with argument 1; its comparison is not used
_EVERYBODY = 2**31 - 1
_POLL_S = 0.0002


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """A 32-bit word that counts rings."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        number = _FUTEX_NUMBER.get(platform.machine()) if sys.platform == "linux" else None
        self._number = None if number is None else ctypes.c_long(number)
        self._syscall = ctypes.CDLL(None, use_errno=False).syscall if number is not None else None

    @property
    def count(self) -> int:
        """Read this before looking at what you wait for, then hand it to ``wait``."""
        return int(self._word.value)

    def ring(self) -> None:
        """Wake everybody who waits."""
        if self._syscall is None:
            self._word.value = (self._word.value + 1) & 0xFFFFFFFF
            return
        self._syscall(
            self._number,
            self._address,
            _WAKE_OP,
            _EVERYBODY,
            ctypes.c_void_p(0),
            self._address,
            ctypes.c_uint32(_ADD_ONE),
        )

    def wait(self, count: int, timeout_s: float) -> None:
        """Sleep until the bell has rung since ``count`` was read, at most ``timeout_s``. May return early."""
        if self._syscall is None:  # a lost increment of two simultaneous rings costs one poll interval, no more
            time.sleep(min(timeout_s, _POLL_S))
            return
        limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        self._syscall(self._number, self._address, _WAIT, ctypes.c_uint32(count), ctypes.byref(limit), None, 0)
