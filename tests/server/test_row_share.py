"""The shares of a table: together they are the whole, and what does not belong to one is refused."""

from __future__ import annotations

import pytest
import torch

from manyhands.comm.envelope import Stream
from manyhands.comm.segment import Segment
from manyhands.comm.tables import Table, Tables, tables_bytes
from manyhands.errors import FrameError
from manyhands.server.part import size_bytes
from manyhands.server.row_share import RowShare, pack

SPECS = [Table("items", 100, 3, 0, "adagrad", ["sum"]), Table("users", 7, 2, 0, "sgd")]


def tables(shards: int) -> Tables:
    segment = Segment.create(tables_bytes(SPECS, 1, shards), "test")
    return Tables(SPECS, 1, shards, segment, 0)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_shares_are_the_whole(shards: int) -> None:
    full, empty = tables(shards), tables(shards)
    for group in full.planes:
        for plane in group:
            plane.copy_(torch.randn_like(plane))
    full.steps[:] = [4, 2]
    for shard in range(shards):
        share = RowShare(SPECS, shard, shards)
        state = share.gather(full)
        assert size_bytes(state) == share.size_bytes
        stream = Stream(state)
        share.scatter(stream, empty)
        stream.end()
    for ours, theirs in zip(full.planes, empty.planes, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert empty.steps.tolist() == full.steps.tolist()
    for made in (full, empty):
        made._segment.close()


def test_rows_of_an_update_travel() -> None:
    share = RowShare(SPECS, 0, 2)
    ids = share.ids[0][[3, 1, 8]]
    gradient = torch.randn(3, 3)
    payload = pack([(ids, gradient), None])
    found = share.take(Stream(payload))
    assert found[1] is None and found[0] is not None
    assert torch.equal(found[0][0], ids) and torch.equal(found[0][1], gradient)
    nothing = share.take(Stream(pack([(ids[:0], gradient[:0]), None])))[0]
    assert nothing is not None and len(nothing[0]) == 0, "the table was used, by rows of others"


def test_what_does_not_belong_is_refused() -> None:
    share, other = RowShare(SPECS, 0, 2), RowShare(SPECS, 1, 2)
    rows = torch.zeros(1, 3)
    for ids in (other.ids[0][:1], torch.tensor([100]), torch.tensor([-1])):
        with pytest.raises(FrameError, match="another shard"):
            share.take(Stream(pack([(ids, rows), None])))
    whole = b"".join(bytes(piece) for piece in pack([(share.ids[0][:1], rows), None]))
    for wrong in (whole[:-1], whole[:8], (200).to_bytes(8, "little") + whole[8:], b"\xff" * 16):
        with pytest.raises(FrameError):
            share.take(Stream([memoryview(wrong)]))
