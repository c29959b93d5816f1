"""``manyhands explain RUN``: what ran, the proof that each sample counted once, who died, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.commands.find_run import find_run
from manyhands.commands.options import DEFAULT_OUTPUT, Output
from manyhands.commands.output import format_bill, format_measures, format_seconds, format_time, print_json, say
from manyhands.commands.runs import Overview, read_overview
from manyhands.core.ledger import EpochProof, Proof
from manyhands.core.order import epoch_order, order_digest
from manyhands.observe.events import read_events
from manyhands.train.ledger_file import read_ledger
from manyhands.train.receipt import format_traffic, format_updates

__all__ = ["explain"]

DEATHS = ("worker_died", "server_died")
TROUBLE = (*DEATHS, "worker_hung", "server_hung", "recovered", "rolled_back", "checkpoint_failed", "checkpoint_damaged")
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
    orders = check_orders(proof, overview.record)
    events = read_events(folder.events)
    is_done = overview.status == "finished"
    if not output.quiet:
        for line in [*overview_lines(overview), *proof_lines(proof, is_done=is_done), *orders, *trouble_lines(events)]:
            say(line)
        if updates := overview.record.get("updates"):
            say(f"updates: {updates['applied']:,} applied · {format_updates(updates)}")
        say(f"bill: {format_bill(overview.bill)}")
        if overview.bytes:
            say(f"bytes: {format_traffic(overview.bytes)}")
    if output.json:
        trouble = [event for event in events if event["event"] in TROUBLE]
        told = {"bill": overview.bill, "bytes": overview.bytes, "proof": proof.to_dict(), "trouble": trouble}
        print_json({**overview.to_dict(), **told})
    return 0 if proof_holds(proof, is_done=is_done) and not orders else LEDGER_IS_WRONG


def check_orders(proof: Proof, record: Mapping[str, Any]) -> list[str]:
    """The ledger counts positions in the order of an epoch. Make the orders again: they must be those of the run, and
    each has every sample once."""
    if "shuffle" not in record:
        return []
    wrong = []
    for epoch in proof.epochs:
        order = epoch_order(record["seed"], epoch.epoch, epoch.samples, record["shuffle"])
        if order_digest(order) != epoch.order_digest:
            wrong.append(
                f"ledger: NOT EXACT: the order of epoch {epoch.epoch + 1} is not that of seed {record['seed']}"
            )
    return wrong


def overview_lines(overview: Overview) -> list[str]:
    """What ran, and how it ended."""
    record = overview.record
    lines = [f"{overview.path.name}: {overview.recipe} · {overview.status} at step {overview.steps}"]
    if overview.status == "unreadable":
        return lines
    low, high = record["workers"]
    workers = str(low) if low == high else f"{low} to {high}"
    lines += [
        f"  {record['model']} · {record['parameters']:,} parameters · {record['optimizer']} · loss {record['loss']}",
        f"  {record['samples']:,} samples × {record['epochs']} epochs · batch {record['batch_size']} global in "
        f"{record['lanes']} lanes · seed {record['seed']}",
        f"  {workers} workers, intra-op threads {record['threads']} · sync {record['sync']}"
        + (f" · codec {codec}" if (codec := record.get("codec")) else ""),
    ]
    recipe = record.get("recipe")
    if isinstance(recipe, dict) and recipe.get("settings"):
        lines.append("  settings: " + " ".join(f"{key}={value}" for key, value in recipe["settings"].items()))
    if measures := format_measures(overview.measures):
        lines.append(f"  last: {measures}")
    if overview.status not in ("finished", "running"):
        lines.append(f"  go on with: manyhands resume {overview.path}")
    return lines


def proof_holds(proof: Proof, *, is_done: bool) -> bool:
    """Whether nothing was lost or counted twice; the last epoch of a run that goes on may be incomplete."""
    complete = proof.epochs if is_done else proof.epochs[:-1]
    doubled = any(epoch.more_than_once or epoch.contradicted for epoch in proof.epochs)
    return all(epoch.exact for epoch in complete) and not doubled


def proof_lines(proof: Proof, *, is_done: bool) -> list[str]:
    """The verdict of the ledger: equal epochs in one line, each other one in a line of its own."""
    if not proof.epochs:
        return ["ledger: empty; nothing was committed"]
    lines: list[str] = []
    plain = Counter(epoch.samples for epoch in proof.epochs if epoch.exact and not epoch.skipped)
    for samples, epochs in plain.items():
        which = "1 epoch" if epochs == 1 else f"each of {epochs} epochs"
        lines.append(f"ledger: in {which}, each of {samples:,} samples counted exactly once")
    for epoch in proof.epochs:
        if not epoch.exact or epoch.skipped:
            is_open = not is_done and epoch is proof.epochs[-1]
            lines.append(f"ledger: {_describe_epoch(epoch, is_open=is_open)}")
    if steps := sum(epoch.witnessed for epoch in proof.epochs if not epoch.contradicted):
        lines.append(f"ledger: confirmed by the servers' log, entry by entry, for {steps:,} batches")
    if not proof_holds(proof, is_done=is_done):
        lines.append("ledger: NOT EXACT: samples were lost or counted twice, see the epochs above")
    return lines


def _describe_epoch(epoch: EpochProof, *, is_open: bool) -> str:
    # Counted from 1 for people, as in the live view.
    parts = [f"epoch {epoch.epoch + 1}: {epoch.once:,} of {epoch.samples:,} samples counted once"]
    parts += [f"{count:,} skipped ({reason})" for reason, count in epoch.skipped.items()]
    if epoch.never:
        parts.append(f"{epoch.never:,} {'still to come' if is_open else 'never'}")
    if epoch.more_than_once:
        parts.append(f"{epoch.more_than_once:,} more than once")
    if epoch.contradicted:
        parts.append(f"{epoch.contradicted:,} effects more or fewer in the servers' log")
    return " · ".join(parts)


def trouble_lines(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Deaths, hangs and failed checkpoints, and the time until the run went on."""
    trouble = [event for event in events if event["event"] in TROUBLE]
    if not trouble:
        return ["deaths: none"]
    deaths = sum(event["event"] in DEATHS for event in trouble)
    stalls = [float(event["seconds"]) for event in trouble if event["event"] == "recovered"]
    longest = f", longest stall {format_seconds(max(stalls))}" if stalls else ""
    head = f"deaths: {deaths}, recoveries: {len(stalls)}{longest}"
    return [head, *(f"  {format_time(event['time'])}  {_describe_event(event)}" for event in trouble)]


def _describe_event(event: Mapping[str, Any]) -> str:
    if "text" in event:
        return str(event["text"])
    if event["event"] == "recovered":
        return f"the run went on {format_seconds(float(event['seconds']))} later"
    role = "server" if "server" in event else "worker"
    return (
        f"{role} {event.get(role)} (pid {event.get('pid')}) died: {event.get('how')}, "
        f"at step {event.get('step')} in phase {event.get('phase')}"
    )
