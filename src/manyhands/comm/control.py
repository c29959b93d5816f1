"""The control words of an arena: who holds what, what is done, how far a run may go.

Every word has one writer at a time and is written whole, so no lock is needed and none can be left behind:

- the caller writes plans, the horizon, orders to stop;
- the worker that holds a lane or unit stamps it with step + 1 when it is done;
- the leader (one worker, named by the plan) writes the commit word.

A plan lives in a bank. The commit word carries the number of the plan that the next step uses, so a step and its
plan become final in one store.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.comm.bell import Bell
from manyhands.comm.segment import Segment

__all__ = ["BANKS", "PHASES", "SLOT_FIELDS", "Control", "ControlShape"]

BANKS = 8
_PLAN_BITS = 24
_HEAD = (
    "commit", "proposed", "repairs", "horizon", "held", "stop", "bell", "first_commit_ns", "desk", "kept", "kept_ns",
    "spares", "counter", "going_back",
)  # fmt: skip
SLOT_FIELDS = (
    "beat",  # counts every sign of life of the main thread
    "phase",  # index into PHASES
    "at",  # step being worked on
    "lane",  # lane being worked on, -1 outside
    "inbox",  # messages sent to the worker
    "undo_step",  # step + 1 while units [undo_first, undo_stop) are being applied
    "undo_first",
    "undo_stop",
    "data_ns",
    "compute_ns",
    "wait_ns",
    "reduce_ns",
    "lanes_done",
    "lane_ns",  # smoothed time for one lane
    "demand",  # thousandths of a core that the worker keeps busy while it works; 0: not measured
    "sent_bytes",  # frames of its lanes, as far as they go to others
    "received_bytes",  # parameters that others updated
)
PHASES = ("starting", "idle", "data", "compute", "wait", "reduce", "message", "outside")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlShape:
    """The sizes that fix the layout of the control words."""

    lanes: int
    units: int
    slots: int

    @property
    def words(self) -> int:
        """How many 64-bit words there are."""
        bank = 1 + self.lanes + self.units
        return 16 + self.slots * len(SLOT_FIELDS) + 2 * self.lanes + 3 * self.units + BANKS * bank

    @property
    def size_bytes(self) -> int:
        return 8 * self.words

    @property
    def ready_word(self) -> int:
        """The number of the first word of ``unit_ready``."""
        return 16 + self.slots * len(SLOT_FIELDS) + 2 * self.lanes + self.units


class Control:
    """The control words of one arena."""

    def __init__(self, shape: ControlShape, segment: Segment, offset: int) -> None:
        self.shape = shape
        words = segment.array(offset, (shape.words,), np.int64)
        self._head = memoryview(words[: len(_HEAD)])  # type: ignore[arg-type]
        self.bell = Bell(segment.buffer, offset + 8 * _HEAD.index("bell"))  # workers listen
        self.spares = Bell(segment.buffer, offset + 8 * _HEAD.index("spares"))  # workers without work listen
        self.counter = Bell(segment.buffer, offset + 8 * _HEAD.index("counter"))  # servers listen
        self.desk = Bell(segment.buffer, offset + 8 * _HEAD.index("desk"))  # the caller listens
        start = 16
        self._slots = words[start : start + shape.slots * len(SLOT_FIELDS)].reshape(shape.slots, len(SLOT_FIELDS))
        start += self._slots.size
        self.lane_done = words[start : start + shape.lanes]
        self.lane_bad = words[start + shape.lanes : start + 2 * shape.lanes]
        start += 2 * shape.lanes
        self.unit_done = words[start : start + shape.units]
        self.unit_ready = words[start + shape.units : start + 2 * shape.units]  # 1 once it has optimizer state
        self.norm_done = words[start + 2 * shape.units : start + 3 * shape.units]
        start += 3 * shape.units
        self._banks = words[start:].reshape(BANKS, 1 + shape.lanes + shape.units)

    # -- the commit word ------------------------------------------------------------------------------------
    @property
    def committed(self) -> tuple[int, int]:
        """(steps committed, plan of the step that comes next)."""
        word = self._head[0]
        return word >> _PLAN_BITS, word & (1 << _PLAN_BITS) - 1

    def commit(self, steps: int, plan: int) -> None:
        """Make ``steps`` steps final; the next one uses ``plan``."""
        self._head[0] = steps << _PLAN_BITS | plan

    # -- single words ---------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Steps committed."""
        return self._head[0] >> _PLAN_BITS

    @property
    def proposed(self) -> int:
        """The newest plan; the leader adopts it at its next commit."""
        return self._head[1]

    @proposed.setter
    def proposed(self, plan: int) -> None:
        self._head[1] = plan

    @property
    def repairs(self) -> int:
        """Counts changes of plans in place, after deaths."""
        return self._head[2]

    @repairs.setter
    def repairs(self, count: int) -> None:
        self._head[2] = count

    @property
    def horizon(self) -> int:
        """Steps below this number may be worked on."""
        return self._head[3]

    @horizon.setter
    def horizon(self, step: int) -> None:
        self._head[3] = step

    @property
    def held(self) -> int:
        """step + 1 while the leader waits at the horizon before that step: nothing of the state can change."""
        return self._head[4]

    @held.setter
    def held(self, value: int) -> None:
        self._head[4] = value

    @property
    def stop(self) -> int:
        """Not 0: workers leave."""
        return self._head[5]

    @stop.setter
    def stop(self, value: int) -> None:
        self._head[5] = value

    @property
    def first_commit_ns(self) -> int:
        """When the first step of this session was committed (monotonic clock)."""
        return self._head[7]

    @first_commit_ns.setter
    def first_commit_ns(self, value: int) -> None:
        self._head[7] = value

    @property
    def kept(self) -> int:
        """step + 1 while the kept copy of the state is that before ``step``; 0 while there is none."""
        return self._head[9]

    @kept.setter
    def kept(self, value: int) -> None:
        self._head[9] = value

    @property
    def kept_ns(self) -> int:
        """When the copy was made (monotonic clock)."""
        return self._head[10]

    @kept_ns.setter
    def kept_ns(self, value: int) -> None:
        self._head[10] = value

    @property
    def going_back(self) -> int:
        """1 while the caller restores the kept copy: nobody may begin to change the state."""
        return self._head[13]

    @going_back.setter
    def going_back(self, value: int) -> None:
        self._head[13] = value

    def wake_everybody(self) -> None:
        """Ring for those with work, for those without, and for servers."""
        self.bell.ring()
        self.spares.ring()
        self.counter.ring()

    # -- plans ----------------------------------------------------------------------------------------------
    def write_plan(self, plan: int, leader: int, lane_owner: list[int], unit_owner: np.ndarray) -> None:
        """Fill the bank of ``plan``; it counts once it is proposed or committed."""
        bank = self._banks[plan % BANKS]
        bank[0] = leader
        bank[1 : 1 + self.shape.lanes] = lane_owner
        bank[1 + self.shape.lanes :] = unit_owner

    def leader(self, plan: int) -> int:
        """The slot that commits under ``plan``."""
        return int(self._banks[plan % BANKS, 0])

    def set_leader(self, plan: int, slot: int) -> None:
        """Name another leader after the first one died."""
        self._banks[plan % BANKS, 0] = slot

    def lane_owner(self, plan: int) -> np.ndarray:
        """Owner slot of each lane, a writable view."""
        return self._banks[plan % BANKS, 1 : 1 + self.shape.lanes]

    def unit_owner(self, plan: int) -> np.ndarray:
        """Owner slot of each unit, a writable view."""
        return self._banks[plan % BANKS, 1 + self.shape.lanes :]

    # -- slots ----------------------------------------------------------------------------------------------
    def slot(self, slot: int) -> memoryview:
        """The words of a slot, in the order of SLOT_FIELDS."""
        return memoryview(self._slots[slot])

    def marked(self, stamp: int) -> bool:
        """Whether some process is changing the state for that step, or died over it."""
        return bool((self._slots[:, SLOT_FIELDS.index("undo_step")] == stamp).any())

    def clear_marks(self) -> None:
        """Nobody is changing the state, and what the dead left half-changed is settled."""
        self._slots[:, SLOT_FIELDS.index("undo_step")] = 0

    def slot_value(self, slot: int, field: str) -> int:
        """One word of a slot."""
        return int(self._slots[slot, SLOT_FIELDS.index(field)])

    def set_slot_value(self, slot: int, field: str, value: int) -> None:
        """Write one word of a slot."""
        self._slots[slot, SLOT_FIELDS.index(field)] = value
