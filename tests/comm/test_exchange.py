"""The words between workers and servers: whose updates make a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.comm.exchange import LOG, Exchange, ExchangeShape
from manyhands.comm.segment import Segment


@given(st.sets(st.integers(0, 127)), st.sets(st.integers(0, 127)))
def test_members_of_an_entry_are_read_as_they_were_written(first: set[int], second: set[int]) -> None:
    shape = ExchangeShape(workers=128, servers=1, ring=4, stats=2)
    segment = Segment.create(shape.size_bytes, "test")
    exchange = Exchange(shape, segment, 0)
    exchange.set_members(0, first)
    exchange.set_members(LOG - 1, second)
    assert exchange.members(0) == sorted(first)
    assert exchange.members(LOG - 1) == sorted(second)
    exchange.set_members(0, second)
    assert exchange.members(0) == sorted(second)
    segment.close()
