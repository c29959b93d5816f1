"""The process that workers are forked from: it has torch loaded and nothing else going on.

Run as ``python -m manyhands.engine.zygote FD PID`` by ``engine/local.py``. It has one thread and touches no
accelerator, so a fork of it is safe and takes milliseconds. When its caller goes, in whatever way, the
connection ends, or the kernel says so, and it takes its children with it; when it goes itself, the kernel does
(parent-death signal).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
from typing import NoReturn

from manyhands.engine.channel import Channel, Message
from manyhands.errors import ChannelClosed

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_OLD_LIMIT = 1 << 25  # the most that older C libraries accept


def main(fd: int, caller: int) -> None:
    """Serve spawn and status requests until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    children: set[int] = set()
    folders: set[str] = set()
    try:
        _run(channel, caller, children, folders)
    except (ChannelClosed, ProcessLookupError):
        pass
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        _end(channel, folders)


def _run(channel: Channel, caller: int, children: set[int], folders: set[str]) -> None:
    # The end of the connection alone would not tell: a fork of the caller's own may still hold the other end.
    life = os.pidfd_open(caller)
    if os.getppid() != caller:
        return
    importlib.import_module("manyhands.train.worker")  # all that a worker needs, loaded once
    gc.collect()
    gc.freeze()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel.fileno(), wake_read, life], [], [], 5.0)
        if life in ready:
            return
        with contextlib.suppress(BlockingIOError):
            os.read(wake_read, 4096)
        _reap(children, statuses)
        if channel.fileno() in ready and (message := channel.receive(0)) is not None:
            if message.kind == "end":  # the caller lives on, and looks after its folders itself
                folders.clear()
                return
            _serve(channel, life, message, children, statuses, folders)


def _end(channel: Channel, folders: set[str]) -> None:
    """Remove the caller's folders, also those of which we have not heard yet."""
    with contextlib.suppress(ChannelClosed):
        while (message := channel.receive(0)) is not None:
            if message.kind == "folder":
                _note(message, folders)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _note(message: Message, folders: set[str]) -> None:
    (folders.add if message.body["needed"] else folders.discard)(message.body["path"])


def _reap(children: set[int], statuses: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        statuses[pid] = os.waitstatus_to_exitcode(status)


def _serve(
    channel: Channel, life: int, message: Message, children: set[int], statuses: dict[int, int], folders: set[str]
) -> None:
    if message.kind == "spawn":
        try:
            pid = os.fork()
        except OSError as error:  # no room for another process now; those that are there go on
            pid, trouble = -1, str(error)
        if pid == 0:
            os.close(life)
            channel.close()
            _become_child(message)
        for fd in message.fds:
            os.close(fd)
        number = message.body["number"]
        if pid < 0:
            channel.send("refused", {"why": trouble, "number": number})
            return
        children.add(pid)
        channel.send("spawned", {"pid": pid, "number": number})
    elif message.kind == "status":
        channel.send("status", {"code": statuses.get(message.body["pid"]), "number": message.body["number"]})
    elif message.kind == "folder":
        _note(message, folders)


def _become_child(message: Message) -> NoReturn:
    """Never returns: a child that came back into the zygote's loop would serve its requests."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == 1:
                os._exit(1)
            _keep_freed_memory()
        sys.path[:] = message.body["path"]
        sys.argv[:] = message.body["argv"]
        with contextlib.suppress(OSError):
            os.chdir(message.body["cwd"])
        module, _, name = message.body["target"].partition(":")
        target = getattr(importlib.import_module(module), name)
        target(Channel(socket.socket(fileno=message.fds[0])))
        code = 0
    except ChannelClosed:
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _keep_freed_memory() -> None:
    """Keep freed blocks for the next step instead of giving them back to the system.

    Every step allocates what the one before it freed. Given back and taken again, each page of it costs a fault: a
    third of the time of a small convolutional net.
    """
    with contextlib.suppress(AttributeError):  # a C library without it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
