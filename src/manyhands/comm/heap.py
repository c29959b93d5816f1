"""Memory that was freed but is kept by the allocator."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["return_free_pages"]


def return_free_pages() -> None:
    """Give the system back what is free between blocks in use. Glibc does so by itself only at the end of its heap."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
