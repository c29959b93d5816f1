"""What safety and visibility cost: each feature on against off, in turns, by the mean rate of whole runs.

    python -m benchmarks.overheads --pairs 5 --seconds 30 --cases checkpoints,view,order,kills

The mean counts here, not the median of windows, because a checkpoint every ten seconds is in few windows. The cost is
1 - on / off, so a negative figure is noise in our favour. Beside it stands what the noise of the machine hides: how
much more processor time the caller's process took with the feature, as a share of all processors.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import Side, footnote, ours, run_rounds
from benchmarks.table import Spread, markdown, paired_ratio, write_block


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one side of a case differs from a plain run.

    Only arguments, never environment variables: a switch that does not exist must fail, not measure on against on.
    """

    fit: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    terminal: bool = False
    lanes: int = 0  # 0: as many as workers
    kill_every_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A feature, on and off, and the model on which it is dearest."""

    title: str
    model: str
    on: Setting
    off: Setting


CASES = {
    "checkpoints": Case(
        title="a checkpoint every 10 s",
        model="wide",
        on=Setting(fit={"checkpoint_every_s": 10}),
        off=Setting(fit={"checkpoint_every_s": None}),
    ),
    "view": Case(
        title="event log and live view",
        model="mlp",
        on=Setting(fit={"progress": "live"}, terminal=True),
        off=Setting(fit={"progress": "quiet", "events": False}),
    ),
    "order": Case(
        title="lanes kept apart and summed in lane order",
        # The same pieces of the batch on both sides; off, a worker adds up its own pieces as autograd brings them, and
        # the result depends on which worker had which. Not the wide model: only lanes that are kept apart can leave
        # factors of its gradients, so that there it is the order that is faster.
        model="mlp",
        on=Setting(lanes=4),
        off=Setting(lanes=2, trainer={"accumulate": 2}),
    ),
    "kills": Case(
        title="kill -9 of a worker every 10 s",
        model="mlp",
        on=Setting(kill_every_s=10),
        off=Setting(),
    ),
}


def make_side(case: Case, setting: Setting, label: str, workers: int, seconds: float) -> Side:
    return ours(
        f"{case.title}: {label}",
        f"--model={case.model}",
        f"--workers={workers}",
        f"--seconds={seconds}",
        f"--lanes={setting.lanes}",
        f"--kill-every-s={setting.kill_every_s}",
        f"--trainer={json.dumps(setting.trainer)}",
        f"--fit={json.dumps(setting.fit)}",
        terminal=setting.terminal,
    )


def measure(case: Case, workers: int, pairs: int, seconds: float) -> str:
    on = make_side(case, case.on, "on", workers, seconds)
    off = make_side(case, case.off, "off", workers, seconds)
    results = run_rounds([on, off], pairs)
    with_it, without = ([float(run["mean_samples_per_s"]) for run in results[side.name]] for side in (on, off))
    ratio = paired_ratio(with_it, without)
    cost = Spread(1 - ratio.median, 1 - ratio.high, 1 - ratio.low)
    shares, shares_without = ([float(run["caller_share"]) for run in results[side.name]] for side in (on, off))
    processor = Spread.of([a - b for a, b in zip(shares, shares_without, strict=True)])
    row = [f"{case.title} ({case.model})", Spread.of(with_it).show(), Spread.of(without).show(), cost.show(".1%")]
    headers = ["feature (model)", "samples/s with", "samples/s without", "cost", "of all processors, in the caller"]
    return markdown(headers, [[*row, processor.show(".2%")]]) + footnote(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    for name in options.cases.split(","):
        table = measure(CASES[name], options.workers, options.pairs, options.seconds)
        write_block(f"overheads {name}", table, module="overheads")


if __name__ == "__main__":
    main()
