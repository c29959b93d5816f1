"""Words between workers and the servers that apply their updates one by one, in shared memory.

Every word has one writer at a time. A worker asks: it leaves its gradient in its own place, says which chunk it is of
and which version of the parameters it was computed with, and counts its request up. The first server, the lead, writes
what becomes of it into a log; every server applies the log, in its order, to its own part of the parameters. Then the
lead grants the worker another chunk, and every server puts its part of the parameters into the worker's place.

The stamp of a log entry is written last: with it the entry is final. All that a server knows can be read off these
words, so the successor of a dead one goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from manyhands.comm.segment import Segment

__all__ = ["LOG", "STALENESS_BINS", "Exchange", "ExchangeShape"]

LOG = 1024
"""Entries that the log keeps. No server is ever that far behind: nobody asks again before it has an answer."""
STALENESS_BINS = 256

_ROW = (
    "asked",
    "chunk",
    "span",
    "version",
    "bad",
    "granted",
    "grant",
    "grant_span",
    "grant_version",
    "refused",
    "reading",
)
_ENTRY = ("stamp", "members", "more", "number", "count")
_BITS = 64
_COUNTS = ("applied", "dropped", "held", "doubled")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """The sizes that fix the layout."""

    workers: int
    servers: int
    ring: int
    stats: int
    span: int = 1
    """Consecutive chunks that an update may cover."""

    @property
    def windows(self) -> int:
        """Places in which servers may show the parameters: one for each who reads, the newest, and one to write."""
        return self.workers + 2

    @property
    def words(self) -> int:
        per_server = 1 + self.workers
        return (
            self.workers * len(_ROW) + self.servers * per_server + LOG * len(_ENTRY) + 2 * self.ring + 2 + self.windows
            + len(_COUNTS) + STALENESS_BINS
        )  # fmt: skip

    @property
    def size_bytes(self) -> int:
        return 8 * (self.words + self.workers * (self.span * self.stats + 1) + LOG * 3)


class Exchange:
    """The words, by name. Arrays are views: writing to them is telling the others."""

    def __init__(self, shape: ExchangeShape, segment: Segment, offset: int) -> None:
        self.shape = shape
        words = segment.array(offset, (shape.words,), np.int64)
        numbers = segment.array(offset + 8 * shape.words, (shape.size_bytes // 8 - shape.words,), np.float64)
        at = 0

        def take(*lengths: int) -> np.ndarray:
            nonlocal at
            count = int(np.prod(lengths))
            at += count
            return words[at - count : at].reshape(lengths)

        # Of a worker: what it asks, and what it is granted.
        rows = take(len(_ROW), shape.workers)
        self.asked, self.chunk, self.span, self.version, self.bad = rows[:5]
        """Number of the request; chunk + 1 that it brings (0: none), how many chunks from there on, and the version
        that was computed with; whether the loss was not finite. Every request asks for another chunk."""
        self.granted, self.grant, self.grant_span, self.grant_version, self.refused = rows[5:10]
        """Number of the request that was answered; chunk + 1 to compute and how many; the version to compute with;
        whether the update of that request came to nothing, until its worker has taken note."""
        self.reading = rows[10]
        """Window + 1 whose parameters the worker computes with, where it reads them itself; 0: none."""
        self._newest, self.shown_version = take(1), take(shape.windows)
        """The window to read, and the versions of all."""
        # Of a server: how many entries it has applied, and which requests it has answered with parameters.
        self.applied = take(shape.servers)
        self.delivered = take(shape.servers, shape.workers)
        # The log: places of the updates that make the step, as bits of two words; number of the first chunk in the
        # schedule.
        log = take(len(_ENTRY), LOG)
        self.stamp, self._members, self._more, self.number, self.count = log
        # By chunk: chunk + 1, and the entry that it is part of; -1 when it was left out on purpose.
        self.known, self.entry = take(2, shape.ring)
        self._begun = take(1)
        self.counts = take(len(_COUNTS))
        self.staleness = take(STALENESS_BINS)
        self.ahead, numbers = numbers[: shape.workers], numbers[shape.workers :]
        """Steps by which the parameters that a worker is given are ahead of their version: predicted."""
        brought = shape.workers * shape.span * shape.stats
        self.stats = numbers[:brought].reshape(shape.workers, shape.span, shape.stats)
        self.rate, self.factor, self.compensation = numbers[brought:].reshape(3, LOG)

    @property
    def newest(self) -> int:
        """The window whose parameters are the newest."""
        return int(self._newest[0])

    @newest.setter
    def newest(self, window: int) -> None:
        self._newest[0] = window

    def begin(self, chunk: int) -> int:
        """The chunk with which the run began; that of the first call, whoever asks later."""
        if not self._begun[0]:
            self._begun[0] = chunk + 1
        return int(self._begun[0]) - 1

    @property
    def logged(self) -> int:
        """How many chunks all servers have applied, by the entries of the log: whatever else is known of them."""
        at = (int(self.applied.min()) - 1) % LOG
        return int(self.number[at] + self.count[at]) - int(self._begun[0]) + 1 if self.stamp[at] else 0

    def set_members(self, at: int, places: Iterable[int]) -> None:
        """Say whose updates make the step of the entry at ``at``."""
        bits = sum(1 << place for place in places)
        self._members[at], self._more[at] = (_signed(bits >> shift) for shift in (0, _BITS))

    def members(self, at: int) -> list[int]:
        """The places of the updates that make the step."""
        bits = _unsigned(self._members[at]) | _unsigned(self._more[at]) << _BITS
        found = []
        while bits:
            found.append((bits & -bits).bit_length() - 1)
            bits &= bits - 1
        return found

    def add(self, name: str) -> None:
        """Count something that happened."""
        self.counts[_COUNTS.index(name)] += 1

    def set(self, name: str, count: int) -> None:
        """How often something happened, where that is known."""
        self.counts[_COUNTS.index(name)] = count

    def tally(self, *, scales: bool = False) -> dict[str, int]:
        """What happened to updates so far, and how far behind they were when they came. ``scales``: those that were
        counted for less."""
        shares = np.cumsum(self.staleness) / max(int(self.staleness.sum()), 1)
        behind = {f"staleness_p{part}": int(np.searchsorted(shares, part / 100)) for part in (50, 95)}
        most = np.flatnonzero(self.staleness)
        worst = {"staleness_most": int(most[-1]) if most.size else 0}
        scaled = {"scaled": int(self.staleness[1:].sum()) if scales else 0}
        return dict(zip(_COUNTS, self.counts.tolist(), strict=True)) | scaled | behind | worst


def _signed(bits: int) -> int:
    """The lowest 64 bits as a word has them."""
    bits &= (1 << _BITS) - 1
    return bits - (1 << _BITS) if bits >> _BITS - 1 else bits


def _unsigned(word: np.int64) -> int:
    return int(word) & (1 << _BITS) - 1
