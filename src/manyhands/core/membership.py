"""The life of the workers of a run, as a state machine: events in, actions out. No clock, no processes.

Each slot is a seat for one worker process. A seat is *starting* until its process says it is ready, then
*active*; a seat that is given up is *leaving* until the plan no longer names it. A process that dies leaves its
seat to a successor, unless deaths come so fast that the same step never gets done.

Why a process died says whom to suspect. An exit or a fault comes from the work, and will come again. A kill may come
from anybody: from outside, where a storm of them passes, or from a system whose memory the work has used up, where it
does not. Time tells those apart: kills count against a run only while it stands still.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Action", "GiveUp", "Membership", "Propose", "Release", "Repair", "Spawn"]

Status = Literal["starting", "active", "leaving"]


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process for the seat."""

    slot: int


@dataclass(frozen=True, slots=True)
class Repair:
    """Hand work whose owner is dead to the living ones, now; ``slot`` is why."""

    slot: int


@dataclass(frozen=True, slots=True)
class Propose:
    """Make a plan for the active seats; it begins with the next step."""


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the process of this seat to end: no plan names it any more."""

    slot: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run cannot go on."""

    why: str


Action = Spawn | Repair | Propose | Release | GiveUp


@dataclass(slots=True)
class Membership:
    """Who sits where. ``target`` seats are wanted of those with the numbers ``first`` to ``first + slots - 1``."""

    target: int
    slots: int
    first: int = 0
    role: str = "worker"
    deaths_per_step: int = 3  # this many deaths per wanted worker at one step, and the run gives up
    standstill_s: float = 10.0  # ... if the work is to blame; if not, after so long at the same step
    status: dict[int, Status] = field(default_factory=dict)
    _step: int = -1
    _since: float = 0.0
    _deaths: int = 0
    _faults: int = 0

    def start(self) -> list[Action]:
        """Fill the seats."""
        return self._fill()

    @property
    def active(self) -> list[int]:
        """Seats that can be given work."""
        # The copy lets another thread read while this changes: taking it is one operation of the interpreter.
        return sorted(slot for slot, status in list(self.status.items()) if status == "active")

    @property
    def seated(self) -> list[int]:
        """Seats with a process."""
        return sorted(self.status)

    def ready(self, slot: int) -> list[Action]:
        """The process of ``slot`` can work."""
        status = self.status.get(slot)
        if status == "leaving":  # it was told to go before it could listen
            return [Release(slot)]
        if status != "starting":
            return []
        self.status[slot] = "active"
        # Work of the dead waits where nobody was alive to take it.
        return [Repair(slot), Propose()]

    def died(self, slot: int, step: int, how: str, now: float, *, killed: bool) -> list[Action]:
        """The process of ``slot`` has ended (and can write nothing any more) while ``step`` was being worked on.

        ``killed``: by somebody, and not by what it was doing.
        """
        status = self.status.pop(slot, None)
        if status is None:
            return []
        if step != self._step:
            self._step, self._since, self._deaths, self._faults = step, now, 0, 0
        if status != "leaving":
            self._deaths += 1
            self._faults += not killed
            most, stands_s = self.deaths_per_step * max(self.target, 1), now - self._since
            if self._faults >= most or (self._deaths >= most and stands_s >= self.standstill_s):
                dead = f"{self._deaths} {self.role} processes died in step {step} without finishing it"
                return [GiveUp(f"{dead}, within {stands_s:.1f} s; the last one {how}")]
        repair: list[Action] = [Repair(slot)] if status != "starting" else []
        return repair + self._fill(prefer=slot)

    def resize(self, target: int) -> list[Action]:
        """Change the number of wanted workers. Seats with the highest numbers leave first."""
        self.target = target
        staying = [slot for slot in self.seated if self.status[slot] != "leaving"]
        leaving = staying[target:]
        actions: list[Action] = []
        for slot in leaving:
            if self.status[slot] == "starting":
                actions.append(Release(slot))
            self.status[slot] = "leaving"
        if leaving:
            actions.append(Propose())
        return actions + self._fill()

    def adopted(self, owners: set[int]) -> list[Action]:
        """A plan whose seats are ``owners`` is in force: those who are leaving and are not in it may go."""
        return [Release(slot) for slot in self.seated if self.status[slot] == "leaving" and slot not in owners]

    def _fill(self, prefer: int | None = None) -> list[Action]:
        actions: list[Action] = []
        wanted = sum(1 for status in self.status.values() if status != "leaving")
        free = [slot for slot in range(self.first, self.first + self.slots) if slot not in self.status]
        if prefer in free:  # a successor takes the seat of the dead
            free.remove(prefer)
            free.insert(0, prefer)
        for slot in free[: max(self.target - wanted, 0)]:
            self.status[slot] = "starting"
            actions.append(Spawn(slot))
        return actions
