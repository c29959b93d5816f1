"""``manyhands scale RECIPE``: speed-up, throughput, latency and the bill per worker count."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.commands.options import (
    DEFAULT_OUTPUT,
    Output,
    parse_settings,
    parse_worker_counts,
    set_option,
)
from manyhands.commands.output import format_bill, print_json, print_table, say
from manyhands.engine.local import cores
from manyhands.errors import UsageError
from manyhands.plan.scale import Measurement, Plan, choose_lanes, measure, plot
from manyhands.recipes import get, with_settings

__all__ = ["scale"]

COLUMNS = ("sync", "workers", "speed-up", "samples/s", "(range)", "step p50", "step p95", "bill")
NUMBERS = COLUMNS[1:-1]
LATENCY_NOTE = "step p50, p95: in a run of its own, one step at a time with the caller waiting for it"


def scale(
    recipe: str,
    /,
    *,
    workers: str = "1,2,4",
    sync: str = "allreduce",
    layout: str = "whole",
    engine: str = "local",
    steps: int = 200,
    repeats: int = 3,
    batch_size: int | None = None,
    lanes: int | None = None,
    seed: int = 0,
    settings: Annotated[tuple[str, ...], set_option] = (),
    plot_file: Annotated[Path | None, Parameter(name="--plot")] = None,
    output: Output = DEFAULT_OUTPUT,
) -> int:
    """Measure a recipe at several worker counts.

    Parameters
    ----------
    recipe
        A built-in name (see: manyhands recipes) or a .py file that defines recipe().
    workers
        The counts to compare, with commas.
    sync
        How copies agree; several with commas.
    layout
        How one copy of the model lies over devices.
    engine
        Where processes come from.
    steps
        Steps to time at each count.
    repeats
        How often; the table has the median and the range.
    batch_size
        The global batch.
    lanes
        Slices of the global batch, the same at every count.
    seed
        Everything random follows from it.
    plot_file
        Draw the result into this file.
    """
    chosen = parse_settings(settings) | ({} if batch_size is None else {"batch_size": batch_size})
    job = with_settings(get(recipe), chosen)
    counts = parse_worker_counts(workers)
    plan = Plan(
        workers=counts,
        syncs=_syncs(sync),
        lanes=lanes or choose_lanes(counts, job.batch_size),
        steps=steps,
        repeats=repeats,
        layout=layout,
        engine=engine,
        seed=seed,
    )
    if plot_file is not None and not plot_file.resolve().parent.is_dir():
        raise UsageError(f"--plot {plot_file}: the folder does not exist; valid: a file name in a folder that does.")
    if not output.quiet:
        _print_header(job.name, job.batch_size, plan)
    rows = measure(job, plan) if output.quiet else measure(job, plan, say)
    if plot_file is not None:
        plot(rows, plot_file)
    if not output.quiet:
        _print_result(rows, plot_file)
    if output.json:
        print_json(_result(job.name, plan, rows))
    return 0


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


def _print_result(rows: list[Measurement], plot_file: Path | None) -> None:
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
    for sync in dict.fromkeys(row.sync for row in rows):
        same = len({row.digest for row in rows if row.sync == sync}) == 1
        say(f"weights after {sync}: {'identical' if same else 'not identical'} at every worker count")
    if plot_file is not None:
        say(f"plot: {plot_file}")


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
