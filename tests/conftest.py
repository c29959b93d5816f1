"""The police of the house: no test may leave a process, thread, shared memory, socket or setting behind.

Every test also gets a run root of its own (``run_root``), so that nothing is written into the checkout.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

GRACE_S = 5.0
ZYGOTE = "manyhands.engine.zygote"
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
DESCRIPTOR_TOLERANCE = 4  # the first test that starts workers also opens the links to the zygote
SHARED_MEMORY = Path("/dev/shm")
# Torch's compiler, which comes with the first optimizer, and scikit-learn set these when they are imported.
SET_BY_IMPORTS = {"TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}

# Descendants inherit this mark, so an orphan is found also after init has adopted it.
MARK = "MANYHANDS_TEST_PROCESS"
os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"

# A shell that starts something in the background lets it ignore Ctrl-C; the tests send it to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("house", deadline=None)  # the machine may be busy; pytest-timeout bounds the whole test
settings.load_profile("house")


def is_marked(process: psutil.Process) -> bool:
    entry = f"{MARK}={os.environ[MARK]}".encode()
    for _ in range(5):
        try:
            variables = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:  # gone, or of another user
            return False
        if variables:
            return entry in variables.split(b"\0")
        time.sleep(0.002)  # empty in the middle of an exec; for good in a zombie and in a thread of the kernel
    return False


def may_stay(process: psutil.Process) -> bool:
    """Whether this is a process that lives as long as the caller by design.

    A worker forked from the zygote has the same command line, but is not a child of this process.
    """
    command = " ".join(process.cmdline())
    return process.ppid() == os.getpid() and (ZYGOTE in command or RESOURCE_TRACKER in command)


def descendants() -> dict[int, psutil.Process]:
    """Living and zombie processes that this one started, directly or not, by process id."""
    me = psutil.Process()
    found = {process.pid: process for process in me.children(recursive=True)}
    found |= {process.pid: process for process in psutil.process_iter() if process.pid != me.pid and is_marked(process)}
    return found


def strangers(before: set[int]) -> list[psutil.Process]:
    left = []
    for pid, process in descendants().items():
        try:
            if pid not in before and not may_stay(process):
                left.append(process)
        except psutil.ZombieProcess:  # a kind of NoSuchProcess; dead, but nobody has collected it
            left.append(process)
        except psutil.NoSuchProcess:
            continue
    return left


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} [{process.status()}] {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return f"{process.pid} [gone or zombie]"


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()  # noqa: PTH208 - names, not paths


def descriptors() -> list[str]:
    """Open sockets and anonymous memory files of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed since it was listed
            continue
        if target.startswith(("socket:", "/memfd:")):
            found.append(target)
    return sorted(found)


def environment() -> dict[str, str]:
    ignored = {"PYTEST_CURRENT_TEST", *SET_BY_IMPORTS}
    return {name: value for name, value in os.environ.items() if name not in ignored}


def handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}


def wait_until_empty(look: Callable[[], Any]) -> Any:
    """What ``look`` still finds after ``GRACE_S`` seconds; returns as soon as it finds nothing."""
    end = time.monotonic() + GRACE_S
    while (found := look()) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.02)
    return found


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails the test that leaves something behind, and names what it left."""
    pids, running, segments, opened = set(descendants()), threads(), shared_memory(), len(descriptors())
    variables, folder, signals = environment(), Path.cwd(), handlers()
    yield
    complaints = []
    if left := wait_until_empty(lambda: strangers(pids)):
        complaints.append("processes: " + "; ".join(describe(process) for process in left))
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
    if alive := wait_until_empty(lambda: threads() - running):
        complaints.append("threads: " + ", ".join(sorted(thread.name for thread in alive)))
    if memory := wait_until_empty(lambda: shared_memory() - segments):
        complaints.append("shared memory: " + ", ".join(sorted(memory)))
    if wait_until_empty(lambda: len(descriptors()) > opened + DESCRIPTOR_TOLERANCE):
        complaints.append(f"descriptors: {opened} before, now " + ", ".join(descriptors()))
    if changed := {name for name, _ in variables.items() ^ environment().items()}:
        complaints.append("environment variables: " + ", ".join(sorted(changed)))
        os.environ.update(variables)
        for name in changed - variables.keys():
            del os.environ[name]
    if Path.cwd() != folder:
        complaints.append(f"working directory: {Path.cwd()}, was {folder}")
        os.chdir(folder)
    if different := [name for name, handler in handlers().items() if handler != signals[name]]:
        complaints.append("signal handlers: " + ", ".join(different))
        for name in different:
            signal.signal(signal.Signals[name], signals[name])
    if complaints:
        pytest.fail("the test left behind\n  " + "\n  ".join(complaints), pytrace=False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads as a worker has: with more, a kernel may add in another order, and small layers only lose."""
    import torch  # not every test needs it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def run_root(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this test's runs are made."""
    root = tmp_path / "runs"
    monkeypatch.setenv("MANYHANDS_RUNS", str(root))
    return root
