"""The ledger counts every sample, shows what is wrong, and survives being replayed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.ledger import Ledger
from manyhands.errors import CheckpointMismatch, RunError


def counted(ledger: Ledger) -> list[tuple[int, int, int, dict[str, int]]]:
    return [(proof.once, proof.never, proof.more_than_once, proof.skipped) for proof in ledger.verify().epochs]


def test_complete_epochs_with_a_short_last_batch_are_exact() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 100, 32, "a")
    ledger.commit(0, 0, 1)
    ledger.commit(0, 2, 3)
    ledger.begin_epoch(1, 100, 32, "b")
    ledger.commit(1, 4, 7)
    assert counted(ledger) == [(100, 0, 0, {}), (100, 0, 0, {})]
    assert ledger.verify().exact
    assert ledger.next_step == 8
    assert str(ledger.verify()).splitlines()[1] == "epoch 1: 100 of 100 samples counted once"


def test_a_lost_and_a_doubled_step_are_shown() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 100, 32, "a")
    ledger.commit(0, 0, 1)
    ledger.commit(0, 1, 1)
    ledger.commit(0, 3, 3)
    assert counted(ledger) == [(36, 32, 32, {})]
    assert not ledger.verify().exact
    assert "32 never · 32 more than once" in str(ledger.verify())


def test_skips_are_counted_by_reason_whether_committed_or_not() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 100, 32, "a")
    ledger.commit(0, 0, 2)
    ledger.skip(0, 1, "loss is NaN")
    ledger.skip(0, 3, "loss is NaN")
    assert counted(ledger) == [(64, 0, 0, {"loss is NaN": 36})]
    assert ledger.verify().exact
    assert ledger.next_step == 4


def test_a_part_of_a_step_may_be_skipped_also_after_a_replay() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 100, 32, "a")
    ledger.commit(0, 0, 3)
    ledger.skip(0, 1, "loss is NaN", 8)
    assert counted(ledger) == [(92, 0, 0, {"loss is NaN": 8})]
    assert counted(Ledger.from_records(ledger.to_records())) == counted(ledger)


@pytest.mark.parametrize(
    "effects, left_out, contradicted", [(4, 0, 0), (3, 1, 0), (5, 0, 1), (3, 0, 1), (4, 1, 1), (2, 2, 1)]
)
def test_the_servers_log_is_a_second_witness(effects: int, left_out: int, contradicted: int) -> None:
    """Four batches were done, and for one of them there is a reason to have left it out."""
    ledger = Ledger()
    ledger.begin_epoch(0, 160, 32, "a")
    ledger.commit(0, 0, 4)
    ledger.skip(0, 1, "loss is NaN")
    ledger.witness(0, 0, 0, 1, 0)
    ledger.witness(0, 1, 4, effects, left_out)
    for account in (ledger, Ledger.from_records(ledger.to_records())):
        (proof,) = account.verify().epochs
        assert (proof.witnessed, proof.contradicted) == (5, contradicted)
        assert proof.exact == (contradicted == 0) == ("in the servers' log" not in str(proof))
    ledger.rollback(1)
    assert ledger.verify().epochs[0].witnessed == 1


def test_a_dropped_last_batch_has_a_reason() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 100, 32, "a", drop_last=True)
    ledger.commit(0, 0, 2)
    assert counted(ledger) == [(96, 0, 0, {"drop_last": 4})]
    with pytest.raises(RunError, match="steps 3 to 3 are not in epoch 0, which has the steps 0 to 2"):
        ledger.commit(0, 3, 3)


def test_a_rollback_takes_steps_skips_and_epochs_back() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 100, 32, "a")
    ledger.commit(0, 0, 3)
    ledger.begin_epoch(1, 100, 32, "b")
    ledger.commit(1, 4, 6)
    ledger.skip(1, 6, "loss is NaN")
    ledger.rollback(3)
    assert counted(ledger) == [(96, 4, 0, {})]
    assert ledger.next_step == 3
    ledger.commit(0, 3, 3)
    ledger.begin_epoch(1, 100, 32, "b")
    ledger.commit(1, 4, 7)
    assert ledger.verify().exact


def test_a_rollback_to_the_beginning_of_an_epoch_keeps_it_open() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 64, 32, "a")
    ledger.commit(0, 0, 1)
    ledger.begin_epoch(1, 64, 32, "b")
    ledger.commit(1, 2, 2)
    ledger.rollback(2)
    ledger.commit(1, 2, 3)
    assert ledger.verify().exact


def test_an_epoch_can_begin_after_one_that_was_stopped_early() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 64, 8, "a")
    ledger.commit(0, 0, 2)
    ledger.begin_epoch(1, 64, 8, "b", first_step=3)
    ledger.commit(1, 3, 10)
    assert counted(ledger) == [(24, 40, 0, {}), (64, 0, 0, {})]


def test_beginning_again_must_agree() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 100, 32, "a")
    ledger.begin_epoch(0, 120, 32, "c")  # nothing was committed: the first is forgotten
    ledger.commit(0, 0, 0)
    ledger.begin_epoch(0, 120, 32, "c")
    with pytest.raises(CheckpointMismatch, match=r"120 samples in batches of 32 .*received: step 0, 100 samples"):
        ledger.begin_epoch(0, 100, 32, "a")


def test_an_epoch_that_was_not_begun_is_an_error() -> None:
    with pytest.raises(RunError, match="no epoch 3; begun are: none"):
        Ledger().commit(3, 0, 0)


def test_an_unknown_record_is_an_error() -> None:
    with pytest.raises(RunError, match="unknown kind"):
        Ledger.from_records([{"kind": "gift"}])


def test_neighbouring_commits_become_one_record_until_it_is_drained() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 100, 10, "a")
    for step in range(4):
        ledger.commit(0, step, step)
    assert [record["kind"] for record in ledger.drain()] == ["epoch", "commit"]
    ledger.commit(0, 4, 4)
    assert ledger.drain() == [{"kind": "commit", "epoch": 0, "first": 4, "last": 4}]
    assert ledger.drain() == []


actions = st.one_of(
    st.tuples(st.just("run"), st.integers(1, 7)),
    st.tuples(st.just("skip"), st.just(0)),
    st.tuples(st.just("rollback"), st.integers(0, 9)),
    st.tuples(st.just("restart"), st.integers(0, 9)),
)


@given(samples=st.integers(1, 50), batch_size=st.integers(1, 20), schedule=st.lists(actions, max_size=40))
def test_any_schedule_of_rollbacks_and_restarts_ends_exact(
    samples: int, batch_size: int, schedule: list[tuple[str, int]]
) -> None:
    """A run that goes on from where it was put back counts each sample once, as its replayed records say, too."""
    steps = -(-samples // batch_size)
    ledger, step = Ledger(), 0

    def advance(count: int) -> None:
        nonlocal step
        for _ in range(count):
            ledger.begin_epoch(step // steps, samples, batch_size, "order")
            ledger.commit(step // steps, step, step)
            step += 1

    for action, amount in schedule:
        if action == "run":
            advance(amount)
        elif action == "skip":
            ledger.begin_epoch(step // steps, samples, batch_size, "order")
            ledger.skip(step // steps, step, "poison")
            step += 1
        else:
            step = max(0, step - amount)
            if action == "restart":
                ledger = Ledger.from_records(json.loads(json.dumps(ledger.to_records())))
            ledger.rollback(step)
    advance(-step % steps)
    proof = ledger.verify()
    assert all(epoch.exact for epoch in proof.epochs if epoch.epoch < step // steps)
    assert sum(epoch.once + sum(epoch.skipped.values()) for epoch in proof.epochs) == step // steps * samples
    assert Ledger.from_records(ledger.to_records()).verify() == proof
