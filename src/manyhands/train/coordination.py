"""The coordinator of a run whose servers are reached by sockets: a thread in the caller runs ``core/coordinator.py``.

It leases chunks, keeps the views, and says how far the run is. When all that may be done is done, it collects the
state from the primaries into the caller's arena before it says so: whoever finds the run at rest finds the state there.
That copy is also where the run goes back to if a shard and its backup are lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from manyhands.comm.arena import Arena
from manyhands.comm.envelope import Envelope, Stream
from manyhands.comm.links import Links, Wire, make_wire
from manyhands.core.chunks import Chunks
from manyhands.core.coordinator import Action, Completed, Coordinator, RolledBack
from manyhands.core.leases import Leases
from manyhands.core.messages import Ask, Beat, Lease, Saved, Send, Snapshot, State, Timing, Views
from manyhands.core.views import ViewService
from manyhands.engine import local
from manyhands.errors import RunError
from manyhands.server.messages import COORDINATOR, ENVELOPES, Fetch, Fetched
from manyhands.server.part import Part, size_bytes
from manyhands.server.row_share import RowShare
from manyhands.sync.patience import BYTES_PER_S, Patience

__all__ = ["ALONE", "SAFE", "Coordination"]

SAFE = Timing(beat_s=0.1, lease_s=2.0, retry_s=1.0)
"""With replicas. Deaths and pauses on this host are heard of at once; the lease is for what is neither."""
ALONE = Timing(beat_s=0.1, lease_s=60.0, retry_s=1.0)
"""Without: nobody could take over from a server that is only slow."""

_USUAL_S = 0.1  # a chunk, before anything is measured
_FOR_EVER = 1 << 62


@dataclass(kw_only=True)
class _Views(ViewService):
    """Views without backups where none are wanted."""

    replicas: int = 0

    def _spare(self, *other_than: int | None) -> int | None:
        # Somebody else than the primary is looked for: that is a backup.
        return None if other_than and not self.replicas else super()._spare(*other_than)


@dataclass(kw_only=True)
class _Machine(Coordinator):
    """Rests where the caller wants it, not at fixed chunks: whoever drives it sets the horizon of the leases."""

    chunks: int = _FOR_EVER
    checkpoint_every: int = 0
    replicas: int
    first: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.service = _Views(shards=self.shards, timing=self.timing, replicas=self.replicas)
        self._done = Chunks(prefix=self.first)
        self.leases.rollback(self._done)
        self.leases.horizon = self.first

    @property
    def saving(self) -> tuple[int, Chunks] | None:
        """Which checkpoint is being collected, and what it holds."""
        return None if self._saving is None else (self._saving.checkpoint, self._saving.chunks)

    def rest(self) -> list[Action]:
        """Collect the state, if all is done that may be done."""
        return self._rest()

    @property
    def kept(self) -> tuple[int, Chunks]:
        """The checkpoint that the run goes back to, and what it holds."""
        return self.service.checkpoint, self._done


class Coordination:
    """Started with ``start``, ended with ``close``. Other threads call what is said to be for them."""

    def __init__(self, arena: Arena, replicas: int, timing: Timing, wire: Wire | None = None) -> None:
        self._arena, self._control, self._replicas = arena, arena.control, replicas
        # What is large takes its time: to ask for it again too soon would make it worse.
        self.timing = replace(timing, retry_s=timing.retry_s + arena.plane_bytes / BYTES_PER_S)
        self.wire = wire or make_wire()
        if self.wire.folder is not None:
            local.remove_afterwards(self.wire.folder)
        self.on_event: Callable[[str, dict[str, Any]], None] = lambda event, fields: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.rolled_back: queue.SimpleQueue[int] = queue.SimpleQueue()
        """The steps to which the run has gone back."""
        self.names: dict[str, int] = {}
        """The slots of the servers by what they do; one may do several things."""
        shards = arena.spec.exchange
        self._parts = [Part(arena, shard, shards) for shard in range(shards)]
        tables = arena.spec.tables
        self._rows = [RowShare(tables, shard, shards) for shard in range(shards)] if tables else []
        self._tables = arena.tables() if tables else None
        self._state_bytes = [size_bytes(part.state()) for part in self._parts]
        for shard, rows in enumerate(self._rows):
            self._state_bytes[shard] += rows.size_bytes
        self._numbers: dict[int, int] = {}
        self._newest = COORDINATOR
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._wake = os.pipe()
        for fd in self._wake:
            os.set_blocking(fd, False)
        self._thread: threading.Thread | None = None
        self._closing = False

    # -- for other threads ----------------------------------------------------------------------------------
    def new_number(self, slot: int) -> int:
        """The number of the process that is being started in ``slot``."""
        with self._lock:
            self._newest += 1
            self._numbers[slot] = self._newest
            return self._newest

    def start(self, step: int) -> None:
        """Begin to listen; all chunks below ``step`` are done."""
        leases = Leases(horizon=step, duration_s=float("inf"), speculate_after_s=_USUAL_S)
        self._machine = _Machine(
            shards=len(self._parts), timing=self.timing, leases=leases, replicas=self._replicas, first=step
        )
        self._links: Links[Any] = Links(self.wire, COORDINATOR, ENVELOPES, listens=True)
        self._links.watch(self._wake[0])
        self._begun = False
        self._collected = self._first = step
        self._exchange = self._arena.exchange()
        self._staged: dict[int, Sequence[memoryview]] = {}
        self._idle: dict[int, Ask] = {}
        self._workers: set[int] = set()
        self._gone: set[int] = set()
        self._since: dict[int, tuple[int, float]] = {}
        self._told: Views | None = None
        self._patience = Patience(3 * self.timing.beat_s)
        self._thread = threading.Thread(target=self._run, name="manyhands-coordinator", daemon=True)
        self._thread.start()

    def begin(self, slots: Sequence[int]) -> None:
        """The servers in ``slots`` are ready: give them their shards."""
        numbers = [self._numbers[slot] for slot in slots]

        def request(now: float) -> None:
            if not self._begun:
                self._begun = True
                self._perform(self._machine.start(numbers, now), now)

        self._ask(request)

    def gone(self, slot: int) -> None:
        """The process in ``slot`` has ended."""
        number = self._numbers.get(slot)
        if number is None or self._thread is None or self._closing:
            return

        def request(now: float) -> None:
            self._gone.add(number)
            self._idle.pop(number, None)
            self._workers.discard(number)
            self._since.pop(number, None)
            self._links.forget(number)
            self._perform(self._machine.died(number, now), now)

        self._ask(request)

    def wake(self) -> None:
        """The horizon has changed."""
        with contextlib.suppress(BlockingIOError):  # full: it will wake up
            os.write(self._wake[1], b"x")

    def _ask(self, request: Callable[[float], None]) -> None:
        self._requests.put(request)
        self.wake()

    def close(self) -> None:
        """End the thread, close the sockets and remove their folder. Again does nothing."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            self.wake()
            self._thread.join()
            self._links.close()
        for fd in self._wake:
            os.close(fd)
        if self.wire.folder is not None:
            shutil.rmtree(self.wire.folder, ignore_errors=True)
            local.remove_afterwards(self.wire.folder, needed=False)

    # -- the thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            next_tick = time.monotonic()
            while not self._closing:
                for envelope in self._links.receive(next_tick - time.monotonic()):
                    self._take(envelope, time.monotonic())
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake[0], 4096)
                now = time.monotonic()
                while not self._requests.empty():
                    self._requests.get()(now)
                if now >= next_tick:
                    next_tick = now + self.timing.beat_s
                    if self._begun:
                        self._perform(self._machine.tick(now), now)
                self._follow(now)
        except Exception as error:
            self.on_failure(RunError(f"the coordinator failed: {error!r}"))

    def _take(self, envelope: Envelope[Any], now: float) -> None:
        message, size = envelope.message, size_bytes(envelope.payload)
        if envelope.sender in self._gone or not 0 <= getattr(message, "shard", 0) < len(self._parts):
            return  # what the dead have said last must not get them anything any more
        match message:
            case Beat():
                sound = all(0 <= report.shard < len(self._parts) for report in message.reports)
                if self._begun and sound:
                    self._perform(self._machine.receive(envelope.sender, message, now), now)
            case Ask():
                self._asked(envelope.sender, message, envelope.payload, now)
            case Fetch():
                self._fetch(envelope.sender, message)
            case Saved():
                saving = self._machine.saving
                primary = self._machine.service.views[message.shard].primary
                if saving is None or (message.checkpoint, envelope.sender) != (saving[0], primary):
                    return
                if size != self._state_bytes[message.shard]:
                    return
                self._staged[message.shard] = envelope.payload
                self._perform(self._machine.receive(envelope.sender, message, now), now)
            case _:
                self._perform(self._machine.receive(envelope.sender, message, now), now)

    # -- workers --------------------------------------------------------------------------------------------
    def _asked(self, worker: int, message: Ask, payload: Sequence[memoryview], now: float) -> None:
        machine, chunk = self._machine, message.done
        self._workers.add(worker)
        if chunk is not None and message.epoch == machine.service.epoch and chunk not in machine.leases.done_chunks:
            row = self._arena.stats[chunk % self._arena.spec.ring, 0]
            if not 0 <= chunk < machine.leases.frontier or size_bytes(payload) != row.nbytes:
                return
            row[:] = np.frombuffer(b"".join(payload), np.float64)
            self._time(worker, chunk, now)
        self._idle[worker] = message
        self._perform(machine.receive(worker, message, now), now)

    def _time(self, worker: int, chunk: int, now: float) -> None:
        """A chunk that takes twice as long as usual is worth computing a second time."""
        leased, since = self._since.pop(worker, (-1, 0.0))
        if leased == chunk:
            usual = self._machine.leases.speculate_after_s or _USUAL_S
            self._machine.leases.speculate_after_s = usual + (2 * (now - since) - usual) / 8

    def _call_idle(self, now: float) -> None:
        """Offer chunks to those who got none when they asked."""
        for worker, question in list(self._idle.items()):
            actions = self._machine.receive(worker, question, now)
            self._perform([a for a in actions if not _is_empty_lease(a)], now)

    # -- servers --------------------------------------------------------------------------------------------
    def _fetch(self, server: int, message: Fetch) -> None:
        checkpoint, chunks = self._machine.kept
        if (message.epoch, message.checkpoint) == (self._machine.service.epoch, checkpoint):
            # A state begins a log of its own; how many chunks came before is in the chunks.
            state = State(message.shard, message.epoch, 0, 0, 0, chunks)
            payload = self._parts[message.shard].state()
            if self._tables is not None:
                payload += self._rows[message.shard].gather(self._tables)
            self._links.send(server, Fetched(message.epoch, state), payload)

    # -- deeds ----------------------------------------------------------------------------------------------
    def _perform(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            match action:
                case Completed(_, chunks):
                    self._collect(chunks)
                case RolledBack(_, _, chunks):
                    self._go_back(chunks)
                case Send():
                    self._send(action, now)
        views = self._machine.service.current()
        if views != self._told:
            self._tell(views)

    def _send(self, send: Send, now: float) -> None:
        message = send.message
        if isinstance(message, Snapshot):
            version, size = (message.term, message.checkpoint), self._state_bytes[message.shard]
            if not self._patience.is_over(("snapshot", message.shard), version, size, now):
                return
        if isinstance(message, Lease) and message.chunk is not None:
            self._idle.pop(send.to, None)
            if self._since.get(send.to, (-1, now))[0] != message.chunk:
                self._since[send.to] = (message.chunk, now)
        self._links.send(send.to, message)

    def _tell(self, views: Views) -> None:
        """Let workers know of new views, the log, and whoever asks for the servers by name."""
        before = {} if self._told is None else {view.shard: view for view in self._told.views}
        self._told = views
        for worker in self._workers:
            self._links.send(worker, views)
        slots = {number: slot for slot, number in list(self._numbers.items())}
        names = {}
        for view in views.views:
            for number, name in ((view.backup, f"server-{view.shard}-backup"), (view.primary, f"server-{view.shard}")):
                if number in slots:
                    names[name] = slots[number]
            if view != before.get(view.shard):
                fields = {"shard": view.shard, "term": view.term, "primary": view.primary, "backup": view.backup}
                self.on_event("view", fields)
        self.names = names

    def _collect(self, chunks: Chunks) -> None:
        """All shards are here, as they are after exactly ``chunks``: now the caller's copy may change."""
        for shard, part in enumerate(self._parts):
            stream = Stream(self._staged[shard])
            for home in part.state():
                stream.fill(home)
            if self._tables is not None:
                self._rows[shard].scatter(stream, self._tables)
            stream.end()
        self._staged.clear()
        self._collected = chunks.prefix

    def _go_back(self, chunks: Chunks) -> None:
        step, lost = chunks.prefix, self._control.steps - chunks.prefix
        self._staged.clear()
        self._since.clear()
        self.rolled_back.put(step)
        self._control.commit(step, self._control.committed[1])
        text = f"a server was lost and no backup had its state: back to step {step}, {lost} steps are done again"
        self.on_event("rolled_back", {"step": step, "steps_lost": lost, "text": text})

    # -- how far we are -------------------------------------------------------------------------------------
    def _follow(self, now: float) -> None:
        """Do what the caller wants, and say how far the run is."""
        if not self._begun:
            return
        control, machine, leases = self._control, self._machine, self._machine.leases
        resting = control.held == control.steps + 1
        if machine.saving is None:
            leases.horizon = leases.frontier if resting else max(control.horizon, leases.frontier)
            if not resting and leases.prefix < leases.horizon:
                self._call_idle(now)
            elif not resting and self._collected < leases.prefix:
                self._perform(machine.rest(), now)
        done = leases.prefix
        self._exchange.set("applied", done - self._first)
        if done > self._collected and machine.saving is not None:
            done -= 1  # the last step before a rest counts when the caller has the state
        steps, plan = control.committed
        if done > steps or plan != control.proposed:
            if control.first_commit_ns == 0 and done > steps:
                control.first_commit_ns = time.monotonic_ns()
            control.commit(max(done, steps), control.proposed)
        if not resting and machine.saving is None and self._collected == leases.prefix >= control.horizon:
            control.held = leases.prefix + 1
            if control.horizon > leases.prefix:  # it was raised meanwhile, and its owner saw no rest to end
                control.held = 0
            control.desk.ring()


def _is_empty_lease(action: Action) -> bool:
    return isinstance(action, Send) and isinstance(action.message, Lease) and action.message.chunk is None
