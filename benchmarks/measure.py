"""Runs sides as bounded subprocesses, in turns, and leaves nothing behind.

A side's whole process tree carries a token in its environment; when the side ends, whatever still carries the token
after a short grace is counted, killed, and reported.
"""

import contextlib
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
TOKEN = "BENCHMARK_TOKEN"
GRACE_S = 5.0
POLL_S = 0.1

Result = dict[str, Any]
Watch = Callable[[list[psutil.Process]], None]


class SideFailed(RuntimeError):
    """A side ended without a report; the message holds the end of what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One column of a comparison: a module of this package and its options."""

    name: str
    module: str
    options: Sequence[str]
    terminal: bool = False  # give it a terminal, so that live output is really drawn
    timeout_s: float = 300.0


def ours(name: str, *options: str, **more: Any) -> Side:
    return Side(name=name, module="benchmarks.ours", options=options, **more)


def ddp(name: str, *options: str, **more: Any) -> Side:
    return Side(name=name, module="benchmarks.peers", options=("ddp", *options), **more)


def bare(name: str, *options: str, **more: Any) -> Side:
    return Side(name=name, module="benchmarks.peers", options=("bare", *options), **more)


def run_side(side: Side, watch: Watch | None = None) -> Result:
    """Runs the side once in an empty folder; `watch` is called with its live processes several times a second."""
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = {**os.environ, TOKEN: token, "PYTHONPATH": _python_path(), "TMPDIR": name}
        if side.terminal:
            environment["TERM"] = "xterm-256color"  # without a kind of terminal, nothing would be drawn
        output = folder / "report.json"
        command = [sys.executable, "-m", side.module, *side.options, f"--started={time.time()}", f"--output={output}"]
        grace_s = 0.0  # only a side that ended by itself may take its time to clean up
        try:
            with _sink(folder / "printed", terminal=side.terminal) as sink:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                )
                code = _wait(process, token, side.timeout_s, watch)
            grace_s = 0.0 if code is None else GRACE_S
        finally:
            left = _reap(token, grace_s)
        if code != 0 or not output.exists():
            ending = f"no end after {side.timeout_s:g} s" if code is None else f"exit code {code}"
            printed = (folder / "printed").read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SideFailed(f"{side.name} ({' '.join([side.module, *side.options])}): {ending}\n{printed}")
        result: Result = json.loads(output.read_text(encoding="utf-8"))
        return {**result, "left_processes": left}


def run_rounds(sides: Sequence[Side], rounds: int) -> dict[str, list[Result]]:
    """Every side once per round, in turns, so that a drifting machine meets them all; a failure is repeated once."""
    results: dict[str, list[Result]] = {side.name: [] for side in sides}
    for number in range(1, rounds + 1):
        for side in sides:
            try:
                result = {**run_side(side), "failures": 0}
            except SideFailed as failure:
                print(f"failed once, repeating: {failure}", file=sys.stderr, flush=True)
                result = {**run_side(side), "failures": 1}
            results[side.name].append(result)
            rate = result["samples_per_s"]
            shown = f"{rate:,.0f} samples/s" if rate else f"first step after {result['start_to_first_step_s']:.2f} s"
            print(f"round {number}/{rounds} · {side.name}: {shown}", file=sys.stderr, flush=True)
    return results


def footnote(results: Mapping[str, Sequence[Result]]) -> str:
    """What a table must not hide: runs that failed and were repeated, and processes that had to be killed."""
    notes = []
    for name, runs in results.items():
        failures, left = (sum(run[key] for run in runs) for key in ("failures", "left_processes"))
        if failures:
            notes.append(f"{name}: {failures} of {len(runs) + failures} runs failed and were repeated.")
        if left:
            notes.append(f"{name}: {left} processes left behind.")
    return "".join(f"\n\n{note}" for note in notes)


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src"), *([inherited] if inherited else [])])


def _wait(process: "subprocess.Popen[bytes]", token: str, timeout_s: float, watch: Watch | None) -> int | None:
    """The exit code, or None when the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if watch is not None:
            watch(carriers(token))
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=POLL_S)
    return None


def carriers(token: str) -> list[psutil.Process]:
    """The live processes that carry the token."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _reap(token: str, grace_s: float) -> int:
    """Waits for the side's processes to go, then kills the rest; returns how many had to be killed."""
    deadline = time.monotonic() + grace_s
    while (left := carriers(token)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)
    return len(left)


@contextlib.contextmanager
def _sink(path: Path, *, terminal: bool) -> Iterator[int]:
    """A file descriptor to print to: the file itself, or a terminal whose output lands in the file."""
    with path.open("wb") as file:
        if not terminal:
            yield file.fileno()
            return
        reading, writing = pty.openpty()

        def drain() -> None:
            with contextlib.suppress(OSError):  # the end of a terminal is an input/output error
                while chunk := os.read(reading, 65_536):
                    file.write(chunk)

        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        try:
            yield writing
        finally:
            os.close(writing)
            thread.join(timeout=GRACE_S)
            os.close(reading)
