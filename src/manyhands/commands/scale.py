"""``manyhands scale RECIPE``: speed-up, throughput, latency and the bill per worker count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.commands.options import DEFAULT_OUTPUT, Output, parse_settings, parse_worker_counts, set_option
from manyhands.commands.output import format_bill, print_json, print_table, say
from manyhands.engine.local import cores
from manyhands.errors import UsageError
from manyhands.plan.scale import Measurement, Plan, check_plot, choose_lanes, measure, plot
from manyhands.recipes import get, with_settings
from manyhands.train.receipt import format_traffic, format_updates

__all__ = ["scale"]

COLUMNS = ("sync", "workers", "speed-up", "samples/s", "(range)", "step p50", "step p95", "bill")
NUMBERS = COLUMNS[1:-1]
LATENCY_NOTE = (
    "step p50, p95: in a run of its own, one step at a time with the caller waiting for it (local: one round)"
)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What is measured."""

    workers: str = "1,2,4"
    "The counts to compare, with commas."
    sync: str = "allreduce"
    "How copies agree; several with commas."
    layout: str = "whole"
    "How one copy of the model lies over devices."
    engine: str = "local"
    "Where processes come from."
    steps: int = 200
    "Steps to time at each count."
    repeats: int = 3
    "How often; the table has the median and the range."
    batch_size: int | None = None
    "The global batch."
    lanes: int | None = None
    "Slices of the global batch, the same at every count."
    seed: int = 0
    "Everything random follows from it."
    settings: Annotated[tuple[str, ...], set_option] = ()
    plot_file: Annotated[Path | None, Parameter(name="--plot")] = None
    "Draw the result into this file."


DEFAULT_SCALE = ScaleOptions()


def scale(recipe: str, /, *, options: ScaleOptions = DEFAULT_SCALE, output: Output = DEFAULT_OUTPUT) -> int:
    """Measure a recipe at several worker counts.

    Parameters
    ----------
    recipe
        A built-in name (see: manyhands recipes) or a .py file that defines recipe().
    """
    settings = parse_settings(options.settings)
    if options.batch_size is not None:
        settings["batch_size"] = options.batch_size
    job, file = with_settings(get(recipe), settings), options.plot_file
    plan = _plan(options, job.batch_size)
    if file is not None and not file.resolve().parent.is_dir():
        raise UsageError(f"--plot {file}: the folder does not exist; valid: a file name in a folder that does.")
    if not output.quiet:
        _print_header(job.name, job.batch_size, plan)
    if file is not None:
        check_plot()
    rows = measure(job, plan) if output.quiet else measure(job, plan, say)
    if not output.quiet:
        _print_result(rows)
    if file is not None:
        plot(rows, file)
        if not output.quiet:
            say(f"plot: {file}")
    if output.json:
        print_json(_result(job.name, plan, rows))
    return 0


def _plan(options: ScaleOptions, batch_size: int) -> Plan:
    counts = parse_worker_counts(options.workers)
    return Plan(
        workers=counts,
        syncs=_syncs(options.sync),
        lanes=choose_lanes(counts, batch_size) if options.lanes is None else options.lanes,
        steps=options.steps,
        repeats=options.repeats,
        layout=options.layout,
        engine=options.engine,
        seed=options.seed,
    )


def _syncs(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"--sync {text!r}: valid: names with commas, such as allreduce,async.")
    return list(dict.fromkeys(names))


def _print_header(name: str, batch_size: int, plan: Plan) -> None:
    say(
        f"{name} · batch {batch_size} global in {plan.lanes} lanes at every count · "
        f"{plan.repeats} × {plan.steps} steps each"
    )
    if max(plan.workers) > cores():
        say(
            f"note: {max(plan.workers)} workers on {cores()} cores: "
            f"those beyond {cores()} stand by, unless the work mostly waits"
        )


def _print_result(rows: list[Measurement]) -> None:
    cells = [
        (
            row.sync,
            str(row.workers),
            f"{row.speedup:.2f}×",
            f"{row.samples_per_s:,.0f}",
            f"({row.samples_per_s_range[0]:,.0f} to {row.samples_per_s_range[1]:,.0f})",
            f"{row.latency_p50_ms:.2f} ms",
            f"{row.latency_p95_ms:.2f} ms",
            format_bill(row.bill),
        )
        for row in rows
    ]
    say()
    print_table(COLUMNS, cells, right=NUMBERS)
    say(LATENCY_NOTE)
    for row in rows:
        told = [format_updates(row.updates)] if row.updates else []
        told += [format_traffic(row.bytes)] if row.bytes else []
        if told:
            say(f"{row.sync} with {row.workers}: {' · '.join(told)}")
    for sync in dict.fromkeys(row.sync for row in rows):
        digests = [row.digest for row in rows if row.sync == sync]
        if len(digests) > 1:
            same = len(set(digests)) == 1
            say(f"weights after {sync}: {'identical' if same else 'not identical'} at every worker count")


def _result(name: str, plan: Plan, rows: list[Measurement]) -> dict[str, Any]:
    return {
        "status": "finished",
        "recipe": name,
        "lanes": plan.lanes,
        "cores": cores(),
        "latency": LATENCY_NOTE,
        "oversubscribed": max(plan.workers) > cores(),
        "rows": [row.to_dict() for row in rows],
    }
