"""Fault 3 and 6 for servers, the long version: kill workers and servers at random, and count effects in the weights.

    python benchmarks/fault_servers.py --kills 100 --transport socket
    python benchmarks/fault_servers.py --kills 100 --transport arena --every 4    # local steps, four batches at once

The model counts: each sample that takes part once lowers its own weight by exactly 1/batch, whatever the order, so
that an update that was lost or applied twice stays visible to the end. Over sockets every server has a backup. Prints
the kills by role, what was lost and doubled, and how long the run stood still. Exits with 1 if anything was lost or
doubled, or if the ledger is not exact.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
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

SAMPLES, BATCH = 512, 8
DELAY = 2  # with local steps, a change counts by its second part


def added_up(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum(dim=1).mean()


ROLES = ("worker", "primary", "backup")


def role_of(name: str) -> str:
    """``server-0-backup`` -> ``backup``."""
    if name.startswith("worker"):
        return "worker"
    return name.split("-")[2] if name.endswith("backup") else "spare" if "spare" in name else "primary"


def stalls(history: mh.History, killed: dict[int, str]) -> dict[str, list[float]]:
    """How long it took until a step was committed after a death, by the role of the dead."""
    found: dict[str, list[float]] = {role: [] for role in ROLES}
    deaths = {}
    for event in history.events:
        who = (event.get("worker"), event.get("server"), event.get("step"))
        if event["event"] in ("worker_died", "server_died"):
            deaths[who] = killed.get(event["pid"])
        elif event["event"] == "recovered" and (role := deaths.get(who)) is not None:
            found[role].append(event["seconds"])
    return {role: sorted(seconds) for role, seconds in found.items()}


class Killer(mh.Callback):
    """Kills a random process every now and then; the run ends with the epoch in which it is done."""

    def __init__(self, kills: int, seed: int, roles: list[str], pause_s: float) -> None:
        self.kills, self.roles, self.pause_s = kills, roles, pause_s
        self.killed: dict[int, str] = {}
        self.dice = random.Random(seed)
        self.fired: Counter[str] = Counter()
        self.trainer: mh.Trainer | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, name="killer", daemon=True)

    def on_train_begin(self, state: mh.State) -> None:
        self.thread.start()

    def on_epoch_end(self, state: mh.State) -> None:
        if not self.thread.is_alive():
            state.stop("all kills are done")

    def on_train_end(self, state: mh.State) -> None:
        self.over.set()

    def work(self) -> None:
        while self.fired.total() < self.kills and not self.over.wait(self.pause_s * self.dice.uniform(0.5, 1.5)):
            assert self.trainer is not None
            pids = {name: pid for name, pid in self.trainer.pids.items() if role_of(name) in self.roles}
            if not pids:
                continue
            name = self.dice.choice(sorted(pids))
            try:
                os.kill(pids[name], signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.killed[pids[name]] = role_of(name)
            self.fired[role_of(name)] += 1


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One fit under fire."""
    model = nn.Linear(SAMPLES, arguments.height, bias=False)
    nn.init.zeros_(model.weight)
    replicas = 1 if arguments.transport == "socket" else 0
    servers, every = arguments.servers, arguments.every
    sync: object = mh.Server(policy="async", servers=servers, replicas=replicas, transport=arguments.transport)
    if every > 1:
        sync = mh.Local(every=every, outer="average", asynchronous=True, delay=DELAY, servers=servers)
    killer = Killer(arguments.kills, arguments.seed, arguments.roles, arguments.pause_s)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = killer.trainer = mh.Trainer(model, loss=added_up, optimizer=plain, workers=arguments.workers, sync=sync)
    data = (torch.eye(SAMPLES), torch.zeros(SAMPLES, 1))
    begun = time.monotonic()
    history = trainer.fit(
        data, epochs=10**6, batch_size=BATCH, run_dir=folder, callbacks=[killer], progress="quiet",
        checkpoint_every_s=5.0,
    )  # fmt: skip
    effects = -model.weight.detach() * BATCH * (DELAY if every > 1 else 1)
    backs = [event for event in history.events if event["event"] == "rolled_back"]
    return {
        "kills": dict(killer.fired),
        "epochs": len(history),
        "batches": len(history) * SAMPLES // BATCH,
        "updates": history.updates["applied"],
        "seconds": round(time.monotonic() - begun, 1),
        "lost": int((effects < len(history)).sum()),
        "doubled": int((effects > len(history)).sum()),
        "ledger_exact": read_ledger(folder / "ledger").verify().exact,
        "rolled_back": len(backs),
        "steps_done_again": sum(event["steps_lost"] for event in backs),
        **{
            f"{role}_stall_s": {f"p{p}": percentile(seconds, p / 100) for p in (50, 95, 100)}
            for role, seconds in stalls(history, killer.killed).items()
            if seconds
        },
    }


def percentile(values: list[float], share: float) -> float | None:
    return round(values[min(int(share * len(values)), len(values) - 1)], 3) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--transport", choices=["socket", "arena"], default="socket")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="local steps that a worker makes at once")
    parser.add_argument("--height", type=int, default=16, help="rows of the weight; many make an update take its time")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES), help="whom to kill")
    parser.add_argument("--pause-s", type=float, default=0.5, help="between two kills, on average")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.every > 1 and arguments.transport == "socket":
        parser.error("--every goes with --transport arena")
    with tempfile.TemporaryDirectory() as folder:
        result = run(arguments, Path(folder))
    print(json.dumps(result, indent=2))
    done = sum(result["kills"].values()) >= arguments.kills
    return 0 if done and result["ledger_exact"] and not result["lost"] and not result["doubled"] else 1


if __name__ == "__main__":
    sys.exit(main())
