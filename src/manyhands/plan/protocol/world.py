"""A simulated run: processes with their own clocks, a network that loses, doubles and delays, and faults.

Everything that happens is decided by the scenario and one random stream, in the order of one queue of events; so the
same seed is the same run, event by event.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from manyhands.core.coordinator import Completed, Coordinator, RolledBack
from manyhands.core.host import Host
from manyhands.core.leases import Leases
from manyhands.core.messages import Message, Pulled, Pushed, Send, State
from manyhands.core.pushes import Compute, Pushes
from manyhands.core.replication import Discard, Execute, Install, Load, Save
from manyhands.plan.protocol.faults import strike
from manyhands.plan.protocol.invariants import Computed, Invariants, Violation
from manyhands.plan.protocol.node import Data, Node, empty_state
from manyhands.plan.protocol.scenario import CALM_S, TIMING, Fault, Scenario

__all__ = ["COORDINATOR", "World"]

COORDINATOR = 0
DELAY_S = 0.01
DISK_S = 0.05
EVENTS = 50_000  # a run that has not finished by then runs in a circle


class World:
    """All processes of a run, and what is under way between them."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        self.scenario = scenario
        self.trace = trace
        self.rng = random.Random(scenario.seed + 1)
        self.now = 0.0
        self.events = 0
        self.counts: Counter[str] = Counter()
        """What happened in this run, for those who want to know that it did."""
        self.cuts: dict[tuple[int, int], float] = {}
        """Links, in one direction, and until when they lose everything."""
        self.nodes: dict[int, Node] = {}
        self._queue: list[tuple[float, int, Node | None, str, Any]] = []
        self._sequence = 0
        self._numbers = 0
        self.disk = {(0, shard): empty_state(shard) for shard in range(scenario.shards)}
        """By checkpoint and shard."""
        self.coordinator = Coordinator(
            shards=scenario.shards,
            chunks=scenario.chunks,
            checkpoint_every=scenario.checkpoint_every,
            timing=TIMING,
            leases=Leases(horizon=0, duration_s=1.5, speculate_after_s=scenario.speculate_after_s),
        )
        self.invariants = Invariants(self.coordinator, self.nodes, scenario.policy, self.counts)

    def run(self) -> None:
        """Until all work is finished. Raises ``Violation``."""
        scenario = self.scenario
        center = self._add(self.coordinator)
        servers = [self.add_server() for _ in range(scenario.servers)]
        for _ in range(scenario.workers):
            self.add_worker()
        for fault in scenario.faults:
            self.schedule(fault.at, None, "fault", fault)
        self._perform(center, self.coordinator.start([server.number for server in servers], self._clock(center)))
        self.invariants.coordinated(None)
        while self._queue:
            at, _, node, kind, what = heapq.heappop(self._queue)
            if node is not None:
                if not node.alive:
                    continue
                if at < node.paused_until:
                    self.schedule(node.paused_until, node, kind, what)
                    continue
            self.now = at
            self.events += 1
            if self.trace is not None:
                self.trace.append(f"{at:9.4f}  {node or '-'} {kind} {'' if what is None else what}")
            self._happen(node, kind, what)
            if self.is_finished():
                self.invariants.finished()
                return
            if at > scenario.calm_at + CALM_S or self.events > EVENTS:
                break
        raise Violation(f"the run does not finish: {self.now - scenario.calm_at:.1f} s after the last fault it stands")

    def is_finished(self) -> bool:
        """Whether everybody knows that all is done."""
        return self.coordinator.finished and all(
            node.machine.phase == "finished"
            for node in self.nodes.values()
            if node.alive and isinstance(node.machine, Pushes)
        )

    def add_server(self) -> Node:
        """Start a server process."""
        shards, policy = self.scenario.shards, self.scenario.policy
        return self._add(Host(me=self._numbers, coordinator=COORDINATOR, shards=shards, policy=policy, timing=TIMING))

    def add_worker(self) -> Node:
        """Start a worker process."""
        pushes = Pushes(me=self._numbers, coordinator=COORDINATOR, shards=self.scenario.shards, timing=TIMING)
        node = self._add(pushes)
        node.speed = self.rng.choice((0.5, 1.0, 1.0, 4.0))
        self._perform(node, pushes.start())
        return node

    def living(self, kind: type) -> list[Node]:
        """The processes of a kind."""
        return [node for node in self.nodes.values() if node.alive and isinstance(node.machine, kind)]

    def schedule(self, at: float, node: Node | None, kind: str, what: Any = None) -> None:
        """Let something happen to ``node`` later, if it lives then."""
        self._sequence += 1
        heapq.heappush(self._queue, (at, self._sequence, node, kind, what))

    def _add(self, machine: Coordinator | Host | Pushes) -> Node:
        rng = self.rng
        rate = 1 + TIMING.drift * rng.choice((-1, 0, 1, rng.uniform(-1, 1)))
        node = Node(self._numbers, machine, rate, rng.uniform(0, 1000))
        self.nodes[node.number] = node
        self._numbers += 1
        self.schedule(self.now + rng.random() * TIMING.beat_s, node, "tick")
        return node

    def _clock(self, node: Node) -> float:
        return node.offset + node.rate * self.now

    # -- events ---------------------------------------------------------------------------------------------------
    def _happen(self, node: Node | None, kind: str, what: Any) -> None:
        if node is None:
            self._fault(kind, what)
            return
        machine = node.machine
        clock = self._clock(node)
        actions: Iterable[Any]
        message: Message | None = None
        if kind == "message":
            sender, message = what
            actions = machine.receive(sender, message, clock)
        elif kind == "tick":
            self.schedule(self.now + TIMING.beat_s / node.rate, node, "tick")
            actions = machine.tick(clock)
        elif kind == "computed":
            assert isinstance(machine, Pushes)
            ticket, update = what
            actions = machine.computed(ticket, update, clock)
        elif kind == "died":
            assert isinstance(machine, Coordinator)
            actions = machine.died(what, clock)
        elif kind == "saved":
            assert isinstance(machine, Host)
            actions = machine.saved(*what)
        else:
            assert isinstance(machine, Host)
            actions = self._loaded(node, machine, what, clock)
        self._perform(node, actions)
        if type(machine) is Host:
            self.invariants.served(node, machine)
        elif machine is self.coordinator:
            self.invariants.coordinated(message)

    def _fault(self, kind: str, what: Any) -> None:
        if kind == "fault":
            assert isinstance(what, Fault)
            strike(self, what)
        elif kind == "server":
            self.add_server()
        else:
            self.add_worker()

    def _loaded(self, node: Node, host: Host, what: Load, clock: float) -> list[Any]:
        state = self.disk[what.checkpoint, what.shard]
        actions = host.loaded(what.epoch, state, clock)
        if host.replicas[what.shard].epoch == what.epoch and what.shard not in node.data:
            self.invariants.loads(node, what.epoch, state)
            node.data[what.shard] = state.data.copy(what.epoch)
        return actions

    # -- actions --------------------------------------------------------------------------------------------------
    def _perform(self, node: Node, actions: Iterable[Any]) -> None:
        for action in actions:
            kind = type(action)
            if self.trace is not None:
                self.trace.append(f"{'':9}    {action}")
            if kind is Send:
                self._send(node, action.to, action.message)
            elif kind is Execute:
                self.invariants.executes(node, action.shard, action.entry)
                node.data[action.shard].execute(action.entry)
            elif kind is Compute:
                self._compute(node, action)
            elif kind is Install:
                state: State = action.state
                node.data[state.shard] = state.data.copy(state.epoch)
            elif kind is Load:
                node.data.pop(action.shard, None)
                self.schedule(self.now + self.rng.random() * DISK_S, node, "loaded", action)
            elif kind is Discard:
                node.data.pop(action.shard, None)
            elif kind is Save:
                self.invariants.saves(node, action.checkpoint, action.state)
                self.disk[action.checkpoint, action.state.shard] = self._with_data(node, action.state)
                what = (action.checkpoint, action.state)
                self.schedule(self.now + self.rng.random() * DISK_S, node, "saved", what)
            elif kind is RolledBack:
                self.counts["rollbacks"] += 1
                self.invariants.rolled_back(action)
            else:
                assert kind is Completed
                self.counts["checkpoints"] += 1
                written = [self.disk.get((action.checkpoint, shard)) for shard in range(self.scenario.shards)]
                self.invariants.completes(action, written)

    def _compute(self, node: Node, work: Compute) -> None:
        self.invariants.computes(node, work)
        versions = tuple(pulled.version for pulled in work.pulled)
        self.invariants.computed.append(Computed(work.epoch, work.chunk, versions))
        seconds = self.scenario.compute_s * node.speed * self.rng.uniform(0.5, 1.5)
        what = (work.ticket, len(self.invariants.computed) - 1)
        self.schedule(self.now + seconds, node, "computed", what)

    def _with_data(self, node: Node, state: State) -> State:
        data: Data = node.data[state.shard]
        return replace(state, data=data.copy(data.epoch))

    def _send(self, node: Node, to: int, message: Message) -> None:
        kind = type(message)
        if kind is Pushed:
            self.invariants.acknowledges(node, message)  # type: ignore[arg-type]
        elif kind is Pulled:
            assert isinstance(message, Pulled)
            self.invariants.answers(node, message)
            message = replace(message, data=node.data[message.shard].epoch)
        elif kind is State:
            assert isinstance(message, State)
            message = self._with_data(node, message)
        scenario, rng = self.scenario, self.rng
        if self.now < scenario.calm_at:
            if self.cuts.get((node.number, to), 0.0) > self.now or rng.random() < scenario.loss:
                return
            if rng.random() < scenario.duplication:
                self._deliver(node, to, message, rng.choice((1, 30, 300)))
        self._deliver(node, to, message, rng.choice((30, 100, 300)) if rng.random() < scenario.straggling else 1)

    def _deliver(self, node: Node, to: int, message: Message, slowness: int) -> None:
        delay = DELAY_S * slowness * (0.1 + self.rng.random())
        self.schedule(self.now + delay, self.nodes[to], "message", (node.number, message))
