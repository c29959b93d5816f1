"""The lead server's successor: nothing that was half logged counts as logged, and nobody's work is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from manyhands.comm.control import Control
from manyhands.comm.exchange import Exchange
from manyhands.core.policies import Plain
from manyhands.sync.lead import Lead
from manyhands.train.state import ModelState, Needs

# The first optimizer of a process makes torch import its compiler, which sets an environment variable: before a test.
torch.optim.SGD([nn.Parameter(torch.zeros(1))])


class Desk:
    """An arena with two workers, played by the test, and a lead."""

    def __init__(self, span: int) -> None:
        model = nn.Linear(3, 2)
        rates = torch.optim.SGD(model.parameters(), lr=1.0)
        shape = {"lanes": 1, "samples": 0, "stats": 2, "ring": 64}
        self.arena = ModelState(model, rates, Needs(exchange=True, servers=1, span=span), **shape).arena
        self.exchange: Exchange = self.arena.exchange()
        self.arena.control.lane_owner(0)[:] = -1
        self.arena.control.lane_owner(0)[:2] = [0, 1]
        self.arena.control.horizon = 20
        self.replace_lead()
        for slot in (0, 1):
            self.ask(slot, 0)
        self.serve()

    def replace_lead(self) -> None:
        self.lead = Lead(self.arena, Plain())

    def serve(self) -> None:
        """A turn of the lead, with an apply that changes nothing."""
        self.lead.judge()
        stamped = self.exchange.stamp.max()
        self.exchange.applied[0] = max(int(stamped), int(self.exchange.applied[0]))
        self.lead.settle()
        self.lead.grant(self.lead.resting)

    def ask(self, slot: int, chunk: int) -> None:
        self.exchange.chunk[slot], self.exchange.span[slot] = chunk, self.exchange.grant_span[slot]
        self.exchange.stats[slot] = slot + 1
        self.exchange.asked[slot] += 1

    def bring(self, slot: int) -> None:
        self.ask(slot, int(self.exchange.grant[slot]))

    def granted(self, slot: int) -> range:
        first = int(self.exchange.grant[slot]) - 1
        return range(first, first + int(self.exchange.grant_span[slot]))


@pytest.fixture(params=[1, 4])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = Desk(request.param)
    yield desk
    desk.arena.close()


def test_several_chunks_are_leased_and_committed_as_one(desk: Desk) -> None:
    span = desk.arena.spec.span
    assert [desk.granted(slot) for slot in (0, 1)] == [range(span), range(span, 2 * span)]
    desk.bring(1)
    desk.serve()
    assert desk.arena.control.steps == 0
    desk.bring(0)
    desk.serve()
    assert desk.arena.control.steps == 2 * span
    assert desk.exchange.tally()["applied"] == 2
    assert desk.arena.stats[: 2 * span, 0, 0].tolist() == [1.0] * span + [2.0] * span


def test_an_update_that_was_not_stamped_is_logged_by_the_successor(desk: Desk) -> None:
    """Another update gets the number that it was to have; it must not pass for this one."""
    exchange = desk.exchange
    mine = desk.granted(1)
    desk.bring(0)
    desk.bring(1)
    for chunk in mine:
        exchange.entry[chunk], exchange.known[chunk] = 0, chunk + 1  # and here the lead dies
    desk.replace_lead()
    desk.serve()
    assert (exchange.tally()["applied"], exchange.tally()["doubled"]) == (2, 0)
    assert desk.arena.control.steps == mine.stop


def test_a_successor_does_not_rest_while_somebody_computes(desk: Desk) -> None:
    desk.arena.control.horizon = 0  # the caller wants a rest
    desk.replace_lead()
    desk.serve()
    assert desk.arena.control.held == 0
    for slot in (0, 1):
        desk.bring(slot)
        desk.serve()
    assert desk.arena.control.steps == 2 * desk.arena.spec.span
    assert desk.arena.control.held == desk.arena.control.steps + 1


def test_a_successor_leases_what_nobody_has(desk: Desk) -> None:
    taken = {*desk.granted(0), *desk.granted(1)}
    desk.bring(0)
    desk.replace_lead()
    desk.serve()
    assert not taken & {*desk.granted(0)}


def test_what_overlaps_with_what_is_known_counts_for_nothing() -> None:
    desk = Desk(4)
    exchange = desk.exchange
    desk.bring(0)
    exchange.chunk[0] = 3  # chunks 2 to 5, from before a time that nobody remembers: half of it the other one has too
    desk.lead._leases.gone(0)
    desk.serve()
    desk.bring(1)
    desk.serve()
    tally = exchange.tally()
    assert (tally["applied"], tally["doubled"]) == (1, 1)
    while desk.arena.control.steps < 20:
        before = desk.arena.control.steps, exchange.tally()["applied"]
        for slot in (0, 1):
            if exchange.asked[slot] == exchange.granted[slot]:
                desk.bring(slot)
            desk.serve()
        assert (desk.arena.control.steps, exchange.tally()["applied"]) != before, "nobody gets anything to do"
    assert set(desk.arena.stats[:20, 0, 0].tolist()) <= {1.0, 2.0}
    desk.arena.close()


def test_a_horizon_that_is_raised_while_a_rest_is_declared_ends_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead has seen the old horizon; the caller raises it, and finds no rest that it would have to end."""
    control, held = desk.arena.control, Control.held
    control.horizon = desk.arena.spec.span
    desk.exchange.grant[1] = 0  # nobody else computes
    desk.replace_lead()
    desk.bring(0)
    raised: list[int] = []

    def look(control: Control) -> int:
        if not raised and control.steps == control.horizon:
            raised.append(control.horizon)
            control.horizon += desk.arena.spec.span
        return int(held.fget(control))  # type: ignore[attr-defined]

    monkeypatch.setattr(Control, "held", property(look, held.fset))  # type: ignore[attr-defined]
    desk.serve()
    assert raised == [desk.arena.spec.span]
    assert control.held == 0 and not desk.lead.resting
    desk.serve()
    assert desk.exchange.grant[0] > 0 and desk.granted(0).start == raised[0]
