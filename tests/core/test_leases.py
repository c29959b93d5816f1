"""Leases under any sequence of events: no chunk is lost, none is given out twice without need, all get done."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from manyhands.core.chunks import Chunks, ChunkSet
from manyhands.core.leases import Leases

WORKERS = st.integers(0, 3)
CHUNKS = st.integers(0, 11)
DURATION_S, SPECULATE_AFTER_S = 10.0, 4.0


class Pool(RuleBasedStateMachine):
    """Leases beside a plain account of the same events."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(horizon=8, duration_s=DURATION_S, speculate_after_s=SPECULATE_AFTER_S)
        self.now = 0.0
        self.done: set[int] = set()
        self.held: dict[tuple[int, int], tuple[float, float, int]] = {}  # (chunk, worker) -> since, until, lease
        self.count = 0
        self.was_done: set[int] = set()

    def holders(self, chunk: int) -> list[int]:
        return [worker for held, worker in self.held if held == chunk]

    def free(self) -> list[int]:
        return [chunk for chunk in range(self.leases.horizon) if chunk not in self.done and not self.holders(chunk)]

    def hold(self, run: range, worker: int) -> None:
        self.count += 1
        self.held |= {(chunk, worker): (self.now, self.now + DURATION_S, self.count) for chunk in run}

    @rule(worker=WORKERS, most=st.integers(1, 4))
    def a_worker_asks(self, worker: int, most: int) -> None:
        free = self.free()
        before = {chunk: self.holders(chunk) for chunk, _ in self.held}
        run = self.leases.lease_run(worker, self.now, most)
        if free:
            assert run is not None
            assert run.start == min(free) and len(run) <= most
            assert set(run) <= set(free)
            assert len(run) == most or run.stop not in free, "there was more"
        elif run is not None:
            ((other,),) = {tuple(before[chunk]) for chunk in run}
            assert other != worker
            ((since, _, lease),) = {self.held[chunk, other] for chunk in run}
            assert self.now - since >= SPECULATE_AFTER_S
            assert run.stop <= self.leases.horizon
            following = self.held.get((run.stop, other))
            alike = following is not None and following[2] == lease and before[run.stop] == [other]
            assert not alike or run.stop == self.leases.horizon, "only a part of what the other one has"
        else:
            for slow, holders in before.items():
                alone = slow < self.leases.horizon and len(holders) == 1 and holders != [worker]
                assert not alone or self.now - self.held[slow, holders[0]][0] < SPECULATE_AFTER_S
        if run is not None:
            self.hold(run, worker)

    @rule(worker=WORKERS, first=CHUNKS, length=st.integers(1, 3))
    def a_lease_is_recalled(self, worker: int, first: int, length: int) -> None:
        run = range(first, first + length)
        self.leases.recall(run, worker, self.now)
        self.count += 1
        known = (self.now, self.now + DURATION_S, self.count)
        self.held |= {(chunk, worker): known for chunk in run if chunk not in self.done}

    @rule(chunk=CHUNKS)
    def a_chunk_is_done(self, chunk: int) -> None:
        assert self.leases.done(chunk) == (chunk not in self.done)
        self.done.add(chunk)
        self.held = {key: times for key, times in self.held.items() if key[0] != chunk}

    @rule(chunk=CHUNKS, worker=st.none() | WORKERS)
    def a_chunk_comes_back(self, chunk: int, worker: int | None) -> None:
        self.leases.give_back(chunk, worker)
        for holder in self.holders(chunk):
            if worker in (None, holder):
                del self.held[chunk, holder]

    @rule(worker=WORKERS)
    def a_worker_is_gone(self, worker: int) -> None:
        held = {chunk for chunk, holder in self.held if holder == worker}
        assert set(self.leases.gone(worker)) == held
        for chunk in held:
            del self.held[chunk, worker]

    @rule(chunk=CHUNKS, worker=WORKERS)
    def a_lease_is_renewed(self, chunk: int, worker: int) -> None:
        assert self.leases.renew(chunk, worker, self.now) == ((chunk, worker) in self.held)
        if (chunk, worker) in self.held:
            since, _, lease = self.held[chunk, worker]
            same = {key for key, known in self.held.items() if known[2] == lease}
            self.held |= dict.fromkeys(same, (since, self.now + DURATION_S, lease))

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 9.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        over = {key for key, (_, until, _) in self.held.items() if until <= self.now}
        assert set(self.leases.expire(self.now)) == over
        for key in over:
            del self.held[key]

    @rule(horizon=st.integers(0, 12))
    def the_horizon_moves(self, horizon: int) -> None:
        self.leases.horizon = horizon

    @rule()
    def a_checkpoint_is_taken(self) -> None:
        self.was_done = set(self.leases.done_chunks)

    @precondition(lambda self: self.was_done < self.done)
    @rule()
    def the_run_goes_back(self) -> None:
        marked = ChunkSet()
        marked.update(self.was_done)
        self.leases.rollback(marked.frozen())
        self.done, self.held = set(self.was_done), {}

    @invariant()
    def the_account_is_the_same(self) -> None:
        assert set(self.leases.done_chunks) == self.done
        assert {(chunk, worker) for chunk, holders in self.leases.outstanding.items() for worker in holders} == set(
            self.held
        )
        assert self.leases.prefix not in self.done
        assert set(range(self.leases.prefix)) <= self.done

    def teardown(self) -> None:
        """Left alone, one worker gets everything done."""
        for worker in range(4):
            self.leases.gone(worker)
        while (chunk := self.leases.lease(9, self.now)) is not None:
            assert self.leases.done(chunk), "a chunk was given out after it was done"
        assert self.leases.prefix >= self.leases.horizon


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_without_speculation_nobody_gets_the_chunk_of_another() -> None:
    leases = Leases(horizon=1, duration_s=10.0)
    assert leases.lease(0, 0.0) == 0
    assert leases.lease(1, 9.0) is None
    assert leases.expire(10.0) == [(0, 0)]
    assert leases.lease(1, 10.0) == 0


@given(st.lists(st.integers(0, 20)))
def test_a_set_of_chunks_is_a_set(chunks: list[int]) -> None:
    growing, plain = ChunkSet(), set[int]()
    for chunk in chunks:
        assert growing.add(chunk) == (chunk not in plain)
        plain.add(chunk)
    frozen = growing.frozen()
    assert list(frozen) == sorted(plain)
    assert len(frozen) == len(growing) == len(plain)
    assert all((chunk in frozen) == (chunk in growing) == (chunk in plain) for chunk in range(22))
    assert ChunkSet(frozen).frozen() == frozen
    assert growing.prefix not in plain
    assert frozen == Chunks(growing.prefix, tuple(sorted(chunk for chunk in plain if chunk > growing.prefix)))
