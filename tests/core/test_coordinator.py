"""The coordinator: chunks to workers, checkpoints at rest, and everything back together when a shard is lost."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.chunks import Chunks
from manyhands.core.coordinator import Completed, Coordinator, RolledBack
from manyhands.core.leases import Leases
from manyhands.core.messages import Ask, Lease, Saved, Send, Snapshot, Timing, Working

WORKER = 100


def coordinator(chunks: int = 6, every: int = 2, shards: int = 2) -> Coordinator:
    machine = Coordinator(
        shards=shards,
        chunks=chunks,
        checkpoint_every=every,
        timing=Timing(),
        leases=Leases(horizon=0, duration_s=5.0),
    )
    machine.start([1, 2, 3], 0.0)
    return machine


def leased(actions: list[Any]) -> Lease:
    answer = actions[-1].message
    assert isinstance(answer, Lease)
    return answer


def messages(actions: list[Any], kind: type) -> list[Any]:
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def test_a_lost_answer_is_given_again_and_a_late_question_is_not_answered() -> None:
    machine = coordinator()
    first = leased(machine.receive(WORKER, Ask(1, 0, None), 0.0))
    assert leased(machine.receive(WORKER, Ask(1, 0, None), 0.0)) == first
    assert leased(machine.receive(WORKER, Ask(2, 1, first.chunk), 0.0)).chunk == 1
    assert machine.receive(WORKER, Ask(1, 0, None), 0.0) == []


def test_no_chunk_beyond_a_checkpoint_is_leased_before_all_shards_are_written() -> None:
    machine = coordinator()
    for ticket, done in enumerate([None, 0], start=1):
        machine.receive(WORKER, Ask(ticket, 1, done), 0.0)
    actions = machine.receive(WORKER, Ask(3, 1, 1), 0.0)
    assert leased(actions).chunk is None
    assert [(ask.shard, ask.checkpoint, ask.chunks) for ask in messages(actions, Snapshot)] == [
        (0, 1, Chunks(2)),
        (1, 1, Chunks(2)),
    ]
    assert machine.receive(1, Saved(0, 1, 1), 0.0) == []
    assert leased(machine.receive(WORKER, Ask(3, 1, 1), 0.1)).chunk is None
    assert [ask.shard for ask in messages(machine.tick(0.2), Snapshot)] == [1]
    assert machine.receive(2, Saved(1, 1, 1), 0.2) == [Completed(1, Chunks(2))]
    assert leased(machine.receive(WORKER, Ask(3, 1, 1), 0.3)).chunk == 2


def test_going_back_voids_what_was_done_since_the_checkpoint() -> None:
    machine = coordinator(every=3)
    machine.receive(WORKER, Ask(1, 1, None), 0.0)
    machine.receive(WORKER, Ask(2, 1, 0), 0.0)
    lost = machine.service.views[0].primary
    assert lost is not None
    assert RolledBack(2, 0, Chunks()) in machine.died(lost, 0.0)
    assert leased(machine.receive(WORKER, Ask(3, 1, 1), 0.0)).chunk == 0
    assert machine.leases.done_chunks == Chunks(), "what was done in the epoch before does not count"
    assert machine.receive(lost, Saved(0, 1, 1), 0.0) == []


def test_a_worker_that_computes_keeps_its_lease_and_a_silent_one_loses_it() -> None:
    machine = coordinator()
    machine.receive(WORKER, Ask(1, 1, None), 0.0)
    machine.receive(WORKER + 1, Ask(1, 1, None), 0.0)
    machine.receive(WORKER, Working(1, 0), 4.0)
    machine.receive(WORKER + 1, Working(1, None), 4.0)
    machine.tick(5.0)
    assert machine.leases.outstanding == {0: (WORKER,)}
    assert machine.died(WORKER, 5.0) == []
    assert machine.leases.outstanding == {}


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60), st.integers(1, 4), st.integers(1, 7))
def test_every_chunk_is_done_once_and_every_checkpoint_is_whole(
    schedule: list[tuple[int, bool]], every: int, chunks: int
) -> None:
    """Workers take turns as the schedule says; each question may come twice."""
    machine = coordinator(chunks=chunks, every=every)
    holds: dict[int, int | None] = dict.fromkeys(range(3))
    tickets = dict.fromkeys(range(3), 0)
    completed, given_out = [], []
    turns = [*schedule, *((worker, False) for _ in range(3 * chunks) for worker in range(3))]
    for worker, twice in turns:
        tickets[worker] += 1
        question = Ask(tickets[worker], 1, holds[worker])
        for _ in range(1 + twice):
            actions = machine.receive(WORKER + worker, question, 0.0)
            holds[worker] = leased(actions).chunk
            for snapshot in messages(actions, Snapshot):
                completed += machine.receive(1, Saved(snapshot.shard, 1, snapshot.checkpoint), 0.0)
        if holds[worker] is not None:
            given_out.append(holds[worker])
    assert sorted(given_out) == list(range(chunks))
    assert machine.finished
    prefixes = [action.chunks for action in completed if isinstance(action, Completed)]
    assert prefixes == [Chunks(min(end, chunks)) for end in range(every, chunks + every, every)]
