"""The view service under any sequence of beats, deaths and silence: terms grow, nothing unsafe is promoted."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from manyhands.core.messages import Beat, Grant, Report, Send, Timing, View
from manyhands.core.views import ViewService

TIMING = Timing(beat_s=0.2, lease_s=1.0, drift=0.1)
SHARDS = 3
SERVERS = st.integers(1, 6)


class Service(RuleBasedStateMachine):
    """Servers beat, fall silent, die and return; every change of a view is judged when it happens."""

    def __init__(self) -> None:
        super().__init__()
        self.service = ViewService(shards=SHARDS, timing=TIMING)
        self.now = 0.0
        self.granted: dict[int, float] = {}  # server -> the end of its lease, on the slowest clock
        self.dead: set[int] = set()
        self.complaint: tuple[int, int] | None = None
        self.service.start([1, 2, 3], 0.0)
        self.before = (self.service.epoch, list(self.service.views), set(self.service.in_sync))

    def judge(self, sends: list[Send]) -> None:
        epoch, views, in_sync = self.before
        for old, new in zip(views, self.service.views, strict=True):
            if new != old:
                self.judge_change(old, new, may_promote=old.shard in in_sync, went_back=self.service.epoch > epoch)
                assert {send.to for send in sends} >= set(self.service.until), "somebody was not told"
        self.before = (self.service.epoch, list(self.service.views), set(self.service.in_sync))

    def judge_change(self, old: View, new: View, may_promote: bool, went_back: bool) -> None:
        assert new.term > old.term
        assert new.shard not in self.service.in_sync, "a new backup cannot be in sync yet"
        if old.primary is not None and new.primary != old.primary:
            assert old.primary in self.dead or self.granted.get(old.primary, 0.0) <= self.now, "its lease still runs"
            assert went_back or (may_promote and new.primary == old.backup)
        if went_back:
            assert new.checkpoint == self.service.checkpoint

    @rule(server=SERVERS, report=st.sampled_from(["joining", "in sync", "stuck"]), late=st.booleans())
    def a_server_beats(self, server: int, report: str, late: bool) -> None:
        if server in self.dead:
            assert self.service.beat(server, Beat(self.now, ()), self.now) == []
            return
        mine = [view for view in self.service.views if view.primary == server and view.backup is not None]
        reports = tuple(Report(view.shard, view.term - late, report) for view in mine)  # type: ignore[arg-type]
        before = set(self.service.in_sync)
        sends = self.service.beat(server, Beat(self.now, reports), self.now)
        grant = sends[-1].message
        assert sends[-1].to == server and isinstance(grant, Grant)
        assert grant.views.views == tuple(self.service.views)
        if late:
            assert self.service.in_sync <= before, "a report of an old term was believed"
        self.granted[server] = self.now + TIMING.lease_s * (1 + TIMING.drift) / (1 - TIMING.drift)
        self.judge(sends)

    @rule(server=SERVERS)
    def a_server_dies(self, server: int) -> None:
        self.dead.add(server)
        self.judge(self.service.died(server, self.now))
        assert all(server not in (view.primary, view.backup) for view in self.service.views)

    @rule(seconds=st.sampled_from([0.2, 0.5]), ticks=st.integers(1, 4))
    def time_goes_by(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.now += seconds
            self.judge(self.service.tick(self.now))

    @rule()
    def the_coordinator_sleeps(self) -> None:
        self.now += 60.0
        before = list(self.service.views)
        sends = self.service.tick(self.now)
        kept = [(old.primary, new.primary) for old, new in zip(before, self.service.views, strict=True)]
        assert all(old in (None, new) for old, new in kept), "its own sleep was taken for the silence of others"
        self.judge(sends)

    @rule()
    def a_checkpoint_is_completed(self) -> None:
        self.service.checkpoint += 1

    @invariant()
    def the_views_make_sense(self) -> None:
        living = set(self.service.until)
        assert not living & self.dead
        for view in self.service.views:
            assert view.epoch == self.service.epoch, "shards of two epochs"
            assert view.primary is None or view.primary != view.backup
            assert {view.primary, view.backup} - {None} <= living
            assert view.shard not in self.service.in_sync or view.backup is not None

    def teardown(self) -> None:
        """With servers enough, all shards have a primary and a backup."""
        for server in (11, 12):
            self.judge(self.service.beat(server, Beat(0.0, ()), self.now))
        assert all(view.primary is not None and view.backup is not None for view in self.service.views)


TestService = Service.TestCase
TestService.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_work_is_spread_over_the_servers() -> None:
    service = ViewService(shards=3, timing=TIMING)
    service.start([1, 2, 3], 0.0)
    assert sorted(view.primary or 0 for view in service.views) == [1, 2, 3]
    assert sorted(view.backup or 0 for view in service.views) == [1, 2, 3]


def test_a_silent_primary_is_replaced_by_its_backup_and_redundancy_restored() -> None:
    service = ViewService(shards=1, timing=TIMING)
    service.start([1, 2, 3], 0.0)
    (view,) = service.views
    assert (view.primary, view.backup) == (1, 2)
    service.beat(1, Beat(0.0, (Report(0, view.term, "in sync"),)), 0.0)
    now = 0.0
    while now < TIMING.wait_s - 0.2:
        now += 0.2
        for server in (2, 3):
            service.beat(server, Beat(0.0, ()), now)
        service.tick(now)
        assert service.views[0].primary == 1
    service.tick(now + 0.2)
    (after,) = service.views
    assert (after.epoch, after.primary, after.backup) == (1, 2, 3)
    assert after.term > view.term


def test_a_backup_that_its_primary_cannot_reach_is_replaced_and_left_alone_for_a_while() -> None:
    service = ViewService(shards=1, timing=TIMING)
    service.start([1, 2], 0.0)
    service.beat(1, Beat(0.0, (Report(0, service.views[0].term, "stuck"),)), 0.0)
    assert (service.views[0].primary, service.views[0].backup) == (1, None), "there is no other"
    service.beat(3, Beat(0.0, ()), 0.1)
    assert service.views[0].backup == 3
    service.died(3, 0.2)
    assert service.views[0].backup is None
    service.beat(2, Beat(0.0, ()), TIMING.transfer_s + 0.1)
    assert service.views[0].backup == 2


def test_without_a_backup_in_sync_all_shards_go_back_together() -> None:
    service = ViewService(shards=2, timing=TIMING)
    service.start([1, 2, 3], 0.0)
    service.checkpoint = 5
    lost = service.views[0].primary
    assert lost is not None
    service.died(lost, 0.0)
    assert service.epoch == 2
    assert [(view.epoch, view.checkpoint) for view in service.views] == [(2, 5), (2, 5)]
