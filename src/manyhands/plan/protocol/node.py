"""A simulated process: a machine, a clock that runs at its own rate, and the parameters of its shards as digests."""

from __future__ import annotations

from manyhands.core.chunks import Chunks
from manyhands.core.coordinator import Coordinator
from manyhands.core.host import Host
from manyhands.core.messages import Entry, State
from manyhands.core.pushes import Pushes

__all__ = ["Data", "Node", "empty_state"]


class Data:
    """The parameters of one shard on one server: which chunks made them, in which order."""

    __slots__ = ("chunks", "digests", "epoch", "index", "version")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.index = 0
        self.version = 0
        self.chunks: set[int] = set()
        self.digests = [0]
        """By index: equal digests mean the same entries in the same order."""

    def __repr__(self) -> str:
        return f"<epoch {self.epoch}, version {self.version}, chunks {sorted(self.chunks)}>"

    def copy(self, epoch: int) -> Data:
        """The same parameters, in another place."""
        other = Data(epoch)
        other.index, other.version = self.index, self.version
        other.chunks, other.digests = set(self.chunks), list(self.digests)
        return other

    def execute(self, entry: Entry) -> None:
        """What applying the update does."""
        decision = entry.decision
        what = (0.0, False, 0.0) if decision is None else (decision.scale, decision.step, decision.compensation)
        self.digests.append(hash((self.digests[-1], entry.chunk, entry.update, *what)))
        self.index += 1
        self.version += what[1]
        self.chunks.add(entry.chunk)


class Node:
    """A process. One that died is replaced by another one with another number."""

    __slots__ = ("alive", "data", "machine", "number", "offset", "paused_until", "rate", "speed")

    def __init__(self, number: int, machine: Coordinator | Host | Pushes, rate: float, offset: float) -> None:
        self.number = number
        self.machine = machine
        self.rate = rate
        self.offset = offset
        self.alive = True
        self.paused_until = 0.0
        self.speed = 1.0
        self.data: dict[int, Data] = {}

    def __str__(self) -> str:
        kinds = {Coordinator: "coordinator", Host: "server", Pushes: "worker"}
        return f"{next(word for kind, word in kinds.items() if isinstance(self.machine, kind))}-{self.number}"


def empty_state(shard: int) -> State:
    """What the checkpoint 0 holds."""
    return State(shard, 0, 0, 0, 0, Chunks(), Data(0))
