"""A table of 10 million rows × 16 that servers hold by row: what a worker holds of it, and what moves in a step.

    python -m benchmarks.rows

In the first run every step is checked: the rows that it moved, as counted by the code that moves them, must be the
distinct rows of its batch, and no worker may hold 300 MB of its own. A worker's own memory is its proportional set size
without shared memory, plus everything in the arena besides the tables, in full, as if all of it were this worker's. The
second run is not looked at, and gives the speed.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

import manyhands as mh
from benchmarks.table import Spread, markdown, write_block
from manyhands.core.order import epoch_order

MEGABYTE = 10**6
LIMIT_BYTES = 300 * MEGABYTE
BATCH = 512
FIELDS = 26  # ids of a sample
WINDOW_S = 1.0
UNWATCHED_EPOCHS = 5


class Clicks(nn.Module):
    """Adds up the rows of a sample's ids, and has a small net on top."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=True, _weight=torch.zeros(rows, width))
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(ids).sum(dim=1)).squeeze(1)
        return out


class Watch(mh.Callback):
    """After every step: compares the rows that moved with the batch, and looks at the workers' memory."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self.trainer: mh.Trainer | None = None
        self.before = {"pulled": 0, "pushed": 0}
        self.moved: list[int] = []
        self.own_bytes = self.whole_bytes = self.resident_bytes = 0

    def on_step_end(self, state: mh.State) -> None:
        self._count(state)
        self._weigh()

    def _count(self, state: mh.State) -> None:
        first = (state.step - 1) * BATCH
        batch = epoch_order(0, 0, len(self.ids))[first : first + BATCH]
        distinct = len(self.ids[batch].unique())
        now = dict(state.history.rows)
        moved = {name: now[name] - self.before[name] for name in now}
        assert moved == {"pulled": distinct, "pushed": distinct}, f"step {state.step}: {moved}, distinct: {distinct}"
        self.before = now
        self.moved.append(distinct)

    def _weigh(self) -> None:
        assert self.trainer is not None and self.trainer._fit is not None
        arena = self.trainer._fit.session.arena
        tables_bytes = sum(plane.nbytes for planes in arena.tables().planes for plane in planes)
        others_bytes = os.fstat(arena.segment.fd).st_blocks * 512 - tables_bytes
        assert others_bytes >= 0, "the tables are not all in memory, so what else is there cannot be told from them"
        for role, pid in self.trainer.pids.items():
            if role.startswith("worker"):
                sizes = _sizes(pid, "smaps_rollup") | _sizes(pid, "status")
                self.own_bytes = max(self.own_bytes, sizes["Pss"] - sizes["Pss_Shmem"] + others_bytes)
                self.whole_bytes = max(self.whole_bytes, sizes["Pss"])
                self.resident_bytes = max(self.resident_bytes, sizes["RssAnon"] + sizes["RssFile"])


def _sizes(pid: int, file: str) -> dict[str, int]:
    """The sizes in bytes that the system has for a process in a file of its own."""
    lines = Path(f"/proc/{pid}/{file}").read_text(encoding="ascii").splitlines()
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.removesuffix(":"): int(size) * 1024 for name, size, _ in words}


def skewed_ids(samples: int, rows: int) -> torch.Tensor:
    """Ids by Zipf's law, the frequent ones first: the worst case for servers that would hold ranges."""
    chance = np.random.default_rng(0)
    return torch.from_numpy(np.minimum(chance.zipf(1.2, (samples, FIELDS)), rows) - 1)


def train(options: argparse.Namespace, ids: torch.Tensor, watch: Watch | None = None) -> mh.History:
    torch.manual_seed(0)
    trainer = mh.Trainer(
        Clicks(options.rows, options.width),
        loss="bce_with_logits",
        optimizer=mh.optimizer("adagrad", lr=0.05),
        workers=options.workers,
        sync=mh.Server(policy="async", servers=options.servers),
    )
    if watch is not None:
        watch.trainer = trainer
    clicked = (ids[:, 0] % 2).float()
    callbacks, epochs = ([watch], 1) if watch is not None else ([], UNWATCHED_EPOCHS)
    return trainer.fit(
        (ids, clicked), epochs=epochs, batch_size=BATCH, callbacks=callbacks, run_dir=False, progress="quiet"
    )


def step_rates(history: mh.History) -> list[float]:
    """Steps per second in each whole window of the run."""
    rates, (begun, before) = [], history.step_times[0]
    for now, steps in history.step_times:
        if now - begun >= WINDOW_S:
            rates.append((steps - before) / (now - begun))
            begun, before = now, steps
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    ids = skewed_ids(options.steps * BATCH, options.rows)
    watch = Watch(ids)
    train(options, ids, watch)
    assert len(watch.moved) == options.steps
    assert watch.own_bytes < LIMIT_BYTES, f"a worker held {watch.own_bytes / MEGABYTE:.0f} MB of its own"
    rates = step_rates(train(options, ids))
    row = {
        "table": f"{options.rows:,} × {options.width}, {4 * options.rows * options.width / MEGABYTE:,.0f} MB",
        "servers": str(options.servers),
        "workers": str(options.workers),
        "a worker's own memory, MB": f"{watch.own_bytes / MEGABYTE:.0f}",
        "its whole PSS, MB": f"{watch.whole_bytes / MEGABYTE:.0f}",
        "its RSS without shared memory, MB": f"{watch.resident_bytes / MEGABYTE:.0f}",
        "ids in a batch": f"{BATCH} × {FIELDS}",
        "rows pulled, and pushed, in a step": Spread.of(watch.moved).show(),
        "distinct rows of the batch": f"the same in {len(watch.moved)} of {options.steps} steps",
        "steps/s": Spread.of(rates).show() if rates else "–",
    }
    write_block("rows", markdown(list(row), [list(row.values())]), module="rows")


if __name__ == "__main__":
    main()
