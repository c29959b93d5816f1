"""What a server does with an update that arrives: apply it (how strongly), hold it back, or drop it as too stale.

One rule shape: ``policy.judge(staleness, moment)``. The staleness of an update is the number of steps that the
server has taken since its worker read the parameters. A step may consist of several updates: ``Apply(step=False)``
adds an update to the sum, and the next ``Apply(step=True)`` takes the step with the whole sum.

A policy has no memory; what it must know of the others is in the ``Moment``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from manyhands.errors import UsageError, unknown_name

__all__ = [
    "POLICIES",
    "Apply",
    "Async",
    "Backup",
    "Bounded",
    "Compensated",
    "Drop",
    "Hold",
    "Mixing",
    "Moment",
    "Plain",
    "Policy",
    "Rennala",
    "Scaled",
    "Verdict",
    "compensates",
    "make_policy",
    "scales",
    "together",
    "usual_ramp",
]


@dataclass(frozen=True, slots=True)
class Apply:
    """Use the update, times ``scale``."""

    scale: float = 1.0
    step: bool = True
    """Whether the step is taken now, or the update is only added to the sum for it."""
    compensation: float = 0.0
    """The lambda of the delay compensation g + lambda * g * g * (w - w_read); 0: none."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Not yet: judge again when anything has changed. The worker gets no answer meanwhile."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Never: the chunk counts as dropped."""


Verdict = Apply | Hold | Drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a server knows of the others when it judges an update."""

    workers: int = 1
    """How many workers there are."""
    oldest: int | None = None
    """The staleness of the oldest work that others still compute; None when nobody computes."""
    held: int = 0
    """How many other updates are held back."""
    waiting: int | None = None
    """The staleness of the oldest of them, where it is known."""
    collected: int = 0
    """How many updates are in the sum for the next step."""


def together(verdict: Apply, count: int) -> tuple[float, float, float]:
    """How a step is taken with ``count`` updates, the last of which got ``verdict``: factors of the learning rate and
    of the sum of the gradients, and the compensation."""
    if count == 1:
        return verdict.scale, 1.0, verdict.compensation
    return 1.0, 1.0 if verdict.scale == 1 else 1.0 / count, 0.0


class Policy(Protocol):
    """A rule; frozen, so that its settings can be shown and sent.

    One that needs only ``workers`` and ``collected`` of a Moment says so: ``looks_around = False``.
    """

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        """What becomes of an update that is ``staleness`` steps old."""
        ...


def compensates(policy: Policy) -> bool:
    """Whether it asks for compensation; then it must be known what workers have read."""
    verdicts = [policy.judge(staleness, Moment()) for staleness in (1, 2, 4, 8, 16)]
    return any(isinstance(verdict, Apply) and verdict.compensation for verdict in verdicts)


def scales(policy: Policy) -> bool:
    """Whether an update counts for less when it is stale."""
    fresh, stale = (policy.judge(staleness, Moment()) for staleness in (0, 1))
    return isinstance(fresh, Apply) and isinstance(stale, Apply) and stale.scale < fresh.scale


def _check(policy: Policy, least: Mapping[str, float]) -> None:
    for name, low in least.items():
        value = getattr(policy, name)
        if value is not None and not value >= low:
            raise UsageError(f"{name}={value!r} of policy {type(policy).__name__.lower()}: valid: at least {low}.")


@dataclass(frozen=True, slots=True)
class Async:
    """Ringmaster: drop what is older than ``oldest`` steps, apply the rest as it comes.

    Theory puts the limit at the variance of a gradient over the accuracy that is wanted (2501.16168), and nobody
    knows either beforehand. Without ``oldest`` it is twice the number of workers: among N equal workers every
    update is N - 1 steps old, so only somebody who is more than twice as slow as the others loses work.
    """

    looks_around: ClassVar[bool] = False

    oldest: int | None = None

    def __post_init__(self) -> None:
        _check(self, {"oldest": 0})

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        oldest = 2 * moment.workers if self.oldest is None else self.oldest
        return Drop() if staleness > oldest else Apply()


@dataclass(frozen=True, slots=True)
class Plain:
    """Apply everything, however old."""

    looks_around: ClassVar[bool] = False

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        return Apply()


@dataclass(frozen=True, slots=True)
class Scaled:
    """Apply everything, with the step size divided by 1 + staleness."""

    looks_around: ClassVar[bool] = False

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        return Apply(1.0 / (1 + staleness))


@dataclass(frozen=True, slots=True)
class Compensated:
    """Apply everything, corrected for how far the parameters have moved since they were read (1609.08326)."""

    looks_around: ClassVar[bool] = False

    strength: float = 0.04

    def __post_init__(self) -> None:
        _check(self, {"strength": 0.0})

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        return Apply(compensation=self.strength if staleness else 0.0)


@dataclass(frozen=True, slots=True)
class Bounded:
    """Stale-synchronous: nothing becomes older than ``staleness`` steps. With 0, everybody waits for everybody.

    An update waits while its step would make what others still compute too old. Updates that have waited go into
    one step together where one after the other they would make each other too old. An update that is too old all the
    same comes from somebody who was believed to be gone.
    """

    staleness: int = 4

    def __post_init__(self) -> None:
        _check(self, {"staleness": 0})

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        if staleness > self.staleness:
            return Drop()
        if moment.oldest is not None and moment.oldest + 1 > self.staleness:
            return Hold()
        is_safe = moment.waiting is not None and moment.waiting + 1 <= self.staleness
        return Apply(step=moment.held == 0 or is_safe)


@dataclass(frozen=True, slots=True)
class Rennala:
    """Collect ``updates`` taken at the current version, from whoever brings them, then step with their mean."""

    looks_around: ClassVar[bool] = False

    updates: int = 4

    def __post_init__(self) -> None:
        _check(self, {"updates": 1})

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        if staleness > 0:
            return Drop()
        return Apply(1.0 / self.updates, step=moment.collected + 1 >= self.updates)


@dataclass(frozen=True, slots=True)
class Backup:
    """Step with the mean of the first N updates of N + ``spare`` workers; the rest are late (1604.00981)."""

    looks_around: ClassVar[bool] = False

    spare: int = 1

    def __post_init__(self) -> None:
        _check(self, {"spare": 0})

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        if staleness > 0:
            return Drop()
        first = max(moment.workers - self.spare, 1)
        return Apply(1.0 / first, step=moment.collected + 1 >= first)


@dataclass(frozen=True, slots=True)
class Mixing:
    """Workers keep parameters of their own for ``every`` batches; then they and the servers' move towards each other.

    By ``beta`` of the way between them, both: w_j becomes (1 - beta) w_j + beta w_i. Without one it is 0.9 over the
    number of workers, as elastic averaging has it (1412.6651): what all workers do to the servers in a turn then stays
    below the whole way. Never more than half of it, where they would meet.
    """

    beta: float | None = None
    every: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise UsageError(f"every={self.every!r} of policy mixing: valid: an integer of at least 1.")
        _check(self, {"every": 1})
        number = isinstance(self.beta, (int, float)) and not isinstance(self.beta, bool)
        if self.beta is not None and not (number and 0 < self.beta < 1):
            raise UsageError(f"beta={self.beta!r} of policy mixing: valid: a number above 0 and below 1, or None.")

    def judge(self, staleness: int, moment: Moment) -> Verdict:
        return Apply(min(0.9 / moment.workers, 0.5) if self.beta is None else self.beta)


POLICIES: dict[str, type[Policy]] = {
    "async": Async,
    "plain": Plain,
    "scaled": Scaled,
    "compensated": Compensated,
    "bounded": Bounded,
    "rennala": Rennala,
    "backup": Backup,
    "mixing": Mixing,
}


def usual_ramp(batches: int) -> int:
    """Updates after which one worker more takes part, in a run with so many batches in an epoch: stale updates do most
    harm at the very start, and a short run should not spend itself on being careful."""
    return min(3 * batches // 10, 150)


def make_policy(name: str, **settings: Any) -> Policy:
    """The policy of that name, e.g. ``make_policy("bounded", staleness=4)``."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    valid = [field.name for field in fields(POLICIES[name])]  # type: ignore[arg-type]
    for setting in settings:
        if setting not in valid:
            raise unknown_name(f"{name} setting", setting, valid)
    return POLICIES[name](**settings)
