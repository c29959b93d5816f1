"""Users' scripts, run as programs of their own: what a signal to the caller does can only be seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

SOURCE = Path(__file__).parents[2] / "src"
LEFT_WITHIN_S = 5.0

# Prints the pids of its processes as soon as the first step is committed, and its digest at the end.
FIT = """
import sys, threading, time
import manyhands as mh
sys.path.insert(0, {folder!r})
from scenes import Mlp, Sluggish, committed, table
from manyhands.engine import local
model = {model}()
trainer = mh.Trainer(model, optimizer="adam", workers={workers}, sync={sync})
def tell():
    while committed(trainer) < 1:
        time.sleep(0.001)
    pids = [local.zygote_pid(), *trainer.pids.values()]
    sys.stdout.write(" ".join(["pids", *map(str, pids)]) + "\\n")  # in one piece: the fit prints, too
    sys.stdout.flush()
threading.Thread(target=tell, daemon=True).start()
trainer.fit(table(1600), epochs={epochs}, batch_size=16, lanes=4, run_dir={run_dir!r}, checkpoint_every_s=0.1)
print("digest", mh.digest(model), flush=True)
"""


class Program:
    """A running script."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []

    def wait_for(self, word: str, timeout_s: float = 60) -> list[str]:
        """The words of the first line that begins with ``word``."""
        assert self.process.stdout is not None
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            line = self.process.stdout.readline()
            assert line, f"the script ended without {word!r}:\n{''.join(self.said)}"
            self.said.append(line)
            if line.split()[:1] == [word]:
                return line.split()[1:]
        raise AssertionError(f"no {word!r} after {timeout_s} s")

    def end(self, timeout_s: float = 10) -> str:
        """Everything it said, once it has ended."""
        assert self.process.stdout is not None
        self.said.append(self.process.stdout.read())  # not communicate(): it would pass over what is buffered here
        self.process.wait(timeout_s)
        return "".join(self.said)


def fit_script(
    run_dir: str | bool, *, workers: int = 2, epochs: int = 40, model: str = "Sluggish", sync: str = "'allreduce'"
) -> str:
    """A fit of some seconds."""
    folder = str(Path(__file__).parent)
    return FIT.format(folder=folder, run_dir=run_dir, workers=workers, epochs=epochs, model=model, sync=sync)


@contextmanager
def running(script: str) -> Iterator[Program]:
    """Run a script as a program in a session of its own, and clean up after it whatever happens."""
    environment = dict(os.environ, PYTHONPATH=str(SOURCE), PYTHONUNBUFFERED="1")
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield Program(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def still_there(pids: list[int]) -> list[int]:
    """Which of the processes have not ended after the time they have to end."""
    end = time.monotonic() + LEFT_WITHIN_S
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
