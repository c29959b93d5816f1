"""``manyhands explain RUN``: what ran, the proof that each sample counted once, who died, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.commands.find_run import find_run
from manyhands.commands.options import DEFAULT_OUTPUT, Output
from manyhands.commands.output import format_bill, format_seconds, format_time, print_json, say
from manyhands.commands.runs import Overview, read_overview
from manyhands.core.ledger import EpochProof, Proof
from manyhands.observe.events import read_events
from manyhands.train.ledger_file import read_ledger
from manyhands.train.progress import format_metrics

__all__ = ["explain"]

TROUBLE = ("worker_died", "worker_hung")
LEDGER_IS_WRONG = 3


def explain(run: str, /, *, output: Output = DEFAULT_OUTPUT) -> int:
    """Explain a run: what ran, the proof of its ledger, deaths and recoveries, the bill.

    Parameters
    ----------
    run
        A run folder, its name or its number (see: manyhands runs).
    """
    folder = find_run(run)
    overview = read_overview(folder)
    proof = read_ledger(folder.ledger).verify()
    events = read_events(folder.events)
    if not output.quiet:
        _print_overview(overview)
        for line in [*proof_lines(proof, is_done=overview.status == "done"), *trouble_lines(events)]:
            say(line)
        say(f"bill: {format_bill(overview.bill)}")
    if output.json:
        trouble = [event for event in events if event["event"] in (*TROUBLE, "recovered")]
        print_json({**overview.to_dict(), "proof": proof.to_dict(), "trouble": trouble})
    return 0 if proof_holds(proof, is_done=overview.status == "done") else LEDGER_IS_WRONG


def _print_overview(overview: Overview) -> None:
    say(f"{overview.name}: {overview.status} at step {overview.step}")
    for line in overview.lines():
        say(f"  {line}")
    if overview.metrics:
        say(f"  {format_metrics(overview.metrics)}")


def proof_holds(proof: Proof, *, is_done: bool) -> bool:
    """Whether nothing was lost or counted twice; the last epoch of a run that goes on may be incomplete."""
    complete = proof.epochs if is_done else proof.epochs[:-1]
    return all(epoch.exact for epoch in complete) and all(epoch.more_than_once == 0 for epoch in proof.epochs)


def proof_lines(proof: Proof, *, is_done: bool) -> list[str]:
    """The verdict of the ledger in sentences: equal epochs in one line, each exception in a line of its own."""
    if not proof.epochs:
        return ["ledger: empty; no epoch was begun"]
    lines: list[str] = []
    plain = Counter(epoch.samples for epoch in proof.epochs if epoch.exact and not epoch.skipped)
    for samples, epochs in plain.items():
        which = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        lines.append(f"ledger: {which}: each of {samples:,} samples counted exactly once")
    for epoch in proof.epochs:
        if epoch.exact and not epoch.skipped:
            continue
        is_open = not is_done and epoch is proof.epochs[-1] and not epoch.more_than_once
        lines.append(f"ledger: {_open_line(epoch) if is_open and epoch.never else epoch}")
    if not proof_holds(proof, is_done=is_done):
        lines.append("ledger: NOT EXACT: samples were lost or counted twice, see the epochs above")
    return lines


def _open_line(epoch: EpochProof) -> str:
    skipped = "".join(f" · {count:,} skipped ({reason})" for reason, count in epoch.skipped.items())
    return (
        f"epoch {epoch.epoch} is not complete: {epoch.once:,} of {epoch.samples:,} samples counted once so far, "
        f"{epoch.never:,} to come{skipped}"
    )


def trouble_lines(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Deaths and hangs, each with the time until the run went on."""
    lines: list[str] = []
    deaths, waits = 0, []
    for event in events:
        moment = format_time(event.get("time", 0.0))
        worker = f"worker-{event.get('worker', '?')}"
        match event["event"]:
            case "worker_died":
                deaths += 1
                lines.append(
                    f"  {moment}  {worker} (pid {event.get('pid')}) died: {event.get('how')} "
                    f"at step {event.get('step')}, in phase {event.get('phase')}"
                )
            case "worker_hung":
                lines.append(f"  {moment}  {event.get('text') or f'{worker} hung'}")
            case "recovered":
                waits.append(float(event.get("seconds", 0.0)))
                lines.append(f"  {moment}  the run went on after {format_seconds(waits[-1])}")
    if not lines:
        return ["deaths: none"]
    longest = f", longest stall {format_seconds(max(waits))}" if waits else ""
    return [f"deaths: {deaths}, recoveries: {len(waits)}{longest}", *lines]
