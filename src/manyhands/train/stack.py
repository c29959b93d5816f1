"""Asks a worker that hangs which line it is in, even when its interpreter no longer answers."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.engine.local import Process

__all__ = ["StackFile", "answer_with_stack"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_NOT_USER = re.compile(r"[/\\](torch|manyhands|numpy|importlib)[/\\]|^<frozen|[/\\]lib[/\\]python\d")


def answer_with_stack(fd: int) -> None:
    """In the worker: on SIGUSR1 the interpreter writes its stack into ``fd``."""
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=False)


class StackFile:
    """In the caller: the file that a worker writes its stack into."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("manyhands-stack", os.MFD_CLOEXEC)

    def ask(self, process: Process, timeout_s: float = 1.0) -> str | None:
        """The innermost line of the user's code (or of any code), such as ``model.py:17 in forward``."""
        process.signal(signal.SIGUSR1)
        deadline = time.monotonic() + timeout_s
        while not os.fstat(self.fd).st_size:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        time.sleep(0.02)  # the handler writes line by line
        text = os.pread(self.fd, 65536, 0).decode(errors="replace")
        os.ftruncate(self.fd, 0)
        frames = _FRAME.findall(text)
        chosen = next((f for f in frames if not _NOT_USER.search(f[0])), frames[0] if frames else None)
        return f"{Path(chosen[0]).name}:{chosen[1]} in {chosen[2]}" if chosen else None

    def close(self) -> None:
        """Give up the file."""
        os.close(self.fd)
