"""Keeps the workers of a run alive: the thread in the caller that turns decisions of ``core/`` into deeds.

It hears of a death from the kernel, in milliseconds, rolls back what the dead process left half-done, hands its
work to the living and starts a successor. It notices processes that are stopped or hang, names them, ends them
(a dead process can write nothing: that is the fence) and treats them as dead. It moves lanes to where they are
computed faster.
"""

from __future__ import annotations

import os
import queue
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.comm.arena import Arena
from manyhands.comm.control import PHASES
from manyhands.core.lateness import Lateness
from manyhands.core.membership import Action, GiveUp, Membership, Propose, Release, Repair, Spawn
from manyhands.engine import local
from manyhands.engine.channel import Message
from manyhands.errors import ChannelClosed, RunError, WorkerCrashed
from manyhands.sync.allreduce import Role
from manyhands.sync.kept import go_back
from manyhands.sync.undo import recover
from manyhands.train.late import late_workers
from manyhands.train.plans import Plans
from manyhands.train.seats import Limits, Recovery, Seat
from manyhands.train.stack import StackFile

__all__ = ["Supervisor"]

_TICK_S = 0.2
_LOOK_S = 0.0005  # how often those are looked at who are finishing a step that is taken back
_WATCH_S = 0.004  # how often a recovery is looked at until the next commit


@dataclass(slots=True)
class Supervisor:
    """Owns the processes of one session. Started with ``start``, ended with ``close``."""

    arena: Arena
    membership: Membership
    setup: Callable[[int, local.Process, StackFile], None]
    on_event: Callable[[str, dict[str, Any]], None]
    on_message: Callable[[int, Message], None]
    on_leave: Callable[[int], None]
    servers: Membership | None = None
    limits: Limits = field(default_factory=Limits)
    lateness: Lateness | None = None
    """Who counts as late, where there is a quorum."""
    seats: dict[int, Seat] = field(default_factory=dict)
    failure: BaseException | None = None
    progress: int = 0
    """Counts what was achieved apart from steps (batches of an inference): only deaths at a standstill are held
    against a run."""
    names: Callable[[], dict[str, int]] = dict
    """The slots of servers by what they do now, where that changes."""
    plans: Plans = field(init=False)
    _requests: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    _recoveries: list[Recovery] = field(default_factory=list)
    _closing: bool = False
    _thread: threading.Thread | None = None
    _wake: tuple[int, int] = (-1, -1)
    _waking: threading.Lock = field(default_factory=threading.Lock)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _proposal_due: bool = False
    _next_tick: float = 0.0
    _next_balance: float = 0.0
    _looks: int = 0
    _seen_plan: int = -1

    def __post_init__(self) -> None:
        self.plans = Plans(self.arena, self.membership, self.servers)

    def _team(self, slot: int) -> Membership:
        """Those among whom the slot is a seat."""
        return self.membership if self.servers is None or slot < self.servers.first else self.servers

    def role_of(self, slot: int) -> Role:
        """What a process in this slot does."""
        if self.servers is None:
            return "both"
        return "worker" if slot < self.servers.first else "server"

    def _who(self, slot: int) -> dict[str, int]:
        """``{"worker": 3}`` or ``{"server": 0}``."""
        team = self._team(slot)
        return {team.role: slot - team.first}

    def name(self, slot: int) -> str:
        """What messages call the process in this slot: "worker 3", "server 0"."""
        return " ".join(map(str, *self._who(slot).items()))

    # -- called from other threads --------------------------------------------------------------------------
    def start(self) -> None:
        """Fill the seats and begin to watch."""
        with self._waking:
            self._wake = os.pipe()
        os.set_blocking(self._wake[0], False)
        self._selector.register(self._wake[0], selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="manyhands-supervisor", daemon=True)
        self._thread.start()
        self.ask(lambda: self._do([*self.membership.start(), *(self.servers.start() if self.servers else ())]))

    def ask(self, request: Callable[[], None]) -> None:
        """Run ``request`` in the supervisor's thread: once it has begun, and never when it has ended."""
        self._requests.put(request)
        with self._waking:
            if self._wake[1] >= 0:
                os.write(self._wake[1], b"x")

    def resize(self, workers: int) -> None:
        """Change the number of workers while running."""
        self.ask(lambda: self._do(self.membership.resize(workers)))

    def send(self, slot: int, kind: str, body: dict[str, Any], fds: Sequence[int] = ()) -> bool:
        """Send a message to a worker and make it look; False when it is gone."""
        seat = self.seats.get(slot)
        if seat is None:
            return False
        # Announced first: a message that is larger than the socket's buffer must find its reader reading.
        inbox = self.arena.control.slot_value(slot, "inbox")
        self.arena.control.set_slot_value(slot, "inbox", inbox + 1)
        self.arena.control.wake_everybody()
        try:
            seat.process.channel.send(kind, body, fds)
        except (ChannelClosed, OSError):
            return False
        return True

    def pids(self) -> dict[str, int]:
        """Role -> pid of the live processes."""
        names = {"-".join(map(str, *self._who(slot).items())): slot for slot in sorted(self.seats)}
        if known := self.names():
            servers = [slot for slot in names.values() if self._team(slot) is self.servers]
            spares = [slot for slot in servers if slot not in known.values()]
            names = {name: slot for name, slot in names.items() if slot not in servers} | known
            names |= {f"server-spare-{number}": slot for number, slot in enumerate(spares)}
        return {name: self.seats[slot].process.pid for name, slot in names.items() if slot in self.seats}

    def fail(self, error: BaseException) -> None:
        """The run cannot go on; whoever waits for it is told."""
        if self.failure is None:
            self.failure = error
        self.arena.control.desk.ring()

    def close(self, timeout_s: float = 2.0) -> int:
        """Let the workers leave, end those that do not, and stop watching. Returns how many processes there were; those
        that cannot be ended stay in their seats."""
        if self._thread is None:
            return 0
        self._closing = True
        self.arena.control.stop = 1
        self.arena.control.wake_everybody()
        os.write(self._wake[1], b"x")
        self._thread.join()
        seats = list(self.seats.values())
        for seat in seats:
            seat.process.channel.close()  # whoever waits for a message leaves as well
        deadline = time.monotonic() + timeout_s
        for seat in seats:
            if not seat.process.wait(max(deadline - time.monotonic(), 0)):
                seat.process.signal(signal.SIGKILL)
        for slot, seat in list(self.seats.items()):
            if seat.process.wait(10):
                del self.seats[slot]
            seat.process.close()
            seat.stack.close()
        self._selector.close()
        with self._waking:
            for fd in self._wake:
                os.close(fd)
            self._wake = (-1, -1)
        self._thread = None
        return len(seats)

    # -- the thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            self.fail(RunError(f"the supervisor failed: {error!r}"))
            if not isinstance(error, Exception):
                raise

    def _turn(self) -> None:
        timeout = _WATCH_S if self._recoveries else _TICK_S
        for key, _ in self._selector.select(timeout):
            if self._closing:
                return  # from here on workers leave because they were told to
            if key.data is None:
                os.read(self._wake[0], 4096)
            else:
                self._hear(*key.data)
        while not self._requests.empty():
            self._requests.get()()
        if self._closing:
            return
        self._watch_recoveries()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._tick(now)

    def _hear(self, what: str, slot: int) -> None:
        seat = self.seats.get(slot)
        if seat is None:
            return
        if what == "died":
            self._bury(slot, seat)
            return
        try:
            message = seat.process.channel.receive(0)
        except ChannelClosed:  # the end of the process follows; until then there is nothing to hear
            self._selector.unregister(seat.process.channel)
            return
        if message is None:
            return
        if message.kind == "ready":
            team, seconds = self._team(slot), _since(seat.process.started)
            self.on_event(f"{team.role}_ready", {**self._who(slot), "pid": seat.process.pid, "seconds": seconds})
            self._do(team.ready(slot))
        else:
            seat.failed |= message.kind == "failed"
            self.on_message(slot, message)

    def _bury(self, slot: int, seat: Seat) -> None:
        """The process has ended: settle its half-done work and its seat."""
        for fd in (seat.process.pidfd, seat.process.channel):
            if fd != -1 and fd in self._selector.get_map():
                self._selector.unregister(fd)
        team, who, step = self._team(slot), self._who(slot), self.arena.control.steps
        leaving = team.status.get(slot) == "leaving"
        del self.seats[slot]
        if self.arena.spec.keeps:
            undone = go_back(self.arena, slot, self._others_finish)
        else:
            undone = recover(self.arena, slot)
        how, killed = seat.blame, seat.stopped_since is not None
        if how is None:
            ending = seat.process.ending()
            how, killed = ending.words, ending.killed
        seat.process.close()
        seat.stack.close()
        self.on_leave(slot)
        if seat.failed:
            team.status.pop(slot, None)
            return
        if leaving:
            self.on_event("worker_left", {**who, "pid": seat.process.pid})
            self._do(team.died(slot, step + self.progress, how, time.monotonic(), killed=killed))
            return
        phase = PHASES[self.arena.control.slot_value(slot, "phase")]
        self.on_event(
            f"{team.role}_died",
            {**who, "pid": seat.process.pid, "how": how, "step": step, "phase": phase, "undone": undone},
        )
        self._recoveries.append(Recovery(who, step, time.monotonic()))
        self._do(team.died(slot, step + self.progress, how, time.monotonic(), killed=killed))

    def _others_finish(self, mark: int) -> None:
        """Wait until nobody who lives is changing the state for the step of ``mark``; end who takes too long."""
        control, begun = self.arena.control, time.monotonic()
        while True:
            busy = [s for s in self.seats if control.slot_value(s, "undo_step") == mark]
            busy = [s for s in busy if not self.seats[s].process.wait(0)]
            if not busy or self._closing:
                return
            if time.monotonic() - begun > self.limits.pause_s:
                for slot in busy:
                    if self.seats[slot].blame is None:
                        self._condemn(slot, self.seats[slot], "kept a step from being taken back", show_line=False)
            time.sleep(_LOOK_S)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(slot):
                    self._spawn(slot)
                case Repair():
                    self.plans.repair()
                case Propose():
                    self._proposal_due = True
                case Release(slot):
                    self.send(slot, "leave", {})
                case GiveUp(why):
                    self.fail(
                        WorkerCrashed(f"{why}. Look at the messages of the workers above; memory may have run out.")
                    )
        if self._proposal_due:
            self._propose()

    def _spawn(self, slot: int) -> None:
        for field_name in ("lane_ns", "demand"):
            self.arena.control.set_slot_value(slot, field_name, 0)
        try:
            process = local.spawn("manyhands.train.worker:main")
            stack = StackFile()
            self.seats[slot] = Seat(process, stack, beat_time=time.monotonic())
            self._selector.register(process.channel, selectors.EVENT_READ, ("message", slot))
            if process.pidfd < 0:  # it has died already
                self._requests.put(lambda: self._hear("died", slot))
                return
            self._selector.register(process.pidfd, selectors.EVENT_READ, ("died", slot))
        except Exception as error:
            self.fail(error)
            return
        # A job may be larger than what the connection holds, and the process may be stopped: nobody waits for it here.
        threading.Thread(
            target=self._hand_over, args=(slot, process, stack), name="manyhands-setup", daemon=True
        ).start()

    def _hand_over(self, slot: int, process: local.Process, stack: StackFile) -> None:
        try:
            self.setup(slot, process, stack)
        except ChannelClosed:
            pass  # it died during the set-up; the kernel tells us
        except Exception as error:
            self.fail(error)

    # -- watching -------------------------------------------------------------------------------------------
    def _watch_recoveries(self) -> None:
        steps = self.arena.control.steps
        for recovery in [r for r in self._recoveries if steps > r.step]:
            self._recoveries.remove(recovery)
            self.on_event("recovered", {**recovery.who, "step": recovery.step, "seconds": _since(recovery.since)})

    def _tick(self, now: float) -> None:
        for slot, seat in list(self.seats.items()):
            self._examine(slot, seat, now)
        if self.lateness is not None:
            for slot in late_workers(self.arena, self.membership.active, self.lateness, now):
                if slot in self.seats and self.seats[slot].blame is None:
                    self._condemn(slot, self.seats[slot], "was late with its share", show_line=True)
        control = self.arena.control
        plan = control.committed[1]
        if plan != self._seen_plan and plan == control.proposed:
            self._seen_plan = plan
            self._do(self.membership.adopted(self.plans.owners(plan)))
        if self._proposal_due:
            self._propose()
        if self.limits.balance_s and now >= self._next_balance:
            self._looks += 1  # often in the beginning, when nothing is known yet
            self._next_balance = now + min(self.limits.balance_s, _TICK_S * self._looks)
            if (better := self.plans.better()) is not None:
                self._propose(better)

    def _examine(self, slot: int, seat: Seat, now: float) -> None:
        """End a process that is stopped, hangs, or never became ready."""
        if seat.process.is_stopped():
            seat.stopped_since = seat.stopped_since or now
            if now - seat.stopped_since >= self.limits.pause_s and seat.blame is None:
                self._condemn(slot, seat, f"was paused for {now - seat.stopped_since:.1f} s", show_line=False)
            return
        seat.stopped_since = None
        if self._team(slot).status.get(slot) == "starting":
            if now - seat.process.started > self.limits.start_s and seat.blame is None:
                self._condemn(slot, seat, f"was not ready after {self.limits.start_s:.0f} s", show_line=True)
            return
        beat = self.arena.control.slot_value(slot, "beat")
        # Between the epochs of a loop of the user's own, and after the last, nobody can say how long it may take.
        if beat != seat.beat or PHASES[self.arena.control.slot_value(slot, "phase")] == "outside":
            seat.beat, seat.beat_time = beat, now
        elif now - seat.beat_time > self.limits.hang_s and seat.blame is None:
            self._condemn(slot, seat, f"gave no sign of life for {now - seat.beat_time:.1f} s", show_line=True)

    def _condemn(self, slot: int, seat: Seat, why: str, *, show_line: bool) -> None:
        control = self.arena.control
        phase, step = PHASES[control.slot_value(slot, "phase")], control.slot_value(slot, "at")
        where = f"in the {phase} phase of step {step}"
        if (lane := control.slot_value(slot, "lane")) >= 0:
            where += f", lane {lane}"
        line = seat.stack.ask(seat.process) if show_line else None
        seat.blame = why
        at = f", at {line}" if line else ""
        text = f"{self.name(slot)} (pid {seat.process.pid}) {why} {where}{at}; it is being replaced"
        self.on_event(f"{self._team(slot).role}_hung", {**self._who(slot), "pid": seat.process.pid, "text": text})
        seat.process.signal(signal.SIGKILL)

    def _propose(self, lanes: list[int] | None = None) -> None:
        """Make a plan; when it cannot be made now, it is tried again at the next tick."""
        placed = self.plans.propose(lanes)
        self._proposal_due = placed is None
        if placed is not None:
            number, workers = self.arena.control.proposed, len(self.membership.active)
            self.on_event("plan", {"plan": number, "lanes": placed, "workers": workers})


def _since(moment: float) -> float:
    return round(time.monotonic() - moment, 6)
