"""Faults 1, 2, 5, 6, 7 and 15, the long version: kill, stop, resize and move lanes, then kill everything and resume.

    python benchmarks/fault_kills.py --kills 200 --stops 3 --resizes 12

The weights must be those of an undisturbed run at another worker count, bit for bit, and the ledger exact. Exits
with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.train.ledger_file import read_ledger

ROWS, FEATURES, CLASSES, BATCH, LANES = 12_800, 64, 10, 64, 8


class Net(nn.Module):
    """Dropout and BatchNorm, enough parameters that applying takes a good part of a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        if mh.worker_slot() == 0 and time.perf_counter_ns() % 3 == 0:
            time.sleep(0.002)  # one worker is slower, and unevenly so: lanes have reason to move
        return out


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, x[:, :CLASSES].argmax(dim=1)


class Disturber(threading.Thread):
    """Works off its orders one after the other, at random moments, and watches the commits meanwhile."""

    def __init__(self, trainer: mh.Trainer, orders: list[str], last_step: int, seed: int) -> None:
        super().__init__(name="disturber", daemon=True)
        self.trainer, self.last_step = trainer, last_step
        self.dice = random.Random(seed)
        self.orders = orders
        self.dice.shuffle(self.orders)
        self.fired: Counter[str] = Counter()
        self.gaps: list[float] = []
        self.over = False

    def steps(self) -> int:
        fit = self.trainer._fit
        return -1 if fit is None else fit.session.control.steps

    def run(self) -> None:
        while self.steps() < 1:
            time.sleep(0.001)
        first = self.steps()
        span = max(self.last_step - first, 1)
        due = sorted(first + self.dice.randrange(span) for _ in self.orders)
        seen, moment = self.steps(), time.monotonic()
        while not self.over:
            steps, now = self.steps(), time.monotonic()
            if steps < 0:
                return
            if steps != seen:
                self.gaps.append(now - moment)
                seen, moment = steps, now
            if due and steps >= due[0]:
                due.pop(0)
                self.fire(self.orders.pop())
            time.sleep(0.0005)

    def fire(self, order: str) -> None:
        if order == "resize":
            self.trainer.resize(self.dice.choice([1, 2, 3, 4]))
            self.fired[order] += 1
            return
        pids = list(self.trainer.pids.values())
        victims = pids if order == "kill all" else self.dice.sample(pids, min(len(pids), 1))
        for pid in victims:
            try:
                os.kill(pid, signal.SIGSTOP if order == "stop" else signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.fired[order] += 1


def fit(run_dir: Path, workers: int, epochs: int, orders: list[str], seed: int) -> dict[str, Any]:
    """One run; says how it went."""
    model = Net()
    trainer = mh.Trainer(
        model, optimizer="adam", workers=workers, clip=1.0, schedule="cosine", limits=mh.Limits(balance_s=0.3)
    )
    per_epoch = ROWS // BATCH
    disturber = Disturber(trainer, orders, int(epochs * per_epoch * 0.97), seed)
    disturber.start()
    begun = time.monotonic()
    history = trainer.fit(
        data(), epochs=epochs, batch_size=BATCH, lanes=LANES, run_dir=run_dir, checkpoint_every_s=2.0, progress="quiet"
    )
    seconds = time.monotonic() - begun
    disturber.over = True
    disturber.join()
    deaths = [event for event in history.events if event["event"] == "worker_died"]
    return {
        "digest": mh.digest(model),
        "seconds": seconds,
        "fired": dict(disturber.fired),
        "deaths by phase": dict(Counter(event["phase"] for event in deaths)),
        "undone": sum(event["undone"] and event["phase"] == "reduce" for event in deaths),  # elsewhere only saved ahead
        "lane moves": sum(1 for event in history.events if event["event"] == "plan"),
        "recoveries": sorted(event["seconds"] for event in history.events if event["event"] == "recovered"),
        "gaps": sorted(disturber.gaps),
        "exact": read_ledger(run_dir / "ledger").verify().exact,
    }


def killed_and_resumed(run_dir: Path, epochs: int) -> dict[str, Any]:
    """Run in a program of its own, kill the whole group somewhere in the middle, resume at another worker count."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        str(run_dir),
        "--epochs",
        str(epochs),
        "--workers",
    ]
    first = subprocess.Popen([*command, "2"], stdout=subprocess.PIPE, start_new_session=True)
    checkpoints = run_dir / "checkpoints"
    while len(list(checkpoints.glob("[0-9]*")) if checkpoints.exists() else []) < 2:
        assert first.poll() is None, "the run to be killed ended by itself"
        time.sleep(0.01)
    time.sleep(random.Random(5).random())
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    begun = time.monotonic()
    again = subprocess.run([*command, "3"], stdout=subprocess.PIPE, check=True, timeout=3600)
    result: dict[str, Any] = json.loads(again.stdout.decode().splitlines()[-1])
    result["seconds until resumed"] = result["first step at"] - begun
    return result


def child(run_dir: Path, workers: int, epochs: int) -> None:
    first_step: list[float] = []
    trainer = mh.Trainer(model := Net(), optimizer="adam", workers=workers, clip=1.0, schedule="cosine")

    def watch() -> None:
        while trainer._fit is None or trainer._fit.session.control.first_commit_ns == 0:
            time.sleep(0.001)
        first_step.append(time.monotonic())

    threading.Thread(target=watch, daemon=True).start()
    trainer.fit(
        data(), epochs=epochs, batch_size=BATCH, lanes=LANES, run_dir=run_dir, checkpoint_every_s=1.0, progress="quiet"
    )
    exact = read_ledger(run_dir / "ledger").verify().exact
    print(json.dumps({"digest": mh.digest(model), "exact": exact, "first step at": first_step[0]}))


def spread(name: str, values: list[float]) -> str:
    if not values:
        return f"{name}: none"
    half, nearly_all = (values[min(int(share * len(values)), len(values) - 1)] * 1e3 for share in (0.5, 0.95))
    return f"{name}: p50 {half:.0f} ms, p95 {nearly_all:.0f} ms, most {values[-1] * 1e3:.0f} ms ({len(values)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kill-all", type=int, default=3, help="how often all workers are killed at once")
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--resizes", type=int, default=12)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.workers, options.epochs)
        return 0
    counts = {"kill": options.kills, "kill all": options.kill_all, "stop": options.stops, "resize": options.resizes}
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        quiet = fit(Path(folder, "quiet"), 2, options.epochs, [], 0)
        orders = [name for name, count in counts.items() for _ in range(count)]
        rough = fit(Path(folder, "rough"), options.workers, options.epochs, orders, options.seed)
        resumed = killed_and_resumed(Path(folder, "resumed"), options.epochs)
    print(f"undisturbed   {quiet['digest'][:16]}  {quiet['seconds']:.1f} s")
    print(f"disturbed     {rough['digest'][:16]}  {rough['seconds']:.1f} s  ledger exact: {rough['exact']}")
    print(f"resumed       {resumed['digest'][:16]}  ledger exact: {resumed['exact']}")
    print(f"fired: {rough['fired']} · by phase: {rough['deaths by phase']} · undone applies: {rough['undone']}")
    print(f"plans: {rough['lane moves']} · throughput {quiet['seconds'] / rough['seconds']:.0%} of undisturbed")
    print(spread("from a death to the next commit", rough["recoveries"]))
    print(spread("time between two commits seen", rough["gaps"]))
    print(f"everything killed, the same command: first step {resumed['seconds until resumed']:.1f} s later")
    equal = len({quiet["digest"], rough["digest"], resumed["digest"]}) == 1
    exact = quiet["exact"] and rough["exact"] and resumed["exact"]
    fired = rough["fired"].get("kill", 0) >= options.kills
    complaints = {"the weights differ": equal, "a ledger is not exact": exact, "too few kills": fired}
    print(" · ".join(text for text, fine in complaints.items() if not fine) or "equal and exact")
    return 0 if equal and exact and fired else 1


if __name__ == "__main__":
    sys.exit(main())
