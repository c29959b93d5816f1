"""What coordinator, servers and workers say to each other about replicated shards: plain frozen data.

Every message may be lost, doubled, late or out of order. Processes have numbers that are never used again: one that
is restarted is a new one. ``update`` and ``data`` are opaque here; whoever moves the messages puts tensors there.

*term*: the number of a shard's view; only grows. *epoch*: how often the ledger has begun anew; what was said in an
earlier epoch is void. A view of a new epoch has a new term too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from manyhands.core.chunks import Chunks
from manyhands.core.policies import Apply
from manyhands.errors import UsageError

__all__ = [
    "Ask",
    "Beat",
    "Entry",
    "Grant",
    "Lease",
    "Message",
    "Pull",
    "Pulled",
    "Push",
    "Pushed",
    "Refused",
    "Replicate",
    "Replicated",
    "Report",
    "Saved",
    "Send",
    "Snapshot",
    "State",
    "Timing",
    "View",
    "Views",
    "Working",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times on which all agree, in seconds of whoever measures them."""

    beat_s: float = 0.2
    """How often a process looks after its affairs: beats, and repeats what got no answer."""
    lease_s: float = 1.0
    """How long a server may acknowledge after a beat that the coordinator has answered."""
    drift: float = 0.01
    """No clock runs faster than 1 + drift or slower than 1 - drift seconds per second."""
    retry_s: float = 2.0
    """How long a worker waits for a server before it repeats a pull or a push."""
    reading_s: float = 30.0
    """How long a server believes that a worker still computes with what it has read."""
    transfer_s: float = 30.0
    """How long the first copy of a state to a new backup may take."""

    def __post_init__(self) -> None:
        if not 0 < 2 * self.beat_s <= self.lease_s:
            raise UsageError(f"beat_s={self.beat_s}, lease_s={self.lease_s}: valid: two beats in a lease or more.")
        if not 0 <= self.drift < 1:
            raise UsageError(f"drift={self.drift}: valid: from 0 to below 1.")

    @property
    def wait_s(self) -> float:
        """How long the coordinator waits before it replaces a silent server: by then its lease has run out, even
        if its clock is the slowest and the coordinator's the fastest."""
        return self.lease_s * (1 + self.drift) / (1 - self.drift)


@dataclass(frozen=True, slots=True)
class View:
    """Who serves a shard. An epoch begins with the state of ``checkpoint``."""

    shard: int
    epoch: int
    term: int
    primary: int | None
    backup: int | None
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a shard's log: the one effect of a chunk. Its decision is the primary's; a backup follows it."""

    index: int
    term: int
    chunk: int
    decision: Apply | None
    """None: the update was dropped or left out. Without a step, the next entry with one takes it for both."""
    update: Any


# -- worker and coordinator ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ask:
    """A worker wants a chunk, and may have ``done`` one in ``epoch``. Repeated with the same ticket until answered."""

    ticket: int
    epoch: int
    done: int | None


@dataclass(frozen=True, slots=True)
class Views:
    """All views as they are now."""

    epoch: int
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer: a chunk, or None: ask again; or all work is finished."""

    ticket: int
    chunk: int | None
    finished: bool
    views: Views


@dataclass(frozen=True, slots=True)
class Working:
    """A worker wants to know the views; if it computes a chunk, its lease is renewed."""

    epoch: int
    chunk: int | None


# -- worker and server --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Pull:
    """A worker wants the parameters of a shard."""

    shard: int
    epoch: int
    term: int
    chunk: int
    has: int = 0
    """The number of the answer of this server that it still has: what has changed since would do. 0: none."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The parameters, after ``version`` steps."""

    shard: int
    epoch: int
    chunk: int
    version: int
    data: Any = None
    number: int = 0
    """Of this answer, where the server remembers what it has sent."""
    since: int = 0
    """The answer to which this one is the difference; 0: these are the parameters themselves."""


@dataclass(frozen=True, slots=True)
class Push:
    """What a worker made of a chunk and the parameters of ``version``."""

    shard: int
    epoch: int
    term: int
    chunk: int
    version: int
    update: Any
    bad: bool = False
    """The loss was not finite: the chunk is left out."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The chunk has had its effect on the shard, and nothing but a new epoch can undo it."""

    shard: int
    epoch: int
    term: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Refused:
    """What was said belongs to an older term than ``term``."""

    shard: int
    term: int


# -- server and server --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class State:
    """A copy of a shard after ``index`` entries: what a new backup begins with, and what a checkpoint holds."""

    shard: int
    epoch: int
    term: int
    index: int
    version: int
    applied: Chunks
    data: Any = None


@dataclass(frozen=True, slots=True)
class Replicate:
    """The next entries for a backup: those of one step, which it takes together or not at all."""

    shard: int
    term: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Replicated:
    """A backup has all entries up to ``index``; -1: it has nothing yet and waits for a copy of the state."""

    shard: int
    term: int
    index: int


# -- server and coordinator ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Report:
    """How a primary's backup does. Stuck: it does not answer the primary any more."""

    shard: int
    term: int
    backup: Literal["joining", "in sync", "stuck"]


@dataclass(frozen=True, slots=True)
class Beat:
    """A server is alive; ``sent`` is the time on its own clock."""

    sent: float
    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to the beat of ``sent``: the server may acknowledge for ``lease_s`` from then, as the views say.

    It has all views. A server that is not told of a view which no longer names it might take the time for itself.
    """

    sent: float
    views: Views
    workers: tuple[int, ...] = ()
    """Those who have asked for work and have not ended."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The coordinator wants the shard, which is at rest after exactly ``chunks``, written to a checkpoint."""

    shard: int
    epoch: int
    term: int
    checkpoint: int
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Saved:
    """It is written."""

    shard: int
    epoch: int
    checkpoint: int


Message = (
    Ask
    | Views
    | Lease
    | Working
    | Pull
    | Pulled
    | Push
    | Pushed
    | Refused
    | State
    | Replicate
    | Replicated
    | Beat
    | Grant
    | Snapshot
    | Saved
)


@dataclass(frozen=True, slots=True)
class Send:
    """An action of all machines: send a message to a process."""

    to: int
    message: Message
