"""Fault 20, the long version: Ctrl-C, SIGTERM and kill -9 of the caller at random moments of a small run.

    python benchmarks/fault_endings.py --times 100

Counts the processes, shared-memory segments and sockets that are left 5 s after each. Exits with 1 when any are.
A moment may fall anywhere: while Python imports, while workers start, in a step, in a save, at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
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
GRACE_S = 5.0
SIGNALS = {"ctrl-c": signal.SIGINT, "ctrl-c twice": signal.SIGINT, "term": signal.SIGTERM, "kill": signal.SIGKILL}

SCRIPT = """
import sys, torch
import manyhands as mh
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
x = torch.randn(2000, 20)
trainer = mh.Trainer(model, optimizer="adam", workers=2)
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


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def sockets() -> set[str]:
    """Named Unix sockets; the pairs that connect our processes have no name and go with them."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and "manyhands" in row[7]}


def once(name: str, after_s: float, folder: Path) -> tuple[str, list[str]]:
    """End one run after ``after_s`` seconds; returns how it ended and what it left."""
    token, segments_before, sockets_before = uuid.uuid4().hex, segments(), sockets()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), MARK: token}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder / token)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(after_s)
    for _ in range(2 if name == "ctrl-c twice" else 1):
        process.send_signal(SIGNALS[name])
        time.sleep(0.05)
    deadline = time.monotonic() + GRACE_S
    while (pids := marked(token)) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.05)
    left = [f"process {pid}" for pid in pids]
    left += [f"segment {name}" for name in segments() - segments_before]
    left += [f"socket {name}" for name in sockets() - sockets_before]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.wait(10)
    code = process.returncode
    return signal.Signals(-code).name if code < 0 else f"code {code}", left


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=100, help="how often each")
    parser.add_argument("--longest", type=float, default=5.0, help="the latest moment, in seconds after the start")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, wrong = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        for name in SIGNALS:
            endings: Counter[str] = Counter()
            left: list[str] = []
            for _ in range(options.times):
                ending, found = once(name, dice.uniform(0.2, options.longest), Path(folder))
                endings[ending] += 1
                left += found
            wrong += len(left)
            print(f"{name}: {options.times} times · {dict(endings)} · left: {', '.join(left) or 'nothing'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
