"""``manyhands simulate``: play what cannot be waited for. ``protocol``: parameter servers under faults."""

from __future__ import annotations

from typing import Any

from cyclopts import App

from manyhands.commands.options import DEFAULT_OUTPUT, Output
from manyhands.commands.output import format_seconds, print_json, say
from manyhands.errors import UsageError
from manyhands.plan.protocol.campaign import Outcome, run_seed, run_seeds

__all__ = ["simulate"]

simulate = App(name="simulate", help="Play runs under a virtual clock and network.")
BROKEN = 3


@simulate.command
def protocol(
    *,
    seeds: int = 10_000,
    first: int = 0,
    seconds: float = 600.0,
    output: Output = DEFAULT_OUTPUT,
) -> int:
    """Try replicated parameter servers under deaths, pauses, partitions, lost and doubled messages, slow clocks.

    After every event the invariants are checked. A single seed that fails is shown event by event.

    Parameters
    ----------
    seeds
        How many runs.
    first
        The seed of the first run; the others count up from it.
    seconds
        Begin no more runs after this time.
    """
    for name, value, least in (("seeds", seeds, 1), ("first", first, 0), ("seconds", seconds, 0)):
        if value < least:
            raise UsageError(f"--{name} {value}: valid: at least {least}.")
    outcome = run_seeds(first, seeds, seconds)
    if not output.quiet:
        if seeds == 1 and outcome.failures:
            trace: list[str] = []
            world, _ = run_seed(first, trace)
            say("\n".join([str(world.scenario), *trace]))
        _print_outcome(outcome, seeds)
    if output.json:
        print_json(_result(outcome, first, seeds))
    return BROKEN if outcome.failures else 0


def _print_outcome(outcome: Outcome, wanted: int) -> None:
    if outcome.seeds < wanted:
        why = "enough have failed" if outcome.failures else "the time is up"
        say(f"{outcome.seeds:,} of {wanted:,} seeds: {why}")
    rate = outcome.seeds / outcome.seconds
    cores = "1 core" if outcome.processes == 1 else f"{outcome.processes} cores"
    say(
        f"{outcome.seeds:,} seeds in {format_seconds(outcome.seconds)} · {rate:,.0f} seeds/s on {cores} · "
        f"{outcome.events:,} events, the invariants checked after each"
    )
    counts = outcome.counts
    faults = sum(number for word, number in counts.items() if " " in word)
    say(
        f"{faults:,} faults · {counts['promotions']:,} backups promoted · {counts['rollbacks']:,} times back to a "
        f"checkpoint · {len(outcome.failures):,} seeds failed"
    )
    for failure in outcome.failures:
        say(f"seed {failure.seed}: {failure.what}")
        say(f"  replay: manyhands simulate protocol --seeds 1 --first {failure.seed}")


def _result(outcome: Outcome, first: int, wanted: int) -> dict[str, Any]:
    return {
        "status": "failed" if outcome.failures else "finished",
        "first": first,
        "wanted": wanted,
        "seeds": outcome.seeds,
        "seconds": outcome.seconds,
        "seeds_per_s": outcome.seeds / outcome.seconds,
        "processes": outcome.processes,
        "events": outcome.events,
        "counts": dict(outcome.counts),
        "failures": [{"seed": failure.seed, "what": failure.what} for failure in outcome.failures],
    }
