"""Processes on this machine, forked from a zygote that has torch preloaded.

One zygote serves all runs of the calling process. It is started in the background, so that its imports overlap
with the caller's own, and ends with the caller.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.engine.channel import Channel, Message, readable
from manyhands.errors import ChannelClosed, EngineError

__all__ = ["Ending", "Process", "cores", "release", "remove_afterwards", "shutdown", "spawn", "warm", "zygote_pid"]

_START_TIMEOUT_S = 120.0  # the zygote imports torch before it answers; a cold disk can take long
_ANSWER_TIMEOUT_S = 2.0
_PATIENCE_S = 0.5
_REFUSALS_S = (0.05, 0.1, 0.2, 0.4, 0.8)  # how long to wait for room for another process, each time
# What a process brings on itself.
_FAULTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended."""

    words: str
    killed: bool
    """By somebody, as far as is known: not by what it did itself."""


class Process:
    """A child of the zygote, held by a descriptor that cannot be confused with a later process of the same pid."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self.channel = channel
        self.started = time.monotonic()
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # died and was reaped before we looked
            self.pidfd = -1
        _processes.add(self)

    def is_alive(self) -> bool:
        """False once the process has ended and can write nothing any more."""
        return self.pidfd >= 0 and not readable(self.pidfd, 0)

    def is_stopped(self) -> bool:
        """Whether the system shows it as stopped."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            return False
        return state in (b"T", b"t")

    def signal(self, number: int) -> None:
        """Send a signal; a process that is gone is no error."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False when it still runs after ``timeout_s``."""
        return self.pidfd < 0 or readable(self.pidfd, timeout_s)

    def ending(self) -> Ending:
        """How the process ended."""
        code = _exit_code(self.pid)
        if code is None:
            return Ending("ended", killed=True)
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return Ending(f"killed by {name}", killed=-code not in _FAULTS)
        return Ending(f"exited with code {code}", killed=False)

    def close(self) -> None:
        """Release the descriptors; the process must have ended."""
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        _processes.discard(self)


class _Zygote:
    def __init__(self) -> None:
        self.channel, theirs = Channel.pair()
        environment = dict(os.environ, MANYHANDS_WARM="0", OPENBLAS_NUM_THREADS="1")
        source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = source + (os.pathsep + known if known else "")
        self._asked = 0
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "manyhands.engine.zygote", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for the caller alone
            )
        with contextlib.suppress(ChannelClosed):  # it could not start; whoever needs it will see
            for folder in _folders:
                self.channel.send("folder", {"path": folder, "needed": True})

    def ask(self, kind: str, body: dict[str, Any], fds: Sequence[int] = (), *, timeout_s: float) -> Message | None:
        """Its answer; None when there is none in time. One that comes later is passed over: answers have numbers."""
        self._asked += 1
        deadline = time.monotonic() + timeout_s
        self.channel.send(kind, {**body, "number": self._asked}, fds)
        while (left_s := deadline - time.monotonic()) > 0:
            answer = self.channel.receive(min(left_s, _PATIENCE_S))
            if answer is None:
                self.process.send_signal(signal.SIGCONT)  # in case somebody has stopped it: nothing works without it
            elif answer.body["number"] == self._asked:
                return answer
        return None

    def close(self) -> None:
        with contextlib.suppress(ChannelClosed):
            self.channel.send("end", timeout_s=0)
        self.channel.close()
        try:
            self.process.wait(0.3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


_lock = threading.RLock()
_processes: weakref.WeakSet[Process] = weakref.WeakSet()  # those that nobody has closed yet
_folders: set[str] = set()  # to be removed when this process ends
_zygote: _Zygote | None = None
_owner = 0


def warm() -> None:
    """Start the zygote in the background if it does not run."""
    global _zygote, _owner
    with _lock:
        if _owner != os.getpid():  # a fork of the caller must not use what is the caller's
            _zygote, _owner = None, os.getpid()
            _folders.clear()
            _processes.clear()
        if _zygote is not None and _zygote.process.poll() is None:
            return
        if _zygote is not None:
            _zygote.close()
        _zygote = _Zygote()


def zygote_pid() -> int | None:
    """The pid of the zygote, if one runs."""
    with _lock:
        running = _zygote is not None and _owner == os.getpid() and _zygote.process.poll() is None
        return _zygote.process.pid if running and _zygote is not None else None


def shutdown() -> None:
    """End the zygote and every worker that is left. The next run starts it again."""
    global _zygote
    with _lock:
        if _zygote is not None and _owner == os.getpid():
            _zygote.close()
        _zygote = None


def release() -> bool:
    """End the zygote, unless other runs of this process need it; whether it ended."""
    with _lock:
        if _processes:
            return False
        shutdown()
        return True


@atexit.register
def _end() -> None:
    shutdown()
    if _owner == os.getpid():
        for folder in _folders:
            shutil.rmtree(folder, ignore_errors=True)


def remove_afterwards(folder: str, *, needed: bool = True) -> None:
    """Let ``folder`` be removed when this process ends in whatever way; not ``needed``: it is gone already.

    It is the zygote that does so when this process is killed; one that is started later is told as well.
    """
    with _lock:
        (_folders.add if needed else _folders.discard)(folder)
        if needed:
            warm()
        if _zygote is not None and zygote_pid() is not None:
            with contextlib.suppress(ChannelClosed):  # it was killed: the next one is told when it starts
                _zygote.channel.send("folder", {"path": folder, "needed": needed})


def spawn(target: str) -> Process:
    """Fork a process that calls ``target`` ("module:function") with its end of the channel."""
    for pause_s in (*_REFUSALS_S, None):
        try:
            return _spawn(target)
        except (ChannelClosed, BlockingIOError) as error:  # the zygote was killed: start another; or it has no room
            if pause_s is None:
                raise EngineError(f"a worker process could not be started: {error}") from error
            time.sleep(pause_s)
    raise AssertionError("unreachable")


def _spawn(target: str) -> Process:
    with _lock:
        warm()
        assert _zygote is not None
        channel, theirs = Channel.pair()
        body = {"target": target, "path": list(sys.path), "argv": list(sys.argv), "cwd": os.getcwd()}
        with theirs:
            try:
                answer = _zygote.ask("spawn", body, [theirs.fileno()], timeout_s=_START_TIMEOUT_S)
            except ChannelClosed:
                channel.close()
                _zygote.close()
                raise
        if answer is None:
            channel.close()  # should it be started after all, it finds nobody and ends
            raise EngineError(f"no worker process could be started within {_START_TIMEOUT_S:.0f} s")
        if answer.kind == "refused":
            channel.close()
            raise BlockingIOError(answer.body["why"])
        return Process(answer.body["pid"], channel)


def _exit_code(pid: int) -> int | None:
    with _lock:
        if _zygote is None:
            return None
        try:
            for _ in range(20):  # the kernel tells us a moment before the zygote has reaped
                answer = _zygote.ask("status", {"pid": pid}, timeout_s=_ANSWER_TIMEOUT_S)
                if answer is None or answer.body["code"] is not None:
                    return None if answer is None else int(answer.body["code"])
                time.sleep(0.005)
        except ChannelClosed:
            pass
        return None
