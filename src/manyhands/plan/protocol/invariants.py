"""What must hold after every event, seen from outside: by somebody who knows all processes at every moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NoReturn

from manyhands.core.coordinator import Completed, Coordinator, RolledBack
from manyhands.core.host import Host
from manyhands.core.messages import Ask, Entry, Message, Pulled, Pushed, State, View
from manyhands.core.policies import Bounded, Policy
from manyhands.core.pushes import Compute
from manyhands.plan.protocol.node import Data, Node

__all__ = ["Computed", "Invariants", "Violation"]


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What an update was made of."""

    epoch: int
    chunk: int
    versions: tuple[int, ...]


class Invariants:
    """Hears of everything that happens; raises ``Violation`` as soon as a promise is broken."""

    def __init__(self, coordinator: Coordinator, nodes: dict[int, Node], policy: Policy, counts: Counter[str]) -> None:
        self.counts = counts
        self.service = coordinator.service
        self.coordinator = coordinator
        self.nodes = nodes
        self.oldest = policy.staleness if isinstance(policy, Bounded) else None
        self.computed: list[Computed] = []
        """By update."""
        self.acknowledged_by: dict[tuple[int, int], int] = {}
        """By shard and term."""
        self.acknowledged: list[set[int]] = [set() for _ in range(coordinator.shards)]
        """By shard, in the epoch that counts."""
        self.begins: dict[int, set[int]] = {0: set(), 1: set()}
        """By epoch: the chunks that it begins with."""
        self.completed: dict[int, set[int]] = {0: set()}
        """By checkpoint."""
        self.views: list[View] = []

    # -- on servers -----------------------------------------------------------------------------------------------
    def executes(self, node: Node, shard: int, entry: Entry) -> None:
        """Before the parameters change."""
        data = node.data.get(shard)
        if data is None:
            fail(f"{node} applies to shard {shard} without having it")
        if entry.chunk in data.chunks:
            fail(f"chunk {entry.chunk} has a second effect on shard {shard} at {node}")
        if entry.index != data.index + 1:
            fail(f"{node} applies entry {entry.index} of shard {shard} after entry {data.index}")
        made = self.computed[entry.update]
        if made.epoch != data.epoch:
            fail(f"{node} applies an update of epoch {made.epoch} to shard {shard} of epoch {data.epoch}")
        if made.chunk != entry.chunk:
            fail(f"{node} applies the update of chunk {made.chunk} as chunk {entry.chunk}")
        if self.oldest is not None and entry.decision is not None:
            staleness = data.version - made.versions[shard]
            if staleness > self.oldest:
                fail(f"{node} applies an update that is {staleness} steps old; the bound is {self.oldest}")

    def served(self, node: Node, host: Host) -> None:
        """After each event on a server."""
        for shard, data in node.data.items():
            replica = host.replicas[shard]
            same = replica.index == data.index and replica.version == data.version and replica.epoch == data.epoch
            if not same or len(replica.applied) != len(data.chunks):
                fail(f"{node} does not know what its shard {shard} holds: {replica} against {sorted(data.chunks)}")
            is_primary = self.service.views[shard].primary == node.number and data.epoch == self.service.epoch
            if is_primary and not self.acknowledged[shard] <= data.chunks:
                fail(f"{node} has lost acknowledged chunks: {self.acknowledged[shard] - data.chunks}")
            self._check_copies(shard)

    def loads(self, node: Node, epoch: int, state: State) -> None:
        """Before a checkpoint becomes the beginning of an epoch."""
        if set(state.applied) != self.begins.get(epoch):
            fail(f"{node} begins epoch {epoch} of shard {state.shard} with {state.applied}")

    def saves(self, node: Node, checkpoint: int, state: State) -> None:
        """Before a shard is written."""
        chunks = set(state.applied)
        if chunks != node.data[state.shard].chunks:
            fail(f"{node} writes {chunks} for shard {state.shard}, has {node.data[state.shard].chunks}")
        if self.completed.get(checkpoint, chunks) != chunks:
            fail(f"{node} changes the complete checkpoint {checkpoint} of shard {state.shard} to {chunks}")

    def answers(self, node: Node, message: Pulled) -> None:
        """A server sends parameters."""
        data = node.data.get(message.shard)
        if data is None or (data.epoch, data.version) != (message.epoch, message.version):
            fail(f"{node} sends parameters that it does not have: {message}")

    def acknowledges(self, node: Node, message: Pushed) -> None:
        """A server acknowledges a chunk."""
        shard, view = message.shard, self.service.views[message.shard]
        first = self.acknowledged_by.setdefault((shard, message.term), node.number)
        if first != node.number:
            fail(f"{node} and server-{first} both acknowledge for shard {shard} in term {message.term}")
        if view.primary != node.number:
            fail(f"{node} acknowledges for shard {shard} after its term {message.term} ended; now: {view}")
        data = node.data.get(shard)
        if data is None or message.chunk not in data.chunks:
            fail(f"{node} acknowledges chunk {message.chunk} of shard {shard} without having applied it")
        if message.epoch == self.service.epoch:
            self.acknowledged[shard].add(message.chunk)
        self._check_backup_has(node, message)

    def _check_backup_has(self, node: Node, message: Pushed) -> None:
        """Whoever acknowledges under a view with a backup has made sure of it, unless the backup knows of a newer
        term and has thrown its copy away."""
        assert isinstance(node.machine, Host)
        view = node.machine.replicas[message.shard].view
        if view is None or view.backup is None:
            return
        backup = self.nodes[view.backup]
        assert isinstance(backup.machine, Host)
        is_same_term = backup.machine.replicas[message.shard].term == message.term
        if is_same_term and message.chunk not in self._chunks(view.backup, message.shard):
            fail(f"{node} acknowledges chunk {message.chunk} of shard {message.shard}; its backup does not have it")

    # -- on workers -----------------------------------------------------------------------------------------------
    def computes(self, node: Node, work: Compute) -> None:
        """A worker computes with what it has pulled."""
        epochs = {pulled.data for pulled in work.pulled}
        if epochs != {work.epoch}:
            fail(f"{node} computes chunk {work.chunk} of epoch {work.epoch} with parameters of the epochs {epochs}")

    # -- on the coordinator ---------------------------------------------------------------------------------------
    def coordinated(self, message: Message | None) -> None:
        """After each event there."""
        if self.views != self.service.views:
            self._check_views()
            self.views = list(self.service.views)
        done = message.done if isinstance(message, Ask) else None
        if done is not None and done in self.coordinator.leases.done_chunks:
            for shard, acknowledged in enumerate(self.acknowledged):
                if done not in acknowledged:
                    fail(f"chunk {done} counts as done; shard {shard} has not acknowledged it in this epoch")

    def rolled_back(self, action: RolledBack) -> None:
        """The run goes back."""
        chunks = set(action.chunks)
        if self.completed.get(action.checkpoint) != chunks:
            fail(f"epoch {action.epoch} begins with a checkpoint that is not complete: {action}")
        self.begins[action.epoch] = chunks
        self.acknowledged = [set(chunks) for _ in self.acknowledged]
        if any(view.epoch != action.epoch for view in self.service.views):
            fail(f"not all shards go back: {self.service.views}")
        if set(self.coordinator.leases.done_chunks) != chunks or self.coordinator.leases.outstanding:
            fail(f"the leases did not go back to {sorted(chunks)}: {self.coordinator.leases}")

    def completes(self, action: Completed, written: list[State | None]) -> None:
        """A checkpoint is complete; ``written`` is what the disk has of each shard."""
        chunks = set(action.chunks)
        for shard, state in enumerate(written):
            if state is None or set(state.applied) != chunks:
                fail(f"checkpoint {action.checkpoint} of {action.chunks} has {state} for shard {shard}")
        self.completed[action.checkpoint] = chunks
        self._check_rest(chunks)

    def finished(self) -> None:
        """At the end."""
        self._check_rest(set(range(self.coordinator.chunks)))

    def _check_rest(self, chunks: set[int]) -> None:
        for view in self.service.views:
            has = self._chunks(view.primary, view.shard)
            is_loading = not has and self.begins[view.epoch] == chunks
            if has != chunks and not is_loading:
                fail(f"at rest, shard {view.shard} has {has}, not {chunks}")

    def _check_views(self) -> None:
        for before, view in zip(self.views, self.service.views, strict=False):
            if view == before:
                continue
            if view.term <= before.term:
                fail(f"a term did not grow: {before} became {view}")
            if before.epoch == view.epoch and before.primary not in (None, view.primary):
                self.counts["promotions"] += 1
                lost = self.acknowledged[view.shard] - self._chunks(view.primary, view.shard)
                if lost:
                    fail(f"the new primary of {view} does not have the acknowledged chunks {sorted(lost)}")
        for shard in range(len(self.service.views)):
            self._check_copies(shard)

    def _check_copies(self, shard: int) -> None:
        """A backup that may be promoted is a prefix of its primary."""
        if shard not in self.service.in_sync:
            return
        view = self.service.views[shard]
        primary, backup = self._data(view.primary, shard), self._data(view.backup, shard)
        if primary is None or backup is None:
            fail(f"shard {shard} counts as in sync, and somebody does not have it: {view}")
        if backup.index > primary.index or primary.digests[backup.index] != backup.digests[-1]:
            fail(f"the backup is not a prefix of its primary: {view}, {backup.chunks} and {primary.chunks}")
        if not self.acknowledged[shard] <= backup.chunks:
            fail(f"the backup lacks acknowledged chunks: {view}, {backup.chunks}, {self.acknowledged[shard]}")

    def _data(self, server: int | None, shard: int) -> Data | None:
        return None if server is None else self.nodes[server].data.get(shard)

    def _chunks(self, server: int | None, shard: int) -> set[int]:
        data = self._data(server, shard)
        return set() if data is None else data.chunks


def fail(what: str) -> NoReturn:
    """A promise is broken."""
    raise Violation(what)
