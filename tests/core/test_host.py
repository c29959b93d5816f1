"""A server as a whole: what it does with a grant, and that a checkpoint is written once, however often asked for."""

from __future__ import annotations

from manyhands.core.chunks import Chunks
from manyhands.core.host import Host
from manyhands.core.messages import Beat, Grant, Push, Pushed, Report, Saved, Send, Snapshot, State, Timing, View, Views
from manyhands.core.policies import Plain
from manyhands.core.replication import Load, Save

COORDINATOR, WORKER = 0, 100
TIMING = Timing(beat_s=0.2, lease_s=1.0)
EMPTY = State(0, 0, 0, 0, 0, Chunks())


def views(term: int, primary: int, backup: int | None = None) -> Views:
    return Views(1, (View(0, 1, term, primary, backup, 0), View(1, 1, term, 7, 8, 0)))


def primary() -> Host:
    host = Host(me=1, coordinator=COORDINATOR, shards=2, policy=Plain(), timing=TIMING)
    assert host.receive(COORDINATOR, Grant(5.0, views(1, 1)), 5.5) == [Load(0, 1, 0)]
    host.loaded(1, EMPTY, 5.5)
    return host


def test_a_lease_counts_from_the_beat_and_not_from_the_answer() -> None:
    host = primary()
    assert Send(WORKER, Pushed(0, 1, 1, 0)) in host.receive(WORKER, Push(0, 1, 1, 0, 0, None), 5.9)
    assert host.receive(WORKER, Push(0, 1, 1, 0, 0, None), 6.0) == []


def test_what_a_grant_takes_away_is_not_acknowledged_with_its_time() -> None:
    host = primary()
    host.receive(WORKER, Push(0, 1, 1, 0, 0, None), 6.5)
    actions = host.receive(COORDINATOR, Grant(6.4, views(2, 9)), 6.6)
    assert [action for action in actions if isinstance(action, Send)] == []


def test_a_primary_reports_how_its_backup_does() -> None:
    host = primary()
    assert host.tick(5.6) == [Send(COORDINATOR, Beat(5.6, ()))]
    host.receive(COORDINATOR, views(2, 1, 3), 5.7)
    assert host.tick(5.8) == [Send(COORDINATOR, Beat(5.8, (Report(0, 2, "joining"),)))]


def test_a_checkpoint_is_written_once_and_answered_every_time() -> None:
    host, question = primary(), Snapshot(0, 1, 1, 4, Chunks())
    (save,) = host.receive(COORDINATOR, question, 5.6)
    assert isinstance(save, Save)
    assert host.receive(COORDINATOR, question, 5.6) == [], "it is being written"
    host.not_saved(save.state)
    assert host.receive(COORDINATOR, question, 5.6) == [save]
    answer = [Send(COORDINATOR, Saved(0, 1, 4))]
    assert host.saved(4, save.state) == answer
    assert host.receive(COORDINATOR, question, 5.6) == answer
