"""Samples per second of manyhands against DDP over gloo, and against the bare loop for one worker.

    python -m benchmarks.vs_ddp --pairs 5 --models mlp,wide,cnn --workers 1,2,4 --seconds 6

For each model, every side runs once per round, ours directly before its peers, so that a machine that gets slower or
faster meets them all. The global batch is 128. DDP and the bare loop with two threads are measured twice: as they are
usually written, and with fused Adam, which is what manyhands takes by itself.
"""

import argparse
import statistics
from dataclasses import dataclass

from benchmarks.measure import Result, Side, bare, ddp, footnote, ours, run_rounds
from benchmarks.table import Spread, markdown, paired_ratio, write_block

FUSED = ", fused Adam"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Ours and the peer it is measured against, at one number of workers."""

    workers: int
    mine: Side
    theirs: Side


def make_pairs(model: str, workers: int, seconds: float) -> list[Pair]:
    """One worker meets the bare loop at one and at two threads; several workers meet DDP, at one thread each, as it is
    usually written (torch.optim.Adam as it comes) and tuned (the fused Adam that manyhands takes by itself)."""
    options = (f"--model={model}", f"--workers={workers}", f"--seconds={seconds}")
    mine = ours(f"manyhands, {workers} × 1", *options, "--threads=1")
    if workers == 1:
        peers = [
            bare(f"bare loop, 1 thread{FUSED}", *options, "--threads=1", "--fused=1"),
            bare("bare loop, 2 threads", *options, "--threads=2", "--fused=0"),
            bare(f"bare loop, 2 threads{FUSED}", *options, "--threads=2", "--fused=1"),
        ]
    else:
        peers = [
            ddp(f"DDP, {workers} workers", *options, "--threads=1", "--fused=0"),
            ddp(f"DDP, {workers} workers{FUSED}", *options, "--threads=1", "--fused=1"),
        ]
    return [Pair(workers=workers, mine=mine, theirs=peer) for peer in peers]


def rates(results: list[Result]) -> list[float]:
    return [float(result["samples_per_s"]) for result in results]


def row(workers: str, mine: list[float], peer: str, theirs: list[float]) -> list[str]:
    ratio = paired_ratio(mine, theirs).show(".2f")
    return [workers, Spread.of(mine).show(), peer, Spread.of(theirs).show(), ratio]


def one_process_rows(pairs: list[Pair], results: dict[str, list[Result]]) -> list[list[str]]:
    """Two workers against the best one process can do: two threads as usually written, or one of our own workers; and
    two threads with fused Adam."""
    mine = [pair.mine.name for pair in pairs if pair.workers == 2]
    single = {side for pair in pairs if pair.workers == 1 for side in (pair.mine.name, pair.theirs.name)}
    if not mine or not single:
        return []
    usual = {name for name in single if not name.endswith(FUSED)}
    best = [max(names, key=lambda name: statistics.median(rates(results[name]))) for names in (usual, single)]
    return [
        row("2 × 1", rates(results[mine[0]]), f"best of one process{also}: {name}", rates(results[name]))
        for name, also in zip(best, ("", FUSED), strict=True)
    ]


def measure(model: str, workers: list[int], rounds: int, seconds: float) -> str:
    pairs = [pair for count in workers for pair in make_pairs(model, count, seconds)]
    sides = {side.name: side for pair in pairs for side in (pair.mine, pair.theirs)}
    results = run_rounds(list(sides.values()), rounds)
    rows = [
        row(
            f"{pair.workers} × 1",
            rates(results[pair.mine.name]),
            pair.theirs.name,
            rates(results[pair.theirs.name]),
        )
        for pair in pairs
    ]
    headers = ["workers × threads", "manyhands, samples/s", "against", "its samples/s", "ratio"]
    return markdown(headers, [*rows, *one_process_rows(pairs, results)]) + footnote(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", default="mlp,wide,cnn")
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    workers = [int(count) for count in options.workers.split(",")]
    for model in options.models.split(","):
        write_block(f"vs_ddp {model}", measure(model, workers, options.pairs, options.seconds), module="vs_ddp")


if __name__ == "__main__":
    main()
