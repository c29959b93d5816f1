"""Each policy keeps what it promises, judged one by one and in whole schedules of workers of any speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.policies import (
    POLICIES,
    Apply,
    Async,
    Backup,
    Bounded,
    Compensated,
    Drop,
    Hold,
    Mixing,
    Moment,
    Plain,
    Policy,
    Rennala,
    Scaled,
    Verdict,
    compensates,
    make_policy,
    together,
    usual_ramp,
)
from manyhands.errors import UsageError


@pytest.mark.parametrize(
    "policy, staleness, moment, verdict",
    [
        (Async(3), 3, Moment(), Apply()),
        (Async(3), 4, Moment(), Drop()),
        (Async(), 4, Moment(workers=2), Apply()),
        (Async(), 5, Moment(workers=2), Drop()),
        (Plain(), 10**6, Moment(), Apply()),
        (Scaled(), 0, Moment(), Apply(1.0)),
        (Scaled(), 3, Moment(), Apply(0.25)),
        (Compensated(0.1), 0, Moment(), Apply()),
        (Compensated(0.1), 2, Moment(), Apply(compensation=0.1)),
        (Bounded(2), 2, Moment(oldest=1), Apply()),
        (Bounded(2), 0, Moment(oldest=2), Hold()),
        (Bounded(2), 0, Moment(oldest=1, held=1), Apply(step=False)),
        (Bounded(2), 3, Moment(), Drop()),
        (Rennala(3), 0, Moment(collected=1), Apply(1 / 3, step=False)),
        (Rennala(3), 0, Moment(collected=2), Apply(1 / 3)),
        (Rennala(3), 1, Moment(collected=2), Drop()),
        (Backup(1), 0, Moment(workers=3, collected=0), Apply(1 / 2, step=False)),
        (Backup(1), 0, Moment(workers=3, collected=1), Apply(1 / 2)),
        (Backup(1), 1, Moment(workers=3), Drop()),
        (Backup(4), 0, Moment(workers=3), Apply()),
        (Mixing(0.2), 7, Moment(workers=3), Apply(0.2)),
        (Mixing(), 0, Moment(workers=3), Apply(0.9 / 3)),
        (Mixing(), 0, Moment(workers=1), Apply(0.5)),
    ],
)
def test_the_rules(policy: Policy, staleness: int, moment: Moment, verdict: Verdict) -> None:
    assert policy.judge(staleness, moment) == verdict


def test_policies_come_by_name() -> None:
    assert make_policy("bounded", staleness=7) == Bounded(7)
    assert {name: type(make_policy(name)) for name in POLICIES} == POLICIES


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("asyncc", {}, "unknown policy 'asyncc'. Did you mean 'async'"),
        ("bounded", {"stale": 3}, "unknown bounded setting 'stale'. Did you mean 'staleness'"),
        ("bounded", {"staleness": -1}, "staleness=-1 of policy bounded: valid: at least 0"),
        ("rennala", {"updates": 0}, "updates=0 of policy rennala: valid: at least 1"),
        ("compensated", {"strength": float("nan")}, "strength=nan"),
        ("mixing", {"beta": 0}, "beta=0 of policy mixing: valid: a number above 0 and below 1, or None"),
        ("mixing", {"beta": 1.0}, "beta=1.0 of policy mixing"),
        ("mixing", {"beta": float("nan")}, "beta=nan of policy mixing"),
        ("mixing", {"beta": "half"}, "beta='half' of policy mixing"),
        ("mixing", {"every": 0}, "every=0 of policy mixing: valid: at least 1"),
        ("mixing", {"every": 2.5}, "every=2.5 of policy mixing: valid: an integer"),
    ],
)
def test_wrong_words_are_named(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_policy(name, **settings)


def run(policy: Policy, workers: int, schedule: list[int]) -> tuple[list[tuple[int, Verdict]], int]:
    """Workers read, compute and push in the order of ``schedule``: all verdicts with the staleness, and the steps."""
    version, collected, verdicts = 0, 0, []
    computing = dict.fromkeys(range(workers), 0)  # worker -> the version it has read
    held: dict[int, int] = {}

    def judge(worker: int, read: int) -> None:
        nonlocal version, collected
        oldest = max((version - other for other in computing.values()), default=None)
        moment = Moment(workers=workers, oldest=oldest, held=len(held), collected=collected)
        verdict = policy.judge(version - read, moment)
        verdicts.append((version - read, verdict))
        if isinstance(verdict, Hold):
            held[worker] = read
            return
        if isinstance(verdict, Apply):
            collected = 0 if verdict.step else collected + 1
            version += verdict.step
        waiting.append(worker)

    for worker in schedule:
        if worker not in computing:
            continue  # it waits for its answer
        waiting: list[int] = []
        judge(worker, computing.pop(worker))
        for other in list(held):
            judge(other, held.pop(other))
        computing |= dict.fromkeys(waiting, version)
    return verdicts, version


SCHEDULES = st.integers(1, 5).flatmap(
    lambda workers: st.tuples(st.just(workers), st.lists(st.integers(0, workers - 1), max_size=80))
)


@given(SCHEDULES, st.integers(0, 5))
def test_bounded_never_lets_anything_become_too_old(case: tuple[int, list[int]], staleness: int) -> None:
    workers, schedule = case
    verdicts, _ = run(Bounded(staleness), workers, schedule)
    assert all(age <= staleness for age, _ in verdicts)
    assert not any(isinstance(verdict, Drop) for _, verdict in verdicts)


@given(st.integers(1, 5), st.integers(0, 5), st.integers(1, 10))
def test_bounded_never_stops_while_everybody_works(workers: int, staleness: int, rounds: int) -> None:
    _, steps = run(Bounded(staleness), workers, list(range(workers)) * rounds)
    assert steps >= rounds
    if staleness == 0:
        assert steps == rounds, "with 0, a step is one update of everybody"


@given(SCHEDULES, st.integers(1, 4))
def test_rennala_steps_with_the_mean_of_fresh_updates(case: tuple[int, list[int]], updates: int) -> None:
    verdicts, steps = run(Rennala(updates), *case)
    applied = [(age, verdict) for age, verdict in verdicts if isinstance(verdict, Apply)]
    assert all(age == 0 for age, _ in applied)
    assert steps == len(applied) // updates


@given(SCHEDULES, st.none() | st.floats(0.01, 0.5), st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=6))
def test_mixing_loses_nothing_and_brings_everybody_together(
    case: tuple[int, list[int]], beta: float | None, values: list[float]
) -> None:
    """One number each, in place of parameters: the sum stays, and nobody leaves the range in which all began."""
    workers, schedule = case
    centre, own = values[-1], values[:workers]
    low, high, total = min(centre, *own), max(centre, *own), centre + sum(own)
    verdicts, steps = run(Mixing(beta), workers, schedule)
    assert steps == len(schedule), "nobody waits, and nothing is dropped"
    for worker, (_, verdict) in zip(schedule, verdicts, strict=True):
        assert isinstance(verdict, Apply) and 0 < verdict.scale <= 0.5
        assert beta is not None or verdict.scale * workers <= 0.9
        before, step = abs(centre - own[worker]), verdict.scale * (centre - own[worker])
        centre, own[worker] = centre - step, own[worker] + step
        assert abs(centre - own[worker]) <= before + 1e-9
        assert low - 1e-9 <= min(centre, *own) and max(centre, *own) <= high + 1e-9
    assert centre + sum(own) == pytest.approx(total, abs=1e-6)


@given(SCHEDULES, st.sampled_from(sorted(POLICIES)))
def test_every_update_is_judged_and_no_policy_drops_everything(case: tuple[int, list[int]], name: str) -> None:
    workers, schedule = case
    verdicts, _ = run(make_policy(name), workers, schedule)
    if schedule:
        assert not isinstance(verdicts[0][1], Drop)
    if name in ("plain", "scaled", "compensated"):
        assert len(verdicts) == len(schedule)
        assert all(isinstance(verdict, Apply) and verdict.step for _, verdict in verdicts)


def test_how_updates_make_a_step_together() -> None:
    assert together(Apply(0.25), 1) == (0.25, 1.0, 0.0), "alone: at a lower rate"
    assert together(Apply(compensation=0.04), 1) == (1.0, 1.0, 0.04)
    assert together(Apply(0.25), 3) == (1.0, 1 / 3, 0.0), "the mean"
    assert together(Apply(), 3) == (1.0, 1.0, 0.0), "the sum"
    assert together(Apply(compensation=0.04), 2) == (1.0, 1.0, 0.0)


def test_which_policies_compensate() -> None:
    assert [name for name, kind in POLICIES.items() if compensates(kind())] == ["compensated"]
    assert not compensates(Compensated(0.0))


def test_a_ramp_is_short_in_short_runs() -> None:
    assert [usual_ramp(batches) for batches in (1, 20, 469, 10_000)] == [0, 6, 140, 150]
