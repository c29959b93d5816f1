"""A session: one arena, its workers, and the job they were given. Lives for one fit, evaluate or predict.

The caller steers through the horizon: workers run freely below it. The leader decides with each commit whether the
next step begins or the run rests; only the caller ends a rest. So a rest is certain: nothing changes in the arena.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch import nn

from manyhands.comm import ship
from manyhands.comm.arena import Arena
from manyhands.core.lateness import Lateness
from manyhands.core.membership import Membership
from manyhands.data.source import Source
from manyhands.engine.channel import Message
from manyhands.engine.local import Process
from manyhands.errors import EngineError, RemoteTraceback, RunError
from manyhands.sync.socket_server import Post
from manyhands.train.coordination import ALONE, SAFE, Coordination
from manyhands.train.evaluation import Dispatch
from manyhands.train.lane import Job
from manyhands.train.seats import Limits
from manyhands.train.stack import StackFile
from manyhands.train.state import ModelState
from manyhands.train.supervisor import Supervisor

__all__ = ["Session", "infer_alone", "remote_error"]

_POLL_S = 0.1


class Session:
    """Workers with a job. Use as a context manager: leaving it ends every process."""

    def __init__(
        self,
        arena: Arena,
        job: object,
        workers: int | tuple[int, int],
        limits: Limits | None = None,
        places: Mapping[int, ship.Place] | None = None,
        servers: int = 0,
        replicas: int | None = None,
        lateness: Lateness | None = None,
    ) -> None:
        """``workers``: how many; of a pair, the first is how many must be ready for the run to begin.
        ``places``: where tensors of the job lie in the arena already. Servers have the last slots of the arena.
        ``replicas``: how many servers have a copy of each part; None: servers share the arena with the workers.
        ``lateness``: who counts as late."""
        self.arena, self.control = arena, arena.control
        self.heard: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._tasks = 0
        self._fence = threading.Lock()
        self._spec = msgspec.to_builtins(arena.spec)
        try:
            self._parcel = ship.pack(job, "the model, loss, metric or data set", places)
        except BaseException:
            arena.close()
            raise
        seats = arena.spec.slots - servers
        self._least, most = (workers, workers) if isinstance(workers, int) else workers
        self.supervisor = Supervisor(
            arena=arena,
            membership=Membership(target=most, slots=seats),
            servers=Membership(target=servers, slots=servers, first=seats, role="server") if servers else None,
            setup=self._set_up,
            on_event=_ignore,
            on_message=self._hear,
            on_leave=self._left,
            limits=limits or Limits(),
            lateness=lateness,
        )
        self._coordination: Coordination | None = None
        if replicas is not None:
            self._coordination = Coordination(arena, replicas, SAFE if replicas else ALONE)
            self._coordination.on_failure = self.supervisor.fail
            self.supervisor.names = lambda: self._coordination.names if self._coordination is not None else {}

    @property
    def sockets(self) -> bool:
        """Whether servers have memory of their own."""
        return self._coordination is not None

    def on_event(self, hear: Callable[[str, dict[str, Any]], None]) -> None:
        """Let ``hear`` know what happens to the workers."""
        self.supervisor.on_event = hear
        if self._coordination is not None:
            self._coordination.on_event = hear

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_up(self, slot: int, process: Process, stack: StackFile) -> None:
        body = {
            "slot": slot,
            "role": self.supervisor.role_of(slot),
            "arena": self._spec,
            "code": self._parcel.code,
            "sizes_bytes": self._parcel.sizes_bytes,
            "post": None,
        }
        if self._coordination is not None:
            coordination = self._coordination
            post = Post(coordination.wire, coordination.new_number(slot), coordination.timing)
            body["post"] = msgspec.to_builtins(post)
        process.channel.send("setup", body, [stack.fd, self.arena.segment.fd, *self._parcel.fds])

    def _hear(self, slot: int, message: Message) -> None:
        if message.kind == "failed":
            self.supervisor.fail(remote_error(self.supervisor.name(slot), message))
        else:
            self.heard.put((slot, message))

    def _left(self, slot: int) -> None:
        self.heard.put((slot, None))
        if self._coordination is not None:
            self._coordination.gone(slot)

    def start(self, step: int, timeout_s: float = 180.0) -> None:
        """Start the workers and make the first plan; returns when as many are ready as the run needs to begin."""
        self.control.horizon = step
        self.control.held = step + 1
        self.control.commit(step, 0)
        self.control.lane_owner(0)[:] = -1
        self.control.unit_owner(0)[:] = -1
        self.control.set_leader(0, -1)
        if self._coordination is not None:
            self._coordination.start(step)
        self.supervisor.start()
        deadline = time.monotonic() + timeout_s
        workers, servers = self.supervisor.membership, self.supervisor.servers
        while self.control.committed[1] == 0:
            self.check()
            needed = [(workers, min(self._least, workers.target))]
            needed += [] if servers is None else [(servers, servers.target)]
            late = [(team, count) for team, count in needed if len(team.active) < count]
            if not late:
                self.supervisor.ask(lambda: self._first_plan(step))
            elif time.monotonic() > deadline:
                team, count = late[0]
                raise EngineError(
                    f"{count - len(team.active)} of {count} {team.role}s were not ready after {timeout_s:.0f} s"
                )
            time.sleep(0.001)

    def _first_plan(self, step: int) -> None:
        """In the supervisor's thread: shares for those who are there."""
        if self.control.committed[1] != 0:
            return
        proposed = self.supervisor.plans.propose(first=True)
        if self._coordination is not None and self.supervisor.servers is not None:
            self._coordination.begin(self.supervisor.servers.active)  # it adopts the newest plan
        elif proposed is not None:
            self.control.commit(step, self.control.proposed)
            self.control.wake_everybody()

    def check(self) -> None:
        """Raise what made the run fail, if something did."""
        if (failure := self.supervisor.failure) is not None:
            raise failure

    # -- steering -------------------------------------------------------------------------------------------
    def allow(self, horizon: int) -> None:
        """Let the workers work on steps below ``horizon``."""
        self.control.horizon = horizon
        with self._fence:  # a leader that is just declaring a rest sees the horizon, or we see the rest
            pass
        # One look: a step that is committed between two would turn the rest that it brings into one to be ended here.
        steps = self.control.steps
        if steps < horizon and self.control.held == steps + 1:
            self.control.kept = 0  # nothing of what was seen at this rest may be taken back
            self.control.held = 0
            self.control.bell.ring()
            if self.supervisor.servers is not None:
                self.control.counter.ring()
        if self._coordination is not None:
            self._coordination.wake()

    def taken_back(self) -> int | None:
        """The step to which the run has gone back since this was last asked; None when it has not."""
        steps = []
        while self._coordination is not None and not self._coordination.rolled_back.empty():
            steps.append(self._coordination.rolled_back.get())
        return min(steps, default=None)

    def _rests(self) -> bool:
        steps = self.control.steps  # read first: the leader writes it last
        return self.control.held == steps + 1

    def reached(self) -> bool:
        """Whether the run rests at the horizon: then nothing in the arena changes."""
        return self._rests() and self.control.steps >= self.control.horizon

    def wait(self, timeout_s: float = _POLL_S) -> bool:
        """Wait for the leader to reach the horizon, at most ``timeout_s``."""
        count = self.control.desk.count
        self.check()
        if not self.reached():
            self.control.desk.wait(count, timeout_s)
        self.check()
        return self.reached()

    def hold(self, least: int = 0, timeout_s: float = 600.0) -> int:
        """Stop the workers at the next step boundary, not before ``least``; returns the number of committed steps.

        ``least``: steps that the caller has seen committed. After a death they may be on their way a second time.
        """
        deadline = time.monotonic() + timeout_s
        self.allow(min(self.control.horizon, max(self.control.steps, least)))
        while not self.wait(0.02):
            if time.monotonic() > deadline:
                raise RunError(f"the step in progress was not finished within {timeout_s:.0f} s")
        return self.control.steps

    # -- inference ------------------------------------------------------------------------------------------
    def infer(self, kind: str, source: Source, batch: int) -> list[dict[str, Any]]:
        """Run ``evaluate`` or ``predict`` over all rows; the workers must be at the horizon or idle."""
        self._tasks += 1
        while not self.heard.empty():
            self.heard.get()
        return Dispatch(self.supervisor, source, batch, kind, self.heard, self.check, self._tasks).run()

    def bill(self) -> dict[str, float]:
        """Seconds that the workers spent with data, compute, waiting, and reducing."""
        slots = range(self.arena.spec.slots)
        return {
            name: sum(self.control.slot_value(slot, f"{name}_ns") for slot in slots) / 1e9
            for name in ("data", "compute", "wait", "reduce")
        }

    def traffic(self) -> dict[str, int]:
        """Bytes that the workers sent and received, where a codec counts them."""
        slots = range(self.arena.spec.slots)
        return {
            name: sum(self.control.slot_value(slot, f"{name}_bytes") for slot in slots) for name in ("sent", "received")
        }

    def close(self) -> int:
        """End every process; returns how many there were."""
        count = self.supervisor.close()
        if self._coordination is not None:
            self._coordination.close()
            self._coordination.on_event = self._coordination.on_failure = _ignore
        # Whatever these hold would hold the arena: its memory must go now, not when a cycle is found.
        self.supervisor.setup = self.supervisor.on_event = self.supervisor.on_message = _ignore
        self.supervisor.on_leave = _ignore
        self.supervisor.names = dict
        self._parcel.close()
        self.arena.close()
        return count


def _ignore(*_: Any) -> None:
    """Nobody listens."""


def remote_error(who: str, message: Message) -> BaseException:
    """The exception of a worker or server, as it was raised, with the place in notes."""
    body = message.body
    error = ship.load_exception(body["error"])
    where = [who, *(f"{name} {body[name]}" for name in ("step", "lane") if name in body)]
    if samples := body.get("samples"):
        where.append(f"samples {samples[:16]}{' …' if len(samples) > 16 else ''}")
    error.add_note(f"raised in {', '.join(where)} ({body['phase']})")
    error.__cause__ = RemoteTraceback(body["text"])
    return error


def infer_alone(
    model: nn.Module, job: Job, workers: int, kind: str, source: Source, batch: int
) -> list[dict[str, Any]]:
    """Evaluate or predict with workers of its own."""
    state = ModelState(model, None, lanes=1, samples=0, stats=1, ring=1)
    with Session(state.arena, job, workers, places=state.places) as session:
        session.start(0)
        return session.infer(kind, source, batch)
