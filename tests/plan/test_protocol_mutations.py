"""Planted bugs: each breaks one rule of the protocol, by a wrong method in the place of a right one. All are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from manyhands.core.chunks import ChunkSet
from manyhands.core.coordinator import Coordinator
from manyhands.core.host import Host
from manyhands.core.leases import Leases
from manyhands.core.messages import (
    Ask,
    Beat,
    Grant,
    Push,
    Pushed,
    Replicate,
    Replicated,
    Saved,
    Send,
    Snapshot,
    State,
    Timing,
    View,
    Views,
)
from manyhands.core.policies import Apply, Moment
from manyhands.core.pushes import Pushes
from manyhands.core.replication import Replica, Save
from manyhands.core.views import ViewService
from manyhands.plan.protocol.campaign import Failure, run_seed

SEEDS = 2000


@dataclass(frozen=True, slots=True)
class Mutation:
    """Put ``wrong`` in the place of ``owner.name``."""

    owner: type
    name: str
    wrong: Any


MUTATIONS: dict[str, Mutation] = {}


def plant(owner: type, name: str) -> Callable[[Any], Any]:
    """Register a function (or a property) as a mutation under its own name."""

    def register(wrong: Any) -> Any:
        word = (wrong.fget if isinstance(wrong, property) else wrong).__name__.replace("_", " ")
        MUTATIONS[word] = Mutation(owner, name, wrong)
        return wrong

    return register


# The right methods, for those mutations that only add something wrong to them.
push, replicate, take_state, acknowledge = Replica.push, Replica.replicate, Replica.take_state, Replica._acknowledge
take, adopt, backup_state, note_replicated = Replica._take, Replica.adopt, Replica.backup_state, Replica.note_replicated
ask, saved, beat, pushed = Coordinator._ask, Coordinator._saved, ViewService.beat, Pushes._pushed
take_free, versions_in_use = Leases._take_free, Replica._versions_in_use


# -- each chunk once ----------------------------------------------------------------------------------------------
@plant(Replica, "push")
def a_repeated_push_is_applied_again(self: Replica, worker: int, message: Push, now: float) -> list[Any]:
    if self._is_addressed(message) and message.chunk in self.applied:
        return self._judge(message, now)
    return push(self, worker, message, now)


@plant(Replica, "_take")
def a_copy_forgets_which_chunks_it_has(self: Replica, state: State) -> None:
    take(self, state)
    self.applied = ChunkSet()


@plant(Replica, "replicate")
def a_backup_applies_an_entry_twice(self: Replica, primary: int, message: Replicate) -> list[Any]:
    if message.term == self.term and self.follows and self.epoch and message.entries[0].index <= self.index:
        return self._execute(message.entries[0])
    return replicate(self, primary, message)


@plant(Replica, "push")
def a_repeated_push_is_acknowledged_too_early(self: Replica, worker: int, message: Push, now: float) -> list[Any]:
    if self._is_addressed(message) and message.chunk in self.applied and now < self.lease_until:
        return [Send(worker, Pushed(self.shard, self.epoch, self.term, message.chunk))]
    return push(self, worker, message, now)


# -- replication --------------------------------------------------------------------------------------------------
@plant(Replica, "_acknowledge")
def a_primary_does_not_wait_for_its_backup(self: Replica, chunk: int, now: float) -> list[Any]:
    self.pending.pop(chunk, None)
    return acknowledge(self, chunk, now)


@plant(Replica, "backup_state")
def a_primary_goes_on_alone_when_its_backup_is_stuck(self: Replica, now: float) -> Any:
    state = backup_state(self, now)
    if state == "stuck":
        self.pending.clear()
    return state


@plant(Replica, "replicate")
def a_backup_leaves_a_gap(self: Replica, primary: int, message: Replicate) -> list[Any]:
    if message.term == self.term and self.follows and self.epoch and message.entries[0].index > self.index:
        done = [action for entry in message.entries for action in self._execute(entry)]
        return [*done, Send(primary, Replicated(self.shard, self.term, self.index))]
    return replicate(self, primary, message)


@plant(Replica, "replicate")
def a_backup_decides_by_itself(self: Replica, primary: int, message: Replicate) -> list[Any]:
    verdict = self.policy.judge(0, Moment())
    decision = verdict if isinstance(verdict, Apply) else None
    entries = tuple(replace(entry, decision=decision) for entry in message.entries)
    return replicate(self, primary, replace(message, entries=entries))


@plant(Replica, "_acknowledge")
def a_primary_goes_on_alone_while_its_backup_joins(self: Replica, chunk: int, now: float) -> list[Any]:
    if self.in_sync or chunk not in self.applied or now >= self.lease_until:
        return acknowledge(self, chunk, now)
    message = Pushed(self.shard, self.epoch, self.term, chunk)
    return [Send(worker, message) for worker in self.waiting.pop(chunk, ())]


@plant(Replica, "backup_state")
def a_backup_is_in_sync_before_it_has_anything(self: Replica, now: float) -> Any:
    return "in sync" if backup_state(self, now) == "joining" else backup_state(self, now)


@plant(Replica, "adopt")
def a_new_backup_keeps_what_it_had(self: Replica, view: View, now: float) -> list[Any]:
    if view.term > self.term and view.backup == self.me and self.epoch:
        self.term, self.view = view.term, view
        return []
    return adopt(self, view, now)


@plant(Replica, "note_replicated")
def an_answer_of_another_term_counts(self: Replica, backup: int, message: Replicated, now: float) -> list[Any]:
    return note_replicated(self, backup, replace(message, term=self.term), now)


@plant(Replica, "_judge_held")
def what_is_held_is_never_judged_again(self: Replica, now: float) -> list[Any]:
    return []


@plant(Replica, "_versions_in_use")
def what_has_come_for_a_step_waits_for_ever(self: Replica) -> list[int]:
    return versions_in_use(self) or [self.version]


# -- fencing and time ---------------------------------------------------------------------------------------------
@plant(Replica, "take_state")
def a_backup_takes_a_state_of_an_old_term(self: Replica, primary: int, message: State) -> list[Any]:
    return take_state(self, primary, replace(message, term=self.term))


@plant(Replica, "replicate")
def a_backup_takes_entries_of_an_old_term(self: Replica, primary: int, message: Replicate) -> list[Any]:
    return replicate(self, primary, replace(message, term=self.term))


@plant(Replica, "adopt")
def an_old_view_is_adopted(self: Replica, view: View, now: float) -> list[Any]:
    self.term = min(self.term, view.term - 1)
    return adopt(self, view, now)


@plant(Host, "_granted")
def a_lease_is_used_before_its_views_are_read(self: Host, message: Grant, now: float) -> list[Any]:
    until = message.sent + self.timing.lease_s
    actions = [action for replica in self.replicas for action in replica.renew(until, now)]
    return actions + self._adopt(message.views, now)


@plant(Replica, "renew")
def a_lease_never_ends(self: Replica, until: float, now: float) -> list[Any]:
    self.lease_until = float("inf")
    return [action for chunk in list(self.waiting) for action in self._acknowledge(chunk, now)]


@plant(Host, "_granted")
def a_lease_begins_when_the_grant_arrives(self: Host, message: Grant, now: float) -> list[Any]:
    actions = self._adopt(message.views, now)
    until = now + self.timing.lease_s
    return actions + [action for replica in self.replicas for action in replica.renew(until, now)]


@plant(Timing, "wait_s")
@property
def the_coordinator_trusts_all_clocks(self: Timing) -> float:
    return self.lease_s


@plant(Timing, "wait_s")
@property
def the_coordinator_is_impatient(self: Timing) -> float:
    return self.lease_s / 2


@plant(ViewService, "beat")
def a_grant_has_only_the_views_that_name_the_server(
    self: ViewService, server: int, message: Beat, now: float
) -> list[Send]:
    *sends, last = beat(self, server, message, now) or [None]
    if last is None or not isinstance(last.message, Grant):
        return []
    views = tuple(view for view in self.views if server in (view.primary, view.backup))
    return [*sends, Send(server, Grant(message.sent, Views(self.epoch, views)))]


@plant(Replica, "_is_addressed")
def a_server_takes_pushes_of_any_term(self: Replica, message: Any) -> bool:
    return self.leads


# -- election -----------------------------------------------------------------------------------------------------
@plant(ViewService, "_may_promote")
def any_backup_is_promoted(self: ViewService, view: View) -> bool:
    return view.backup in self.until


@plant(ViewService, "_change")
def a_new_backup_inherits_the_word_in_sync(
    self: ViewService, view: View, primary: int | None, backup: int | None
) -> None:
    self.views[view.shard] = replace(
        view, epoch=self.epoch, term=view.term + 1, primary=primary, backup=backup, checkpoint=self.checkpoint
    )


@plant(ViewService, "_change")
def a_term_stays_the_same(self: ViewService, view: View, primary: int | None, backup: int | None) -> None:
    self.in_sync.discard(view.shard)
    term = max(view.term, 1)
    self.views[view.shard] = View(view.shard, self.epoch, term, primary, backup, self.checkpoint)


@plant(ViewService, "beat")
def a_report_of_an_old_term_is_believed(self: ViewService, server: int, message: Beat, now: float) -> list[Send]:
    reports = tuple(replace(report, term=self.views[report.shard].term) for report in message.reports)
    return beat(self, server, replace(message, reports=reports), now)


# -- going back ---------------------------------------------------------------------------------------------------
@plant(ViewService, "_go_back")
def only_the_lost_shard_goes_back(self: ViewService) -> None:
    self.epoch += 1
    for view in list(self.views):
        if view.primary not in self.until:
            primary = self._spare()
            self._change(view, primary, self._spare(primary))


@plant(Replica, "adopt")
def a_server_does_not_go_back(self: Replica, view: View, now: float) -> list[Any]:
    if self.epoch and view.epoch > self.epoch and view.primary == self.me:
        self.epoch = view.epoch
    return adopt(self, view, now)


@plant(Leases, "rollback")
def the_leases_do_not_go_back(self: Leases, done: Any) -> None:
    self._leases.clear()


@plant(Coordinator, "_ask")
def what_was_done_before_still_counts(self: Coordinator, worker: int, message: Ask, now: float) -> list[Any]:
    return ask(self, worker, replace(message, epoch=self.service.epoch), now)


@plant(Pushes, "_is_mine")
def a_worker_takes_answers_of_another_epoch(self: Pushes, message: Any) -> bool:
    return bool(message.chunk == self.chunk)


@plant(Pushes, "_look")
def a_worker_keeps_its_chunk_in_a_new_epoch(self: Pushes, message: Views, now: float) -> list[Any]:
    if message.epoch < self.epoch:
        return []
    return self._request(sorted(self.missing & self._learn(message)), now)


# -- checkpoints and leases ---------------------------------------------------------------------------------------
@plant(Coordinator, "_saved")
def a_checkpoint_is_complete_with_its_first_shard(self: Coordinator, message: Saved) -> list[Any]:
    if self._saving is not None:
        self._saving.missing &= {message.shard}
    return saved(self, message)


@plant(Replica, "snapshot")
def a_checkpoint_holds_what_happens_to_be_there(self: Replica, message: Snapshot) -> list[Any]:
    return [Save(message.checkpoint, self._state())] if self.leads and message.epoch == self.epoch else []


@plant(Pushes, "_pushed")
def a_chunk_is_done_when_one_shard_has_it(self: Pushes, message: Any) -> list[Any]:
    if self.phase == "pushing" and self._is_mine(message):
        self.missing &= {message.shard}
    return pushed(self, message)


@plant(Leases, "expire")
def a_lease_on_a_chunk_never_runs_out(self: Leases, now: float) -> list[Any]:
    return []


@plant(Leases, "_take_free")
def a_chunk_that_comes_back_is_lost(self: Leases) -> int | None:
    self._returned.clear()
    return take_free(self)


# -- the search ---------------------------------------------------------------------------------------------------
def first_failure(seeds: int) -> Failure | None:
    for seed in range(seeds):
        if (failure := run_seed(seed)[1]) is not None:
            return failure
    return None


@pytest.mark.parametrize("word", MUTATIONS)
def test_a_planted_bug_is_found(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[word]
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.wrong)
    failure = first_failure(SEEDS)
    assert failure is not None, f"not found in {SEEDS} seeds"
    assert failure.what.startswith("Violation: "), f"found by accident: {failure}"
    print(f"{word}: seed {failure.seed}: {failure.what}")
