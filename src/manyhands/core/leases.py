"""Who works on which chunk: leases that run out, come back and are given on. No clock: the caller says what time it is.

A lease is a hint and not a lock. Whoever finishes a chunk first has done it, with or without a lease; that nobody's
work counts twice is the servers' affair. So a lease may be given on as soon as its holder is in doubt.

Speculation: when no chunk is free, an idle worker gets the chunk that one other worker has held longest, if that is
at least ``speculate_after_s``. No chunk is ever with more than two workers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from manyhands.core.chunks import Chunks, ChunkSet

__all__ = ["Leases"]


@dataclass(slots=True)
class _Lease:
    since: float
    until: float


@dataclass(slots=True, kw_only=True)
class Leases:
    """The chunks from 0 to ``horizon``: free, leased or done. Free ones are given out from the lowest."""

    horizon: int
    """Chunks at or above it are not leased. May be changed at any time."""
    duration_s: float
    """How long a lease lasts without being renewed."""
    speculate_after_s: float | None = None
    """How old a lease must be before an idle worker may get the same chunk; None: never."""
    _done: ChunkSet = field(default_factory=ChunkSet)
    _leases: dict[int, dict[int, _Lease]] = field(default_factory=dict)
    _returned: list[int] = field(default_factory=list)
    """A heap of chunks below ``_fresh`` that may be free; those that are not are passed over."""
    _fresh: int = 0
    """No chunk at or above it was ever leased."""

    @property
    def prefix(self) -> int:
        """All chunks below it are done, it is not."""
        return self._done.prefix

    @property
    def frontier(self) -> int:
        """Every chunk below it was leased once or is done; none at or above it is leased."""
        return max(self._fresh, self._done.prefix)

    @property
    def done_chunks(self) -> Chunks:
        """What is done, for a checkpoint."""
        return self._done.frozen()

    @property
    def outstanding(self) -> dict[int, tuple[int, ...]]:
        """The workers of each leased chunk."""
        return {chunk: tuple(leases) for chunk, leases in self._leases.items()}

    def lease(self, worker: int, now: float) -> int | None:
        """A chunk for ``worker``, or None when there is nothing for it to do now."""
        run = self.lease_run(worker, now, 1)
        return None if run is None else run.start

    def lease_run(self, worker: int, now: float, most: int) -> range | None:
        """Up to ``most`` consecutive chunks for ``worker``, under one lease.

        What another worker is slow with is leased as it was to that one, however many: results that cover different
        chunks could not both count.
        """
        first = self._take_free()
        if first is None:
            run = self._take_slow(worker, now)
        else:
            stop = first + 1
            while stop - first < most and self._is_free(stop):
                stop += 1
            self._fresh = max(self._fresh, stop)
            run = range(first, stop)
        if run is not None:
            self._hold(run, worker, now)
        return run

    def recall(self, run: range, worker: int, now: float) -> None:
        """``worker`` has a lease on ``run`` from before; what is done of it stays so."""
        for chunk in range(self.frontier, run.stop):
            heapq.heappush(self._returned, chunk)
        self._fresh = max(self._fresh, run.stop)
        self._hold(run, worker, now)

    def _hold(self, run: range, worker: int, now: float) -> None:
        lease = _Lease(now, now + self.duration_s)
        for chunk in run:
            if chunk not in self._done:
                self._leases.setdefault(chunk, {})[worker] = lease

    def renew(self, chunk: int, worker: int, now: float) -> bool:
        """Let the lease last longer; False when ``worker`` has none on ``chunk`` (any more)."""
        lease = self._leases.get(chunk, {}).get(worker)
        if lease is None:
            return False
        lease.until = now + self.duration_s
        return True

    def done(self, chunk: int) -> bool:
        """``chunk`` is finished, whoever did it; False when it was before."""
        self._leases.pop(chunk, None)
        return self._done.add(chunk)

    def give_back(self, chunk: int, worker: int | None = None) -> None:
        """``worker`` (None: whoever holds it) will not finish ``chunk``. It is free when nobody else holds it."""
        leases = self._leases.get(chunk)
        if leases is None:
            return
        if worker is None:
            leases.clear()
        else:
            leases.pop(worker, None)
        if not leases:
            del self._leases[chunk]
            heapq.heappush(self._returned, chunk)

    def gone(self, worker: int) -> list[int]:
        """``worker`` will not finish anything; the chunks it held."""
        held = [chunk for chunk, leases in self._leases.items() if worker in leases]
        for chunk in held:
            self.give_back(chunk, worker)
        return held

    def expire(self, now: float) -> list[tuple[int, int]]:
        """Take back what has run out: pairs of chunk and worker."""
        over = [
            (chunk, worker)
            for chunk, leases in self._leases.items()
            for worker, lease in leases.items()
            if lease.until <= now
        ]
        for chunk, worker in over:
            self.give_back(chunk, worker)
        return over

    def rollback(self, done: Chunks) -> None:
        """Exactly ``done`` is done, nothing is leased."""
        self._done = ChunkSet(done)
        self._leases.clear()
        self._returned.clear()
        self._fresh = 0

    def _take_free(self) -> int | None:
        while self._returned and self._returned[0] < self.horizon:
            chunk = heapq.heappop(self._returned)
            if chunk not in self._done and chunk not in self._leases:
                return chunk
        self._fresh = max(self._fresh, self._done.prefix)
        while self._fresh < self.horizon:
            self._fresh += 1
            if self._fresh - 1 not in self._done:
                return self._fresh - 1
        return None

    def _is_free(self, chunk: int) -> bool:
        return chunk < self.horizon and chunk not in self._done and chunk not in self._leases

    def _take_slow(self, worker: int, now: float) -> range | None:
        if self.speculate_after_s is None:
            return None
        alone = [
            (lease.since, chunk, holder)
            for chunk, leases in self._leases.items()
            for holder, lease in leases.items()
            if len(leases) == 1 and holder != worker and chunk < self.horizon
        ]
        since, first, holder = min(alone, default=(now, None, None))
        if first is None or holder is None or now - since < self.speculate_after_s:
            return None
        lease, stop = self._leases[first][holder], first + 1
        while stop < self.horizon and len(others := self._leases.get(stop, {})) == 1 and others.get(holder) is lease:
            stop += 1
        return range(first, stop)
