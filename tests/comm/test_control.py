"""The control words: each is where it should be, and a step and its plan become final in one store."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from manyhands.comm.control import BANKS, PHASES, SLOT_FIELDS, Control, ControlShape
from manyhands.comm.segment import Segment

SHAPE = ControlShape(lanes=3, units=5, slots=4)


@pytest.fixture
def pair() -> Iterator[tuple[Control, Control]]:
    """Two mappings of the same words, as two processes have them."""
    segment = Segment.create(SHAPE.size_bytes + 64, "test")
    yield Control(SHAPE, segment, 64), Control(SHAPE, Segment(segment.fd, segment.size_bytes), 64)
    segment.close()


def test_commit_carries_steps_and_plan_together(pair: tuple[Control, Control]) -> None:
    mine, theirs = pair
    assert theirs.committed == (0, 0)
    for steps, plan in ((1, 0), (7, 3), (2**38, 2**24 - 1), (0, 5)):
        mine.commit(steps, plan)
        assert theirs.committed == (steps, plan)
        assert theirs.steps == steps


@pytest.mark.parametrize("word", ["proposed", "repairs", "horizon", "held", "stop", "first_commit_ns"])
def test_single_words_are_shared_and_apart(word: str, pair: tuple[Control, Control]) -> None:
    mine, theirs = pair
    setattr(mine, word, 2**50 + 1)
    assert getattr(theirs, word) == 2**50 + 1
    others = {"proposed", "repairs", "horizon", "held", "stop", "first_commit_ns"} - {word}
    assert {getattr(theirs, other) for other in others} == {0}
    assert theirs.committed == (0, 0) and theirs.bell.count == 0 and theirs.desk.count == 0


def test_bells_are_two_and_do_not_touch_the_words(pair: tuple[Control, Control]) -> None:
    mine, theirs = pair
    mine.bell.ring()
    mine.bell.ring()
    mine.desk.ring()
    assert (theirs.bell.count, theirs.desk.count) == (2, 1)
    assert (theirs.first_commit_ns, theirs.stop, theirs.held) == (0, 0, 0)


def test_plans_live_in_banks(pair: tuple[Control, Control]) -> None:
    mine, theirs = pair
    for plan in range(BANKS):
        mine.write_plan(plan, plan % 4, [plan, 1, 2], np.arange(5) + plan)
    for plan in range(BANKS):
        assert theirs.leader(plan) == plan % 4
        assert theirs.lane_owner(plan).tolist() == [plan, 1, 2]
        assert theirs.unit_owner(plan).tolist() == [plan + n for n in range(5)]
    mine.write_plan(BANKS + 2, -1, [-1] * 3, np.full(5, -1))
    assert theirs.leader(2) == -1, "the bank of an old plan is used again"
    theirs.set_leader(3, 0)
    theirs.lane_owner(3)[1] = 3
    assert mine.leader(3) == 0 and mine.lane_owner(3).tolist() == [3, 3, 2]


def test_slots_are_apart(pair: tuple[Control, Control]) -> None:
    mine, theirs = pair
    for slot in range(SHAPE.slots):
        for number, field in enumerate(SLOT_FIELDS):
            mine.set_slot_value(slot, field, 100 * slot + number)
    for slot in range(SHAPE.slots):
        assert list(theirs.slot(slot)) == [100 * slot + number for number in range(len(SLOT_FIELDS))]
        theirs.slot(slot)[0] = -slot
        assert mine.slot_value(slot, "beat") == -slot
    assert not any(
        array.any() for array in (mine.lane_done, mine.lane_bad, mine.unit_done, mine.unit_ready, mine.norm_done)
    )


def test_positions_that_other_modules_know_by_number() -> None:
    """The undo log and the stepper read slots by position: a change of order must not go unseen."""
    assert [SLOT_FIELDS.index(name) for name in ("beat", "phase", "at", "lane", "inbox")] == [0, 1, 2, 3, 4]
    assert [SLOT_FIELDS.index(name) for name in ("undo_step", "undo_first", "undo_stop")] == [5, 6, 7]
    assert [SLOT_FIELDS.index(f"{name}_ns") for name in ("data", "compute", "wait", "reduce")] == [8, 9, 10, 11]
    assert [SLOT_FIELDS.index(name) for name in ("lanes_done", "lane_ns")] == [12, 13]
    assert PHASES[0] == "starting", "the words of a slot begin as zeros"
