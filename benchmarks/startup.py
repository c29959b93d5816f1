"""Seconds from `python script.py`, and from the call of `fit`, to the first committed step.

    python -m benchmarks.startup --pairs 5 --workers 2,4

DDP is started in two ways: all ranks at once by a launcher without torch, and by torch.multiprocessing.spawn.
"""

import argparse

from benchmarks.measure import Side, ddp, footnote, ours, run_rounds
from benchmarks.table import Spread, markdown, write_block

STEPS = "--steps=5"


def sides_for(workers: int) -> list[Side]:
    count = f"--workers={workers}"
    return [
        ours(f"manyhands, {workers} workers", count, STEPS),
        ddp(f"DDP, {workers} workers, ranks started at once", count, STEPS),
        ddp(f"DDP, {workers} workers, multiprocessing.spawn", count, STEPS, "--launcher=spawn"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", default="2,4")
    options = parser.parse_args()
    sides = [side for count in options.workers.split(",") for side in sides_for(int(count))]
    results = run_rounds(sides, options.pairs)
    rows = []
    for side in sides:
        runs = results[side.name]
        script = Spread.of([run["start_to_first_step_s"] for run in runs]).show(".2f")
        calls = [run["fit_to_first_step_s"] for run in runs if "fit_to_first_step_s" in run]
        rows.append([side.name, script, Spread.of(calls).show(".2f") if calls else "–"])
    headers = ["side", "process start → first step, s", "fit called → first step, s"]
    write_block("startup", markdown(headers, rows) + footnote(results), module="startup")


if __name__ == "__main__":
    main()
