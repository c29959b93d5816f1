"""Embedding layers that fetch rows: the same outputs and gradients as torch's own, and no row is moved twice."""

from __future__ import annotations

from collections.abc import Iterator

import jobs  # noqa: F401 - builds the first optimizer of the process
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands.comm.arena import Arena
from manyhands.errors import ModelError
from manyhands.train.row_embedding import RowEmbeddings
from manyhands.train.state import ModelState, Needs

ROWS, WIDTH, HOME = 50, 3, 1


class Pair:
    """The same layer twice: torch's own, and one whose rows are in an arena."""

    def __init__(self, padding: int | None = None) -> None:
        torch.manual_seed(0)
        self.plain = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
        self.layer = nn.Embedding(ROWS, WIDTH, padding_idx=padding, sparse=True)
        self.layer.load_state_dict(self.plain.state_dict())
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=1.0)
        state = ModelState(self.layer, optimizer, Needs(servers=1, exchange=True), lanes=1, samples=0, stats=2, ring=1)
        self.arena: Arena = state.arena
        self.tables = self.arena.tables()
        self.rows = RowEmbeddings(self.arena, self.layer, HOME, self.fetch)
        with torch.no_grad():  # as in a worker, where the parameter is not this one
            self.layer.weight.fill_(torch.nan)

    def fetch(self, index: int, ids: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self.tables.planes[index][0], 0, ids, out=out)

    def brought(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows, and the gradient that the worker brings as torch would have it."""
        place, count = self.tables.place(HOME, 0), int(self.tables.brought[HOME, 0]) - 1
        ids = place.ids[:count]
        assert len(ids.unique()) == count
        torch.testing.assert_close(place.values[:count], self.tables.planes[0][0][ids], rtol=0, atol=0)
        return ids, torch.zeros(ROWS, WIDTH).index_add_(0, ids, place.gradients[:count])


@pytest.fixture(params=[None, 7], ids=["", "with padding"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.arena.close()


CALLS = {
    "one call": [torch.tensor([[7, 1, 7], [49, 0, 1]])],
    "calls with rows in common": [torch.tensor([3, 7, 9]), torch.tensor([[9, 4], [3, 3]]), torch.tensor([4, 7])],
    "a call with no rows": [torch.tensor([], dtype=torch.int64), torch.tensor([5])],
    "one row, no dimension": [torch.tensor(8)],
    "small numbers": [torch.tensor([1, 2, 7], dtype=torch.int32)],
}


@pytest.mark.parametrize("backwards", [1, 2], ids=["one backward", "a backward for each call"])
@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_are_those_of_torch(pair: Pair, name: str, backwards: int) -> None:
    for _ in range(2):  # a chunk knows nothing of the one before
        pair.plain.weight.grad = None
        pair.rows.begin()
        losses = []
        for layer in (pair.plain, pair.layer):
            outputs = [layer(ids) for ids in CALLS[name]]
            losses.append([(number + 1) * out.pow(2).sum() for number, out in enumerate(outputs)])
            for loss in [sum(losses[-1])] if backwards == 1 else losses[-1]:
                loss.backward()
        assert [loss.item() for loss in losses[0]] == [loss.item() for loss in losses[1]]
        pair.rows.end()
        ids, gradient = pair.brought()
        assert pair.plain.weight.grad is not None
        torch.testing.assert_close(gradient, pair.plain.weight.grad)
        wanted = set(torch.cat([ids.flatten() for ids in CALLS[name]]).tolist())
        assert set(ids.tolist()) == wanted - {pair.layer.padding_idx}
        assert pair.rows.moved == (len(wanted), len(ids))


def test_a_row_stays_what_it_was_when_the_chunk_first_read_it(pair: Pair) -> None:
    pair.rows.begin()
    first = pair.layer(torch.tensor([1, 2]))
    pair.tables.planes[0][0].fill_(5.0)  # a server goes on meanwhile
    second = pair.layer(torch.tensor([2, 3]))
    assert torch.equal(first[1], second[0]) and set(second[1].tolist()) == {5.0}
    pair.rows.end()
    assert pair.rows.moved == (3, 0)


def test_rows_that_are_read_without_a_gradient_are_not_pushed(pair: Pair) -> None:
    pair.rows.begin()
    with torch.no_grad():
        pair.layer(torch.tensor([1, 2, 3]))
    pair.layer(torch.tensor([3, 4])).sum().backward()
    pair.rows.end()
    assert sorted(pair.brought()[0].tolist()) == [3, 4]
    assert pair.rows.moved == (4, 2)
    pair.rows.begin()
    pair.layer(torch.tensor([1]))
    pair.rows.end()
    assert pair.tables.brought[HOME, 0] == 0  # torch would have no gradient at all


def test_a_forward_that_is_repeated_in_the_backward_pass_moves_nothing_twice(pair: Pair) -> None:
    scale, ids = torch.ones(WIDTH, requires_grad=True), torch.tensor([1, 2, 2])
    pair.rows.begin()
    checkpoint(lambda s: pair.layer(ids) * s, scale, use_reentrant=False).sum().backward()
    pair.rows.end()
    assert pair.rows.moved == (2, 2)
    assert pair.brought()[1][2].tolist() == [2.0] * WIDTH


def test_a_gradient_of_a_gradient(pair: Pair) -> None:
    pair.rows.begin()
    results = []
    for layer in (pair.plain, pair.layer):
        out = layer(torch.tensor([1, 2, 2]))
        (inner,) = torch.autograd.grad(out.pow(3).sum(), out, create_graph=True)
        inner.sum().backward()
        results.append(inner)
    pair.rows.end()
    assert torch.equal(*results)
    torch.testing.assert_close(pair.brought()[1], pair.plain.weight.grad)


def test_a_weight_that_is_used_without_its_layer_is_refused(pair: Pair) -> None:
    pair.rows.begin()
    loss = pair.layer(torch.tensor([1])).sum() + pair.layer.weight.pow(2).sum()
    with pytest.raises(ModelError, match=r"weight is held by row .* another way than through its layer"):
        loss.backward()


@pytest.mark.parametrize("ids", [[ROWS], [-1], [0.5]], ids=["too large", "negative", "not whole"])
def test_ids_that_torch_refuses_are_refused_with_its_words(pair: Pair, ids: list[float]) -> None:
    errors = []
    pair.rows.begin()
    for layer in (pair.plain, pair.layer):
        with pytest.raises((IndexError, RuntimeError)) as caught:
            layer(torch.tensor(ids))
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
