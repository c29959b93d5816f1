"""Fault 20, the long version: Ctrl-C, SIGTERM and kill -9 of the caller at random moments of a small run.

    python benchmarks/fault_endings.py --times 100

Counts the processes, shared-memory segments and sockets that are left 5 s after each, and tells how long it took until
all processes were gone. Exits with 1 when anything is left. A moment may fall anywhere: while manyhands is imported,
while workers start, in a step, in a save, at the end. It does not fall into the import of torch, which now and then
swallows a Ctrl-C: that much is tried by ``python -c "import torch"`` alone. Start it in the foreground: what a shell
starts in the background ignores Ctrl-C, and so would its children.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import psutil

SOURCE = Path(__file__).resolve().parent.parent / "src"
MARK = "MANYHANDS_ENDING"
START_S = 120.0
SYNCS = {
    "allreduce": "'allreduce'", "async": "'async'", "replicas": "mh.Server(policy='async', replicas=1)",
    "async-local": "'async-local'",
}  # fmt: skip
SIGNALS = {"ctrl-c": signal.SIGINT, "ctrl-c twice": signal.SIGINT, "term": signal.SIGTERM, "kill": signal.SIGKILL}

SCRIPT = """
import sys, torch
print("begun", flush=True)
import manyhands as mh
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
x = torch.randn(2000, 20)
trainer = mh.Trainer(model, optimizer="adam", workers=2, sync=SYNC)
trainer.fit((x, x[:, :4].argmax(1)), epochs=60, batch_size=16, lanes=4, run_dir=sys.argv[1], checkpoint_every_s=0.2)
"""


def marked(token: str) -> list[int]:
    """Living processes that were started, directly or not, by the run with this token."""
    entry, found = f"{MARK}={token}".encode(), []
    for process in psutil.process_iter():
        try:
            if entry in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process.pid)
        except OSError:  # gone, or of another user
            continue
    return found


def describe(pid: int, after_s: float) -> str:
    """A process that is left: one that has hardly run was starved, not forgotten."""
    try:
        used = sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.Error:  # it ended while we looked
        used = 0.0
    return f"process {pid} ({after_s:.1f} s after the start, {used:.1f} s of processor time)"


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def sockets(pid: int) -> set[str]:
    """Named Unix sockets of the runs of that process, and their folders; the pairs that connect our processes have no
    name and go with them."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    folders = {str(path) for path in Path(tempfile.gettempdir()).glob(f"manyhands-{pid}-*")}
    return folders | {row[7] for row in rows if len(row) > 7 and f"manyhands-{pid}-" in row[7]}


def remains(token: str, pid: int, after_s: float) -> set[str]:
    """What is left of a run: living processes, sockets, folders."""
    return {describe(found, after_s) for found in marked(token)} | {f"socket {path}" for path in sockets(pid)}


def once(name: str, sync: str, after_s: float, grace_s: float, folder: Path) -> tuple[str, float, list[str]]:
    """End one run after ``after_s`` seconds; returns how it ended, after how long, and what it left."""
    token, before = uuid.uuid4().hex, segments()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), MARK: token}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("SYNC", SYNCS[sync]), str(folder / token)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], START_S)[0]:
            process.kill()
            raise TimeoutError(f"the script had not imported torch after {START_S:.0f} s")
        time.sleep(after_s)
        for _ in range(2 if name == "ctrl-c twice" else 1):
            process.send_signal(SIGNALS[name])
            time.sleep(0.05)
        begun = time.monotonic()
        while (
            left := remains(token, process.pid, after_s) | segments() - before
        ) and time.monotonic() < begun + grace_s:
            process.poll()
            time.sleep(0.05)
        took_s, pids = time.monotonic() - begun, marked(token)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = process.wait(10)
    return signal.Signals(-code).name if code < 0 else f"code {code}", took_s, sorted(left)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=100, help="how often each")
    parser.add_argument("--signals", default=",".join(SIGNALS), help=f"some of: {', '.join(SIGNALS)}")
    parser.add_argument("--sync", choices=SYNCS, default="allreduce")
    parser.add_argument("--longest", type=float, default=5.0, help="the latest moment, in seconds after torch is there")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds after which nothing may be left")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, wrong = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        for name in options.signals.split(","):
            endings: Counter[str] = Counter()
            left: list[str] = []
            seconds: list[float] = []
            for _ in range(options.times):
                moment = dice.uniform(0.0, options.longest)
                ending, took_s, found = once(name, options.sync, moment, options.grace, Path(folder))
                endings[ending] += 1
                seconds.append(took_s)
                left += found
            wrong += len(left)
            took = f"gone after {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)"
            said = f"{name}: {options.times} times · {dict(endings)} · {took} · left: {', '.join(left) or 'nothing'}"
            print(said, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
