"""Many seeds over all cores: what held, what failed, how fast. Seeds are shared out in batches to child processes."""

from __future__ import annotations

import math
import select
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from manyhands.engine.channel import Channel
from manyhands.engine.local import Process, cores, spawn
from manyhands.errors import EngineError
from manyhands.plan.protocol.scenario import make_scenario
from manyhands.plan.protocol.world import World

__all__ = ["Failure", "Outcome", "run_seed", "run_seeds", "work"]

BATCH = 50
ENOUGH_FAILURES = 10
HUNG_S = 120.0  # a batch takes less than a second; machines may be busy
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed whose run broke a promise, and which one."""

    seed: int
    what: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a number of seeds gave."""

    seeds: int = 0
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Promotions, rollbacks, checkpoints, and faults by kind."""
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    processes: int = 1

    def add(self, seeds: int, events: int, counts: dict[str, int], failures: list[Any]) -> None:
        """Count a batch."""
        self.seeds += seeds
        self.events += events
        self.counts.update(counts)
        self.failures += [Failure(*failure) for failure in failures]


def run_seed(seed: int, trace: list[str] | None = None) -> tuple[World, Failure | None]:
    """One run; ``trace`` gets a line for each event and action."""
    world = World(make_scenario(seed), trace)
    try:
        world.run()
    except Exception as error:  # a machine that breaks is as wrong as one that breaks a promise
        return world, Failure(seed, f"{type(error).__name__}: {error}")
    return world, None


def run_seeds(first: int, count: int, seconds: float = math.inf, processes: int | None = None) -> Outcome:
    """Run the seeds from ``first``, for at most ``seconds``, until enough of them have failed."""
    begin = time.monotonic()
    batches = _batches(first, count)
    outcome = Outcome(processes=min(processes or cores(), math.ceil(count / BATCH)))
    # A little work is done before a child has started.
    run = _run_here if outcome.processes == 1 else _run_in_children
    run(batches, begin + seconds, outcome)
    outcome.seconds = time.monotonic() - begin
    return outcome


def work(channel: Channel) -> None:
    """What a child does: batches, until the caller closes the channel."""
    while (message := channel.receive(HUNG_S)) is not None:
        channel.send("batch", _run_batch(**message.body))


def _batches(first: int, count: int) -> Iterator[dict[str, int]]:
    for start in range(first, first + count, BATCH):
        yield {"first": start, "count": min(BATCH, first + count - start)}


def _run_batch(first: int, count: int) -> dict[str, Any]:
    events, counts, failures = 0, Counter[str](), []
    for seed in range(first, first + count):
        world, failure = run_seed(seed)
        events += world.events
        counts.update(world.counts)
        if failure is not None:
            failures.append((failure.seed, failure.what))
    return {"seeds": count, "events": events, "counts": dict(counts), "failures": failures}


def _run_here(batches: Iterator[dict[str, int]], until: float, outcome: Outcome) -> None:
    for batch in batches:
        outcome.add(**_run_batch(**batch))
        if len(outcome.failures) >= ENOUGH_FAILURES or time.monotonic() >= until:
            return


def _run_in_children(batches: Iterator[dict[str, int]], until: float, outcome: Outcome) -> None:
    children: list[Process] = []
    try:
        for _ in range(outcome.processes):
            children.append(spawn(f"{__name__}:work"))
        busy = {child.channel.fileno(): child for child in children if _give(child, batches)}
        while busy:
            for fd in _answered(list(busy)):
                answer = busy[fd].channel.receive(0)
                assert answer is not None
                outcome.add(**answer.body)
                is_over = len(outcome.failures) >= ENOUGH_FAILURES or time.monotonic() >= until
                if is_over or not _give(busy[fd], batches):
                    del busy[fd]
    finally:
        for child in children:
            child.signal(9)  # it has nothing to lose
            child.wait(END_S)
            child.close()


def _give(child: Process, batches: Iterator[dict[str, int]]) -> bool:
    batch = next(batches, None)
    if batch is not None:
        child.channel.send("batch", batch)
    return batch is not None


def _answered(fds: list[int]) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(HUNG_S * 1000)]
    if not ready:
        raise EngineError(
            f"no simulated run has ended for {HUNG_S:.0f} s: a machine runs in a circle within one event."
        )
    return ready
