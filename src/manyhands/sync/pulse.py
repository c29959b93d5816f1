"""What a process shows of itself in the arena: that it lives, what it is doing, and how long it has done what."""

from __future__ import annotations

import time

from manyhands.comm.arena import Arena
from manyhands.comm.control import PHASES, SLOT_FIELDS

__all__ = ["AT", "BEAT", "INBOX", "LANE", "Pulse", "Stopped"]

BEAT, PHASE, AT, LANE, INBOX = (SLOT_FIELDS.index(name) for name in ("beat", "phase", "at", "lane", "inbox"))
_TIMES = {name: SLOT_FIELDS.index(f"{name}_ns") for name in ("data", "compute", "wait", "reduce")}


class Stopped(Exception):
    """The run ends; the worker should leave."""


class Pulse:
    """The words of one slot, written by its process alone."""

    encodes = False
    """Whether it encodes itself what it sends."""

    def __init__(self, arena: Arena, slot: int) -> None:
        self.slot = slot
        self._words = arena.control.slot(slot)
        self._seen_inbox = self._words[INBOX]
        self._mark_ns = time.perf_counter_ns()
        self._phase_name = "idle"
        self.enter("idle")

    def enter(self, phase: str) -> None:
        """Book the time since the last change to the old phase and show a sign of life."""
        now = time.perf_counter_ns()
        if (word := _TIMES.get(self._phase_name)) is not None:
            self._words[word] += now - self._mark_ns
        self._mark_ns, self._phase_name = now, phase
        self._words[PHASE] = PHASES.index(phase)
        self._words[BEAT] += 1

    def rebook(self, phase: str, other: str, spent_ns: int) -> None:
        """Some of the time in ``phase`` belongs to the ``other`` one."""
        self._words[_TIMES[phase]] -= spent_ns
        self._words[_TIMES[other]] += spent_ns

    def beat(self) -> None:
        """Show a sign of life."""
        self._words[BEAT] += 1

    def _has_message(self) -> bool:
        """Whether a message was announced since we last looked."""
        if self._words[INBOX] == self._seen_inbox:
            return False
        self._seen_inbox = self._words[INBOX]
        self.enter("message")
        return True
