"""What the first server does beside serving: judge updates, keep the log, lease chunks, say how far the run is."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from manyhands.comm.arena import MOST_WORKERS, Arena
from manyhands.comm.exchange import LOG, STALENESS_BINS
from manyhands.core.chunks import Chunks
from manyhands.core.lags import Lags
from manyhands.core.leases import Leases
from manyhands.core.pace import Pace
from manyhands.core.policies import Apply, Drop, Hold, Moment, Policy, together
from manyhands.core.rates import Rates, Shares, factor_of

__all__ = ["Lead"]

_USUAL_S = 0.1  # a chunk, before anything is measured
_LEFT_OUT = -1


class Lead:
    """Used by one server. Its successor reads everything off the words again."""

    def __init__(
        self, arena: Arena, policy: Policy, reach: float = 0.0, rates: Rates | None = None, ramp: int = 0
    ) -> None:
        """``reach``: for how many steps at most the parameters that workers are given are predicted. ``ramp``: updates
        of the run after which one worker more takes part."""
        self._arena, self._control, self._exchange, self._policy = arena, arena.control, arena.exchange(), policy
        exchange, first = self._exchange, arena.control.steps
        self._next = int(exchange.applied.min())
        while exchange.stamp[self._next % LOG] == self._next + 1:
            self._next += 1
        last = (self._next - 1) % LOG
        begun = exchange.begin(first)
        self._number = int(exchange.number[last] + exchange.count[last]) if self._next else begun
        self._looks_around = getattr(policy, "looks_around", True)
        self._judged = exchange.granted.copy()
        self._group: list[int] = []
        self._verdict = Apply()
        self._held: set[int] = set()
        self._leases = Leases(horizon=first, duration_s=float("inf"), speculate_after_s=_USUAL_S)
        self._leases.rollback(Chunks(prefix=first))
        self._pending: deque[tuple[int, list[int]]] = deque()
        self._since: dict[int, float] = {}
        self._pace = Pace(arena.spec.span)
        self._lags = Lags(reach)
        self._shares, self._rates, self._ramp = Shares(), rates, ramp
        self._rested = self._next
        self._plan = (-1, -1)
        self._workers = 1
        self.somebody_waits = False
        self._fence = threading.Lock()  # orders our word before the look at that of the caller
        self._recall(first)

    def _recall(self, first: int) -> None:
        """Read off the words what a predecessor has logged and not settled."""
        exchange, ring = self._exchange, self._arena.spec.ring
        logged = []
        for chunk in range(first, first + ring // 2):
            if exchange.known[chunk % ring] != chunk + 1:
                continue
            entry = int(exchange.entry[chunk % ring])
            if entry == _LEFT_OUT:
                self._leases.done(chunk)
            elif entry < self._next:
                logged.append((entry, [chunk]))
            else:  # it was never stamped, and the number of the entry will be that of another one
                exchange.known[chunk % ring] = 0
        self._pending.extend(sorted(logged))
        now = time.monotonic()
        for slot in range(exchange.shape.workers):
            run = self._brought(slot)
            if exchange.asked[slot] == exchange.granted[slot]:
                run = range(int(exchange.grant[slot]) - 1, int(exchange.grant[slot] - 1 + exchange.grant_span[slot]))
            if run.start >= first and not any(self._is_known(chunk) for chunk in run):
                self._leases.recall(run, _worker(slot), now)

    def _brought(self, slot: int) -> range:
        """The chunks of the request of ``slot``."""
        first = int(self._exchange.chunk[slot]) - 1
        return range(first, first + int(self._exchange.span[slot]))

    # -- judging --------------------------------------------------------------------------------------------
    @property
    def undecided(self) -> bool:
        """Whether there are updates about which another look may decide: what others did is a reason."""
        return bool(self._held or self._group)

    def judge(self) -> bool:
        """Decide about every update that has come; whether anything was decided."""
        exchange = self._exchange
        done = False
        for slot in np.flatnonzero(exchange.asked != self._judged).tolist():
            done = self._judge(slot) or done
        if self._group and not self._anybody_computes():
            self._log()
            done = True
        return done

    def _judge(self, slot: int) -> bool:
        exchange, ring = self._exchange, self._arena.spec.ring
        request, chunks = int(exchange.asked[slot]), self._brought(slot)
        if slot in self._group:
            return False
        if chunks.start < 0:
            self._judged[slot] = request
            return True
        open_chunks = [chunk for chunk in chunks if not self._is_known(chunk)]
        if len(open_chunks) < len(chunks):  # somebody else was faster, or a predecessor of ours has logged it
            exchange.add("doubled")
            exchange.refused[slot] = not self._is_from(slot, chunks.start)
            for chunk in open_chunks:
                self._leases.give_back(chunk, _worker(slot))
            self._judged[slot] = request
            return True
        if exchange.bad[slot]:
            for chunk in chunks:
                self._keep_stats(slot, chunk)
                exchange.entry[chunk % ring] = _LEFT_OUT
                exchange.known[chunk % ring] = chunk + 1
                self._leases.done(chunk)
            self._judged[slot] = request
            return True
        staleness = max(self._next - int(exchange.version[slot]), 0)
        verdict = self._policy.judge(staleness, self._moment(slot))
        if isinstance(verdict, Hold):
            if slot not in self._held:
                self._held.add(slot)
                exchange.add("held")
            return False
        self._held.discard(slot)
        if isinstance(verdict, Drop):
            exchange.add("dropped")
            exchange.refused[slot] = 1
            for chunk in chunks:
                self._leases.give_back(chunk, _worker(slot))
            self._judged[slot] = request
            return True
        exchange.staleness[min(staleness, STALENESS_BINS - 1)] += 1
        self._lags.saw(_worker(slot), staleness)
        self._take(slot, verdict)
        return True

    def _take(self, slot: int, verdict: Apply) -> None:
        if any(self._exchange.chunk[other] == self._exchange.chunk[slot] for other in self._group):
            self._judged[slot] = self._exchange.asked[slot]  # the same chunk twice in one step
            self._exchange.refused[slot] = 1
            self._exchange.add("doubled")
        else:
            self._group.append(slot)
            self._verdict = verdict
        if verdict.step:
            self._log()

    def _log(self) -> None:
        """Make the group the next entry. With its stamp it is final."""
        exchange, ring, at = self._exchange, self._arena.spec.ring, self._next % LOG
        group, self._group = self._group, []
        chunks = [chunk for slot in group for chunk in self._brought(slot)]
        exchange.set_members(at, group)
        exchange.number[at], exchange.count[at] = self._number, len(chunks)
        exchange.rate[at], exchange.factor[at], exchange.compensation[at] = together(self._verdict, len(group))
        exchange.rate[at] *= self._factor(group)
        for slot in group:
            exchange.refused[slot] = 0  # a predecessor may have judged otherwise, and said so
            exchange.ahead[slot] = self._lags.of(_worker(slot))
            for chunk in self._brought(slot):
                self._keep_stats(slot, chunk)
                exchange.entry[chunk % ring] = self._next
                exchange.known[chunk % ring] = chunk + 1
            exchange.add("applied")
        exchange.stamp[at] = self._next + 1
        self._pending.append((self._next, chunks))
        self._next += 1
        self._number += len(chunks)
        for slot in group:
            self._judged[slot] = exchange.asked[slot]
        if exchange.shape.servers > 1:
            self._control.counter.ring()

    def _factor(self, group: list[int]) -> float:
        """What the rate of a step is multiplied by; updates that make one step together take the mean."""
        if self._rates is None:
            return 1.0
        workers = [_worker(slot) for slot in group]
        for worker in workers:
            self._shares.came(worker)
        return sum(factor_of(self._rates, worker, self._shares.of(worker)) for worker in workers) / len(group)

    def _keep_stats(self, slot: int, chunk: int) -> None:
        within = chunk - self._brought(slot).start
        self._arena.stats[chunk % self._arena.spec.ring, 0] = self._exchange.stats[slot, within]

    def _is_known(self, chunk: int) -> bool:
        exchange, at = self._exchange, chunk % self._arena.spec.ring
        if chunk < self._leases.prefix:
            return True
        return bool(exchange.known[at] == chunk + 1 and exchange.entry[at] < self._next)

    def _is_from(self, slot: int, chunk: int) -> bool:
        """Whether the chunk is in the log with the update of ``slot``."""
        exchange, at = self._exchange, chunk % self._arena.spec.ring
        entry = int(exchange.entry[at])
        if exchange.known[at] != chunk + 1 or entry < 0 or exchange.stamp[entry % LOG] != entry + 1:
            return False
        return slot in exchange.members(entry % LOG)

    def _anybody_computes(self) -> bool:
        exchange = self._exchange
        return bool(((exchange.asked == exchange.granted) & (exchange.grant > 0)).any())

    def _moment(self, slot: int) -> Moment:
        """What is known of the others when the update of ``slot`` is judged."""
        if not self._looks_around:
            return Moment(workers=self._workers, collected=len(self._group))
        exchange = self._exchange
        computing = (exchange.asked == exchange.granted) & (exchange.grant > 0)
        waiting = (exchange.asked != self._judged) & (exchange.chunk > 0)
        waiting[[slot, *self._group]] = False
        return Moment(
            workers=self._workers,
            oldest=self._oldest(exchange.grant_version[computing]),
            held=int(waiting.sum()),
            waiting=self._oldest(exchange.version[waiting]),
            collected=len(self._group),
        )

    def _oldest(self, versions: np.ndarray) -> int | None:
        return int(self._next - versions.min()) if versions.size else None

    # -- how far we are -------------------------------------------------------------------------------------
    def settle(self) -> bool:
        """What every server has applied is done; say so, and whether the run rests."""
        control, leases = self._control, self._leases
        before, applied = leases.prefix, int(self._exchange.applied.min())
        while self._pending and self._pending[0][0] < applied:
            for chunk in self._pending.popleft()[1]:
                leases.done(chunk)
        self._follow_plan()
        steps, plan = control.committed
        if leases.prefix > steps or plan != control.proposed:
            if control.first_commit_ns == 0 and leases.prefix > steps:
                control.first_commit_ns = time.monotonic_ns()
            control.commit(leases.prefix, control.proposed)
        at_rest = leases.prefix == leases.frontier >= control.horizon and not leases.outstanding
        if at_rest and control.held != leases.prefix + 1:
            control.held = leases.prefix + 1
            with self._fence:
                pass
            if control.horizon > leases.prefix:  # it was raised meanwhile, and its owner saw no rest to end
                control.held = 0
            else:
                control.desk.ring()
        return leases.prefix > before

    def _follow_plan(self) -> None:
        """Leases of those who are no longer in the plan come back."""
        control, exchange = self._control, self._exchange
        newest = (control.proposed, control.repairs)
        if newest == self._plan:
            return
        self._plan = newest
        owners = control.lane_owner(control.proposed)
        self._workers = max(len(set(owners.tolist()) - {-1}), 1)
        for slot in np.flatnonzero((owners < 0) & (exchange.grant > 0) & (exchange.asked == exchange.granted)).tolist():
            self._leases.gone(_worker(slot))
            self._pace.gone(slot)
            exchange.grant[slot] = 0

    @property
    def resting(self) -> bool:
        """Whether the run rests: the caller may change the parameters meanwhile, which is no step."""
        return self._control.held == self._control.steps + 1

    def grant(self, resting: bool) -> bool:
        """Give chunks to those who want one and whose update is done with, unless the run was seen resting."""
        control, exchange, leases = self._control, self._exchange, self._leases
        wanting = np.flatnonzero((exchange.asked != exchange.granted) & (exchange.asked == self._judged)).tolist()
        self.somebody_waits = False
        if not wanting:
            return False
        now, done = time.monotonic(), False
        if resting:
            self._rested = self._next
        leases.horizon = max(control.horizon, leases.frontier)
        applied = int(exchange.applied.min())
        for slot in wanting:
            chunk = int(exchange.chunk[slot]) - 1
            if chunk >= 0 and self._is_in_log(chunk, applied):
                continue  # a server still reads its gradient
            self._time(slot, now)
            chosen = None
            if not resting and not self._is_crowded(now):
                chosen = leases.lease_run(_worker(slot), now, self._pace.share(slot))
            if chosen is None:
                self.somebody_waits = bool(leases.outstanding)
                continue
            self._since[slot] = now
            exchange.grant[slot], exchange.grant_span[slot] = chosen.start + 1, len(chosen)
            exchange.grant_version[slot] = exchange.applied[0]
            if self._next == self._rested:
                exchange.ahead[slot] = 0.0
            exchange.granted[slot] = exchange.asked[slot]
            done = True
        if done and exchange.shape.servers > 1:
            control.counter.ring()
        return done

    def _is_crowded(self, now: float) -> bool:
        """Whether as many compute as may, so early in the run. Nobody waits for one who is slow."""
        if self._number >= self._ramp * self._workers:
            return False
        usual = self._leases.speculate_after_s or _USUAL_S
        computing = sum(now - since < usual for since in self._since.values())
        return computing > self._number // self._ramp

    def _is_in_log(self, chunk: int, applied: int) -> bool:
        at = chunk % self._arena.spec.ring
        return bool(self._exchange.known[at] == chunk + 1 and applied <= self._exchange.entry[at] < self._next)

    def _time(self, slot: int, now: float) -> None:
        """A chunk that takes twice as long as usual is worth computing a second time."""
        if (since := self._since.pop(slot, None)) is not None:
            if self._exchange.chunk[slot]:  # else it is a successor, which did not do that
                self._pace.measured(slot, int(self._exchange.span[slot]), now - since)
            usual = self._leases.speculate_after_s or _USUAL_S
            self._leases.speculate_after_s = usual + (2 * (now - since) - usual) / 8


def _worker(place: int) -> int:
    """Whose place it is; a worker may have two."""
    return place % MOST_WORKERS
