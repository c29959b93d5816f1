"""The protocol holds under faults, the faults really happen, and a seed is the same run every time."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from manyhands.cli import main
from manyhands.core.replication import Replica
from manyhands.plan.protocol.campaign import BATCH, run_seed, run_seeds
from manyhands.plan.protocol.scenario import KINDS

SEEDS = 300


def test_every_promise_holds_and_every_kind_of_fault_happens() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        world, failure = run_seed(seed)
        assert failure is None, f"{failure}; replay: manyhands simulate protocol --seeds 1 --first {seed}"
        counts.update(world.counts)
    assert {kind for kind in KINDS if counts[kind] < 5} == set()
    assert counts["promotions"] > SEEDS / 10
    assert counts["rollbacks"] > SEEDS / 10
    assert counts["checkpoints"] > SEEDS


@pytest.mark.parametrize("seed", [3, 17, 41])
def test_a_seed_is_the_same_run_every_time_watched_or_not(seed: int) -> None:
    first: list[str] = []
    again: list[str] = []
    world, failure = run_seed(seed, first)
    random.random()  # what others do with chance makes no difference
    assert run_seed(seed, again)[1] is failure is None
    assert first == again
    assert len(first) > world.events == run_seed(seed)[0].events > 100


def test_seeds_are_the_same_runs_in_other_processes_and_all_counted() -> None:
    count = 2 * BATCH + 7
    outcome = run_seeds(0, count, processes=2)
    alone = run_seeds(0, count, processes=1)
    assert outcome.processes == 2
    assert (outcome.seeds, outcome.events, outcome.counts) == (count, alone.events, alone.counts)
    assert outcome.failures == []


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "protocol", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out.splitlines()


def test_the_command_says_what_held(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run_command(capsys, "--seeds", "20", "--first", "100", "--json")
    result: dict[str, Any] = json.loads(lines[-1])
    assert code == 0
    assert (result["status"], result["first"], result["seeds"], result["failures"]) == ("finished", 100, 20, [])
    assert "20 seeds in" in lines[0] and "seeds/s" in lines[0]


def test_the_command_ends_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run_command(capsys, "--seeds", str(BATCH * 1000), "--seconds", "0")
    assert code == 0
    assert "of 50,000 seeds: the time is up" in lines[0]


def test_no_seeds_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "--seeds", "0") == (2, [])


def test_a_failing_seed_is_replayed_event_by_event(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def acknowledge_alone(self: Replica, chunk: int, now: float) -> list[Any]:
        self.pending.pop(chunk, None)
        return right(self, chunk, now)

    right = Replica._acknowledge
    monkeypatch.setattr(Replica, "_acknowledge", acknowledge_alone)
    code, lines = run_command(capsys, "--seeds", str(BATCH))
    assert code == 3
    replay = next(line for line in lines if "replay:" in line).split("replay: manyhands simulate protocol ")[1]
    words = replay.split()
    code, trace = run_command(capsys, *words)
    assert code == 3
    assert trace[0].startswith("Scenario(")
    assert any("Pushed(" in line for line in trace[-8:]), "the trace ends with the act that broke the promise"
    _, same = run_command(capsys, *words)
    assert [line for line in same if "seeds/s" not in line] == [line for line in trace if "seeds/s" not in line]
