"""Rows of tables: the same numbers as torch's own optimizers on sparse gradients, each update with one effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import rig  # noqa: F401 - builds the first optimizer of the process
import torch
from torch import nn

from manyhands.comm.tables import batch_rows
from manyhands.sync import rows as rows_module
from manyhands.sync.optimizer_state import hyper_row
from manyhands.sync.rows import RowApplier, recover_rows
from manyhands.train.state import ModelState, Needs

ROWS, WIDTH = 20_000, 16
SGD: dict[str, Any] = {"lr": 0.1}

Factory = Callable[[Sequence[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Factory, Factory]] = {  # ours, and what torch has for sparse gradients
    "sgd": (lambda p: torch.optim.SGD(p, **SGD), lambda p: torch.optim.SGD(p, **SGD)),
    "sgd, fused": (lambda p: torch.optim.SGD(p, fused=True, **SGD), lambda p: torch.optim.SGD(p, **SGD)),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    ),
    "sparseadam": (lambda p: torch.optim.SparseAdam(p, lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
    "adam": (
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99)),
        lambda p: torch.optim.SparseAdam(p, lr=0.01, betas=(0.8, 0.99)),
    ),
}


class Bench:
    """One table in an arena, its servers in this process, and torch's optimizer on sparse gradients beside it."""

    def __init__(self, ours: Factory, theirs: Factory, servers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.plain = nn.Parameter(self.model.weight.detach().clone())
        self.optimizer, self.reference = ours(list(self.model.parameters())), theirs([self.plain])
        self.state = ModelState(
            self.model, self.optimizer, Needs(servers=servers, exchange=True), lanes=1, samples=0, stats=2, ring=4
        )
        self.arena, self.tables = self.state.arena, self.state.arena.tables()
        template = self.state.template
        assert template is not None
        self.hyper = np.array(hyper_row(self.optimizer, template.hyper))
        self.beats = 0
        self.servers = [RowApplier(self.arena, index, template, self.beat) for index in range(servers)]
        self.random = torch.Generator().manual_seed(1)
        self.entry = 0

    def beat(self) -> None:
        self.beats += 1

    def bring(self, worker: int, count: int = 12_000) -> torch.Tensor:
        """Rows and gradients in a worker's place, as it would leave them; the gradient as torch would have it."""
        ids = torch.randperm(ROWS, generator=self.random)[:count].sort().values
        gradients = torch.randn(count, WIDTH, generator=self.random)
        place = self.tables.place(worker, 0)
        place.ids[:count], place.gradients[:count] = ids, gradients
        place.values[:count] = self.tables.planes[0][0][ids]
        self.tables.brought[worker, 0] = count + 1
        return torch.sparse_coo_tensor(ids[None], gradients, (ROWS, WIDTH), is_coalesced=True, check_invariants=False)

    def apply(self, members: Sequence[int], factor: float = 1.0, compensation: float = 0.0) -> None:
        for server in self.servers:
            server.apply(self.entry, members, self.hyper, factor, compensation)
        self.end_entry()

    def end_entry(self) -> None:
        self.entry += 1
        self.arena.exchange().applied[:] = self.entry

    def step_reference(self, gradient: torch.Tensor) -> None:
        self.plain.grad = gradient
        self.reference.step()

    def image(self) -> bytes:
        return b"".join(plane.numpy().tobytes() for plane in self.tables.planes[0])


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(ours: Factory, theirs: Factory | None = None, servers: int = 1) -> Bench:
        made.append(Bench(ours, theirs or ours, servers))
        return made[-1]

    with torch.sparse.check_sparse_tensor_invariants(True):  # or torch warns that it does not
        yield build
    for bench in made:
        bench.arena.close()


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_updated_as_torch_updates_them(make: Callable[..., Bench], name: str, servers: int) -> None:
    bench = make(*OPTIMIZERS[name], servers)
    for _ in range(5):
        bench.step_reference(bench.bring(worker=2))
        bench.apply([2])
    torch.testing.assert_close(bench.tables.planes[0][0], bench.plain.detach(), rtol=1e-6, atol=1e-6)
    theirs = bench.reference.state[bench.plain]
    ours = {name.rpartition("/")[2]: value for name, value in bench.state.tensors().items() if "optimizer/" in name}
    kept = {key: value for key, value in theirs.items() if torch.is_tensor(value) and value.ndim}
    assert set(kept) <= set(ours)
    for key, value in kept.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-6)
    if kept:
        assert float(ours["step"]) == 5


def test_a_decay_that_is_decoupled_belongs_to_the_rows_that_are_touched(make: Callable[..., Bench]) -> None:
    bench = make(
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.01)
    )
    for _ in range(3):
        gradient = bench.bring(worker=0)
        with torch.no_grad():
            bench.plain[gradient.indices()[0]] *= 1 - 0.01 * 0.1
        bench.step_reference(gradient)
        bench.apply([0])
    torch.testing.assert_close(bench.tables.planes[0][0], bench.plain.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("servers", [1, 2])
def test_updates_of_one_step_are_added_up(make: Callable[..., Bench], servers: int) -> None:
    bench = make(OPTIMIZERS["adagrad"][0], servers=servers)
    gradients = [bench.bring(worker) for worker in (0, 1, 5)]
    bench.step_reference((gradients[0] + gradients[1] + gradients[2]).coalesce() * 0.5)
    bench.apply([0, 1, 5], factor=0.5)
    torch.testing.assert_close(bench.tables.planes[0][0], bench.plain.detach(), rtol=1e-6, atol=1e-6)


def test_a_stale_gradient_is_compensated_for_what_its_rows_have_moved(make: Callable[..., Bench]) -> None:
    bench = make(OPTIMIZERS["sgd"][0], servers=2)
    stale = bench.bring(worker=0)
    bench.step_reference(bench.bring(worker=1))
    bench.apply([1])
    read, ids, values = bench.tables.place(0, 0).values[:12_000], stale.indices()[0], stale.values()
    mended = values + 0.3 * values * values * (bench.plain.detach()[ids] - read)
    bench.step_reference(torch.sparse_coo_tensor(ids[None], mended, (ROWS, WIDTH), check_invariants=False))
    bench.apply([0], compensation=0.3)
    torch.testing.assert_close(bench.tables.planes[0][0], bench.plain.detach(), rtol=1e-6, atol=1e-6)


def test_a_table_that_nobody_used_sees_no_step(make: Callable[..., Bench]) -> None:
    bench = make(OPTIMIZERS["adam"][0])
    before = bench.image()
    bench.apply([0])
    assert bench.image() == before
    bench.bring(worker=0, count=0)
    bench.apply([0])
    assert bench.image() == before
    assert bench.tables.steps[bench.entry % 2].tolist() == [[1]]


class Died(Exception):
    """Instead of the end of the process, which would take the test along."""


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("deaths", [[1], [2], [1, 1, 2]])
def test_an_update_has_one_effect_whenever_its_server_dies(
    make: Callable[..., Bench], name: str, deaths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies in batch number 1 or 2 of an entry, with rows and state half-changed; its successor does the rest."""
    quiet, struck = make(OPTIMIZERS[name][0]), make(OPTIMIZERS[name][0])
    assert batch_rows(quiet.tables.specs[0]) < 12_000 <= 2 * batch_rows(quiet.tables.specs[0])
    for bench in (quiet, struck):
        bench.bring(worker=0)
        bench.apply([0])
        bench.bring(worker=0)
    quiet.apply([0])
    rule, template = rows_module.RULES[struck.tables.specs[0].rule], struck.state.template
    assert template is not None
    for death in deaths:
        calls = 0

        def strike(rows: Sequence[torch.Tensor], *rest: Any, at: int = death) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                ids = struck.tables.undo(0, 0, len(rows[0]))[0]
                for plane in struck.tables.planes[0]:
                    plane[ids[::2]] = 1000.0
                raise Died
            rule.apply(rows, *rest)

        with monkeypatch.context() as patch:
            patch.setitem(rows_module.RULES, struck.tables.specs[0].rule, rows_module.RowRule(rule.planes, strike))
            with pytest.raises(Died):
                struck.servers[0].apply(struck.entry, [0], struck.hyper, 1.0, 0.0)
        slot = struck.arena.spec.slots - 1
        assert recover_rows(struck.arena, slot) is True
        assert recover_rows(struck.arena, slot) is False
        struck.servers[0] = RowApplier(struck.arena, 0, template, struck.beat)
        if death == 2:
            break  # its first batch is done: the next one would be the first that is left
    struck.apply([0])
    assert struck.image() == quiet.image()
    assert (struck.tables.steps[struck.entry % 2] == quiet.tables.steps[quiet.entry % 2]).all()


def test_rows_that_are_finished_are_neither_put_back_nor_done_again(make: Callable[..., Bench]) -> None:
    bench = make(OPTIMIZERS["adam"][0])
    bench.bring(worker=0)
    bench.servers[0].apply(0, [0], bench.hyper, 1.0, 0.0)
    done, beats = bench.image(), bench.beats
    bench.tables.mark[0] = bench.tables.finished[0]  # died between the two words
    assert recover_rows(bench.arena, bench.arena.spec.slots - 1) is False
    bench.servers[0].apply(0, [0], bench.hyper, 1.0, 0.0)
    assert bench.image() == done and bench.beats == beats
    bench.end_entry()
    assert bench.tables.steps[bench.entry % 2].tolist() == [[1]]
