"""What ``explain`` concludes from a ledger and an event log, also when they do not show what one hopes for."""

from __future__ import annotations

from manyhands.commands.explain import check_orders, proof_holds, proof_lines, trouble_lines
from manyhands.core.ledger import Ledger
from manyhands.core.order import epoch_order, order_digest


def ledger_of(epochs: int, committed: list[tuple[int, int, int]]) -> Ledger:
    """Epochs of 10 samples in batches of 4 (3 steps each), with these (epoch, first, last) commits."""
    ledger = Ledger()
    for epoch in range(epochs):
        ledger.begin_epoch(epoch, 10, 4, "digest", first_step=3 * epoch)
    for epoch, first, last in committed:
        ledger.commit(epoch, first, last)
    return ledger


def test_complete_epochs_are_one_sentence() -> None:
    proof = ledger_of(2, [(0, 0, 2), (1, 3, 5)]).verify()
    assert proof_lines(proof, is_done=True) == ["ledger: in each of 2 epochs, each of 10 samples counted exactly once"]
    assert proof_holds(proof, is_done=True)


def test_the_last_epoch_of_an_unfinished_run_may_be_open() -> None:
    proof = ledger_of(2, [(0, 0, 2), (1, 3, 3)]).verify()
    assert proof_holds(proof, is_done=False)
    assert proof_lines(proof, is_done=False)[-1] == ("ledger: epoch 2: 4 of 10 samples counted once · 6 still to come")


def test_lost_samples_of_a_finished_run_are_a_failure() -> None:
    proof = ledger_of(1, [(0, 0, 1)]).verify()
    assert not proof_holds(proof, is_done=True)
    assert proof_lines(proof, is_done=True) == [
        "ledger: epoch 1: 8 of 10 samples counted once · 2 never",
        "ledger: NOT EXACT: samples were lost or counted twice, see the epochs above",
    ]


def test_samples_counted_twice_are_a_failure_in_any_run() -> None:
    proof = ledger_of(1, [(0, 0, 2), (0, 1, 1)]).verify()
    assert not proof_holds(proof, is_done=False)
    assert "4 more than once" in proof_lines(proof, is_done=False)[0]


def test_a_gap_in_an_earlier_epoch_is_a_failure_also_while_running() -> None:
    proof = ledger_of(2, [(0, 0, 1), (1, 3, 3)]).verify()
    assert not proof_holds(proof, is_done=False)


def test_skipped_samples_are_named_with_their_reason() -> None:
    ledger = ledger_of(1, [(0, 0, 2)])
    ledger.skip(0, 1, "the loss was not finite")
    proof = ledger.verify()
    assert proof_holds(proof, is_done=True)
    assert proof_lines(proof, is_done=True) == [
        "ledger: epoch 1: 6 of 10 samples counted once · 4 skipped (the loss was not finite)"
    ]


def test_a_log_that_contradicts_the_ledger_is_a_failure_in_any_run() -> None:
    ledger = ledger_of(1, [(0, 0, 2)])
    ledger.witness(0, 0, 2, 3, 0)
    assert proof_lines(ledger.verify(), is_done=True)[-1].endswith(
        "confirmed by the servers' log, entry by entry, for 3 batches"
    )
    ledger.rollback(0)
    ledger.commit(0, 0, 2)
    ledger.witness(0, 0, 2, 4, 0)
    for is_done in (False, True):
        assert not proof_holds(ledger.verify(), is_done=is_done)
        assert "NOT EXACT" in proof_lines(ledger.verify(), is_done=is_done)[-1]


def test_an_order_that_is_not_that_of_the_seed_is_a_failure() -> None:
    ledger = Ledger()
    ledger.begin_epoch(0, 50, 10, order_digest(epoch_order(3, 0, 50)))
    record = {"seed": 3, "shuffle": True}
    assert check_orders(ledger.verify(), record) == []
    assert check_orders(ledger.verify(), record | {"seed": 4}) == [
        "ledger: NOT EXACT: the order of epoch 1 is not that of seed 4"
    ]


def test_an_empty_ledger_claims_nothing() -> None:
    assert proof_lines(Ledger().verify(), is_done=False) == ["ledger: empty; nothing was committed"]


def test_deaths_and_recoveries_are_counted_with_the_longest_stall() -> None:
    died = {"event": "worker_died", "time": 1.0, "worker": 1, "pid": 7, "how": "SIGKILL", "step": 5, "phase": "compute"}
    events = [died, {"event": "recovered", "time": 2.0, "worker": 1, "step": 5, "seconds": 0.25}] * 2
    events.append({"event": "epoch", "time": 3.0})
    lines = trouble_lines(events)
    assert lines[0] == "deaths: 2, recoveries: 2, longest stall 0.250 s"
    assert lines[1].endswith("worker 1 (pid 7) died: SIGKILL, at step 5 in phase compute")
    assert lines[2].endswith("the run went on 0.250 s later")
    assert len(lines) == 5


def test_a_run_that_went_back_says_so() -> None:
    lines = trouble_lines([{"event": "rolled_back", "time": 1.0, "step": 4, "text": "back to step 4"}])
    assert lines[1].endswith("back to step 4")
