"""Fault 14: random single-bit flips over the files of a checkpoint; each must be noticed, and the older one loaded.

    python benchmarks/fault_flips.py --flips 1000

Half of the flips fall on any byte with equal chance, half on any file: so the small manifest is hit often, too.
Exits with 1 when a flip went unnoticed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("MANYHANDS_WARM", "0")  # no worker processes are needed here

import torch

from manyhands.errors import CheckpointDamaged
from manyhands.train.checkpoint import CheckpointStore


def state(seed: int) -> dict[str, torch.Tensor]:
    random_numbers = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(200, 100, generator=random_numbers),
        "weight.moment": torch.randn(200, 100, generator=random_numbers, dtype=torch.float64),
        "half": torch.randn(1000, generator=random_numbers).bfloat16(),
        "mask": torch.rand(777, generator=random_numbers) > 0.5,
        "count": torch.tensor(seed),
    }


def choose(files: list[Path], dice: random.Random) -> tuple[Path, int]:
    """A file and the position of a bit in it."""
    sizes = [file.stat().st_size for file in files]
    file = dice.choice(files) if dice.random() < 0.5 else dice.choices(files, weights=sizes)[0]
    return file, dice.randrange(file.stat().st_size * 8)


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ (1 << bit % 8)]))


def missed(store: CheckpointStore, newest: Path) -> str | None:
    """What is wrong with how the store meets the damage; None when it is as promised."""
    try:
        store.load(2)
    except CheckpointDamaged:
        pass
    else:
        return "load() returned the damaged checkpoint"
    checkpoint, warnings = store.load_latest()
    if checkpoint is None or checkpoint.step != 1:
        return f"load_latest() returned {checkpoint and checkpoint.step}, not step 1"
    if not all(torch.equal(tensor, checkpoint.tensors[name]) for name, tensor in state(1).items()):
        return "load_latest() returned other bytes than were saved"
    if len(warnings) != 1 or str(newest) not in warnings[0]:
        return f"load_latest() warned {warnings}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, misses, hit, started = random.Random(options.seed), 0, set(), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        store = CheckpointStore(Path(place), file_limit_bytes=100_000)
        store.save(1, state(1), {"epoch": 0})
        newest = store.save(2, state(2), {"epoch": 1, "history": {"loss": [0.5, 0.25]}})
        files = sorted(newest.iterdir())
        for _ in range(options.flips):
            file, bit = choose(files, dice)
            hit.add(file.name)
            flip(file, bit)
            if problem := missed(store, newest):
                misses += 1
                print(f"MISSED bit {bit} of {file.name}: {problem}")
            flip(file, bit)
        intact = store.load(2).step == 2
    print(
        f"flips {options.flips} · noticed {options.flips - misses} · missed {misses} · "
        f"files hit {len(hit)} of {len(files)} · {time.perf_counter() - started:.1f} s"
    )
    return 0 if intact and not misses else 1


if __name__ == "__main__":
    sys.exit(main())
