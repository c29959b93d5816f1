"""What happens in one simulated run: its size, its network and its faults, all from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from manyhands.core.messages import Timing
from manyhands.core.policies import Policy, make_policy

__all__ = ["CALM_S", "KINDS", "TIMING", "Fault", "Scenario", "make_scenario"]

TIMING = Timing(beat_s=0.3, lease_s=0.9, drift=0.2, retry_s=0.5, reading_s=1.5, transfer_s=0.9)
CALM_S = 120.0
"""How long a run may go on after its last fault before it counts as hung."""
POLICIES: tuple[tuple[str, dict[str, int]], ...] = (
    ("async", {}),
    ("async", {"oldest": 1}),
    ("plain", {}),
    ("scaled", {}),
    ("compensated", {}),
    ("bounded", {"staleness": 0}),
    ("bounded", {"staleness": 2}),
    ("rennala", {"updates": 2}),
    ("backup", {"spare": 1}),
)
KINDS = (
    "kill primary",
    "kill backup",
    "kill pair",
    "kill pair",  # twice: nothing else makes a run go back so surely
    "kill worker",
    "pause primary",
    "pause server",
    "pause worker",
    "pause coordinator",
    "cut primary from coordinator",
    "cut server from coordinator",
    "cut primary from backup",
    "cut worker from server",
    "cut server from all",
    "cut half from all",
    "mute process from process",
    "mute server from all",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something goes wrong ``at`` a time; who it meets is decided then. ``seconds``: until it is over, or until a
    process that was killed has a successor."""

    at: float
    kind: str
    seconds: float
    noticed: bool
    """Whether the coordinator hears of a death from the kernel, or only by silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run. From ``calm_at`` on nothing goes wrong any more."""

    seed: int
    shards: int
    servers: int
    workers: int
    chunks: int
    checkpoint_every: int
    policy: Policy
    speculate_after_s: float | None
    compute_s: float
    loss: float
    duplication: float
    straggling: float
    """How many of the messages take up to 300 times longer than the others."""
    faults: tuple[Fault, ...]
    calm_at: float


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed, always the same."""
    rng = random.Random(seed)
    name, settings = rng.choice(POLICIES)
    calm_at = rng.uniform(2.0, 6.0)
    faults = [
        Fault(rng.uniform(0.1, calm_at), rng.choice(KINDS), rng.choice((0.2, 0.6, 1.2, 2.0, 3.0)), rng.random() < 0.5)
        for _ in range(rng.choice((0, 1, 2, 4, 6, 8)))
    ]
    return Scenario(
        seed=seed,
        shards=rng.choice((1, 2, 2, 3)),
        servers=rng.choice((2, 3, 3, 4)),
        workers=rng.choice((1, 2, 3)),
        chunks=rng.choice((6, 10, 15)),
        checkpoint_every=rng.choice((3, 5, 8)),
        policy=make_policy(name, **settings),
        speculate_after_s=rng.choice((None, 0.3)),
        compute_s=rng.choice((0.05, 0.2, 0.5)),
        loss=rng.choice((0.0, 0.0, 0.05, 0.2)),
        duplication=rng.choice((0.0, 0.05, 0.2)),
        straggling=rng.choice((0.0, 0.05, 0.15, 0.3)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        calm_at=calm_at,
    )
