"""Throughput when one of four workers is four times slower, as a share of the sum of the workers' speeds.

    python -m benchmarks.slow_worker --pairs 5 --seconds 10

Four workers that compute would share this machine's cores, and a slow one would hand its core to the others, so no
worker's speed would be what it claims. The model therefore sleeps a fixed time per row instead of computing, four times
as long in the slow worker: speeds are 1, 1, 1 and 1/4, and their sum is 3.25 times what one worker alone reaches.
The first seconds, in which lanes move away from the slow worker, count as warm-up; the means over the rest are
compared.
"""

import argparse

from benchmarks.measure import ddp, footnote, ours, run_rounds
from benchmarks.table import Spread, markdown, write_block

WORKERS = 4
LANES = 16
SLOW_SLOT = WORKERS - 1
SUM_OF_SPEEDS = WORKERS - 1 + 1 / 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-s", type=float, default=5.0)
    options = parser.parse_args()
    # Short epochs: a timed run of ours ends with an epoch.
    shared = ("--model=sleeper", "--rows=1280", f"--seconds={options.seconds}", f"--warm-s={options.warm_s}")
    all_four = (*shared, f"--workers={WORKERS}")
    lanes, slow = f"--lanes={LANES}", f"--slow-slot={SLOW_SLOT}"
    sides = [
        ours("manyhands, one worker", *shared, "--workers=1", lanes),
        ours("manyhands, four equal", *all_four, lanes),
        ours("manyhands, one of four slow", *all_four, lanes, slow),
        ddp("DDP, four equal", *all_four),
        ddp("DDP, one of four slow", *all_four, slow),
    ]
    results = run_rounds(sides, options.pairs)
    means = {name: [float(run["mean_samples_per_s"]) for run in runs] for name, runs in results.items()}
    single = means[sides[0].name]
    rows = []
    for side in sides:
        speeds = SUM_OF_SPEEDS if slow in side.options else 1 if side is sides[0] else WORKERS
        shares = [rate / (speeds * alone) for rate, alone in zip(means[side.name], single, strict=True)]
        rows.append([side.name, Spread.of(means[side.name]).show(), f"{speeds:g}", Spread.of(shares).show(".3f")])
    headers = ["side", "samples/s", "sum of speeds", "share of the sum reached"]
    write_block("slow_worker", markdown(headers, rows) + footnote(results), module="slow_worker")


if __name__ == "__main__":
    main()
