"""A worker in any order of answers: a chunk is done when every shard has said so, in one epoch."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from manyhands.core.messages import (
    Ask,
    Lease,
    Message,
    Pull,
    Pulled,
    Push,
    Pushed,
    Refused,
    Send,
    Timing,
    View,
    Views,
    Working,
)
from manyhands.core.pushes import Action, Compute, Pushes

SHARDS = 2
COORDINATOR = 0


def views(epoch: int, term: int = 1) -> Views:
    return Views(epoch, tuple(View(shard, epoch, 10 * epoch + term, 1 + shard, None, 0) for shard in range(SHARDS)))


class Loop(RuleBasedStateMachine):
    """A worker, servers that answer everything, and a bag of answers that come in any order, twice or never."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = Pushes(me=9, coordinator=COORDINATOR, shards=SHARDS, timing=Timing())
        self.epoch, self.chunks, self.now = 1, 0, 0.0
        self.bag: list[Message] = []
        self.answered: dict[int, Lease] = {}
        self.work: Compute | None = None
        self.acknowledged: set[tuple[int, int, int]] = set()  # epoch, chunk, shard: delivered to the worker
        self.done: list[tuple[int, int]] = []
        self.do(self.worker.start())

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Compute(epoch=epoch, pulled=pulled):
                    assert {answer.epoch for answer in pulled} == {epoch}, "parameters of two epochs"
                    assert [answer.shard for answer in pulled] == list(range(SHARDS))
                    self.work = action
                case Send(to=0, message=Ask() as ask):
                    self.asked(ask)
                case Send(to=0, message=Working()):
                    self.bag.append(views(self.epoch))
                case Send(to=to, message=Pull(shard, epoch, _, chunk)):
                    assert to == 1 + shard
                    self.bag.append(Pulled(shard, epoch, chunk, 0))
                case Send(to=to, message=Push(shard, epoch, term, chunk, _, update)):
                    assert to == 1 + shard
                    assert update == (epoch, chunk), "an update under a wrong name"
                    self.bag.append(Pushed(shard, epoch, term, chunk))

    def asked(self, ask: Ask) -> None:
        if ask.done is not None:
            assert {(ask.epoch, ask.done, shard) for shard in range(SHARDS)} <= self.acknowledged
            if not self.done or self.done[-1] != (ask.epoch, ask.done):
                self.done.append((ask.epoch, ask.done))
        if ask.ticket not in self.answered:
            # The same numbers come again in a new epoch, as they do after going back.
            self.answered[ask.ticket] = Lease(ask.ticket, self.chunks % 3, False, views(self.epoch))
            self.chunks += 1
        self.bag.append(self.answered[ask.ticket])

    @precondition(lambda self: self.bag)
    @rule(data=st.data(), again=st.booleans(), lost=st.booleans())
    def an_answer_comes(self, data: st.DataObject, again: bool, lost: bool) -> None:
        place = data.draw(st.integers(0, len(self.bag) - 1))
        message = self.bag[place] if again else self.bag.pop(place)
        if again or not lost:
            self.deliver(message)

    def deliver(self, message: Message) -> None:
        if isinstance(message, Pushed):
            self.acknowledged.add((message.epoch, message.chunk, message.shard))
        self.do(self.worker.receive(1, message, self.now))

    @rule(late=st.integers(0, 1))
    def the_work_is_finished(self, late: int) -> None:
        if self.work is not None:
            work = self.work
            self.do(self.worker.computed(work.ticket - late, (work.epoch, work.chunk), self.now))

    @rule()
    def time_goes_by(self) -> None:
        self.now += 1.0
        self.do(self.worker.tick(self.now))

    @rule()
    def the_run_goes_back(self) -> None:
        self.epoch += 1
        self.answered.clear()
        self.chunks = 0

    @rule(shard=st.integers(0, SHARDS - 1))
    def a_server_refuses(self, shard: int) -> None:
        self.do(self.worker.receive(1 + shard, Refused(shard, 10 * self.epoch + 2), self.now))

    def teardown(self) -> None:
        """When everything is answered, chunks get done, each in the epoch that counts."""
        before = len(self.done)
        for _ in range(12):
            self.time_goes_by()
            for message in self.bag[:]:
                self.deliver(message)
            self.bag.clear()
            self.the_work_is_finished(0)
        assert len(self.done) > before
        assert self.done[-1][0] == self.epoch


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def pushing() -> Pushes:
    worker = Pushes(me=9, coordinator=COORDINATOR, shards=SHARDS, timing=Timing())
    worker.start()
    worker.receive(0, Lease(1, 5, False, views(1)), 0.0)
    for shard in range(SHARDS):
        actions = worker.receive(1 + shard, Pulled(shard, 1, 5, 3), 0.0)
    assert isinstance(actions[0], Compute)
    worker.computed(1, "update", 0.0)
    assert worker.phase == "pushing"
    return worker


def test_only_what_is_missing_is_repeated_and_only_computing_renews_the_lease() -> None:
    worker = pushing()
    worker.receive(1, Pushed(0, 1, 11, 5), 0.0)
    assert worker.tick(1.0) == [Send(0, Working(1, None))], "servers are given some time"
    assert worker.tick(2.0) == [Send(0, Working(1, None)), Send(2, Push(1, 1, 11, 5, 3, "update"))]


def test_a_new_primary_gets_what_the_old_one_did_not_acknowledge() -> None:
    worker = pushing()
    worker.receive(1, Pushed(0, 1, 11, 5), 0.0)
    changed = Views(1, (View(0, 1, 12, 7, None, 0), View(1, 1, 12, 8, None, 0)))
    assert worker.receive(0, changed, 0.0) == [Send(8, Push(1, 1, 12, 5, 3, "update"))]
    assert worker.receive(8, Pushed(1, 1, 12, 5), 0.0) == [Send(0, Ask(2, 1, 5))]


def test_a_new_epoch_ends_the_chunk_and_a_result_that_comes_then_is_void() -> None:
    worker = pushing()
    assert worker.receive(0, views(2), 0.0) == [Send(0, Ask(2, 2, None))]
    assert worker.receive(1, Pushed(0, 1, 11, 5), 0.0) == []
    assert worker.computed(1, "update", 0.0) == []
    worker.receive(0, Lease(2, None, True, views(2)), 0.0)
    assert worker.phase == "finished"
    assert worker.tick(0.0) == []
