"""How a session lets workers go on."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from manyhands.train.session import Session


class CommitsBetweenLooks:
    """Words of a run that reaches its horizon, and rests there, right after somebody has looked at how far it is."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.horizon = steps
        self.held, self.kept = 0, 1
        self.rung = 0
        self.bell = SimpleNamespace(ring=self._ring)

    def _ring(self) -> None:
        self.rung += 1

    @property
    def steps(self) -> int:
        seen = self._steps
        if self.held == 0:
            self._steps, self.held = seen + 1, seen + 2
        return seen


def session_of(control: Any) -> Session:
    session = object.__new__(Session)
    session.control, session._fence, session._coordination = control, threading.Lock(), None
    session.supervisor = SimpleNamespace(servers=None)  # type: ignore[assignment]
    return session


def test_a_rest_that_begins_meanwhile_is_not_ended() -> None:
    control = CommitsBetweenLooks(5)
    session_of(control).allow(6)
    assert (control.held, control.rung) == (7, 0)


def test_a_rest_below_the_horizon_is_ended() -> None:
    control = CommitsBetweenLooks(5)
    control.held = 6
    session_of(control).allow(6)
    assert (control.held, control.kept, control.rung) == (0, 0, 1)
