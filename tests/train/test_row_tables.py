"""Models with tables that servers hold by row, on real workers and servers, against plain loops in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import manyhands as mh
from manyhands.core.order import epoch_order
from manyhands.engine import local
from manyhands.errors import ModelError

SAMPLES, BATCH, USERS, ITEMS = 208, 16, 300, 500
QUIET: dict[str, Any] = {"run_dir": False, "progress": "quiet", "batch_size": BATCH}

_generator = torch.Generator().manual_seed(5)
IDS = torch.stack(
    [torch.randint(0, USERS, (SAMPLES,), generator=_generator)]
    + [torch.randint(0, ITEMS, (SAMPLES,), generator=_generator) for _ in range(3)],
    dim=1,
)
IDS[::5, 3] = 0  # the padding of items
RATING = torch.rand(SAMPLES, generator=_generator)


class Taste(nn.Module):
    """Two tables: one is called once per forward, the other twice."""

    def __init__(self, sparse: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.users = nn.Embedding(USERS, 8, sparse=sparse, **options)
        self.items = nn.Embedding(ITEMS, 8, padding_idx=0, sparse=sparse)
        # No bias before the norm: its gradient is nothing but rounding, which Adagrad and Adam would blow up.
        self.head = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        items = self.items(ids[:, 1:3]).sum(1) + self.items(ids[:, 3])
        out: torch.Tensor = self.head(self.users(ids[:, 0]) * items).squeeze(1)
        return out


def plain_loop(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    epochs: list[int],
    before_step: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """What a fit of one worker computes."""
    with jobs.one_thread(), torch.sparse.check_sparse_tensor_invariants(False):
        for epoch in epochs:
            for rows in torch.from_numpy(epoch_order(0, epoch, SAMPLES)).split(BATCH):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                functional.mse_loss(model(IDS[rows]), RATING[rows]).backward()
                before_step(model)
                for optimizer in optimizers:
                    optimizer.step()


def limit_norm(model: nn.Module, limit: float = 0.05) -> None:
    """Torch's own does not take sparse gradients."""
    found = [p.grad.coalesce() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None]
    parts = [gradient.values() if gradient.is_sparse else gradient for gradient in found]
    norm = float(torch.stack([part.norm() for part in parts]).norm())
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient * min(limit / (norm + 1e-6), 1.0)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def server(servers: int = 2, policy: Any = "async") -> mh.Server:
    return mh.Server(policy=policy, servers=servers)


def fit(model: nn.Module, optimizer: Any, *, workers: int = 1, sync: Any = None, **options: Any) -> mh.Trainer:
    trainer_options = {key: options.pop(key) for key in ("clip", "accumulate") if key in options}
    trainer = mh.Trainer(
        model, loss="mse", optimizer=optimizer, workers=workers, sync=sync or server(), **trainer_options
    )
    trainer.fit((IDS, RATING), **(QUIET | options))
    return trainer


def dense_and_tables(model: Taste) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    tables = [model.users.weight, model.items.weight]
    return [p for p in model.parameters() if all(p is not t for t in tables)], tables


# -- against one process ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_one_worker_equals_a_plain_loop(name: str) -> None:
    model, plain = Taste(), Taste()
    trainer = fit(model, mh.optimizer(name, lr=0.1), epochs=2)
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    plain_loop(plain, [kind(plain.parameters(), lr=0.1)], [0, 1])
    assert_same(model, plain)
    assert trainer.history.rows["pulled"] > trainer.history.rows["pushed"] > 0  # padding is not pushed


def test_a_limit_on_the_norm_counts_the_rows() -> None:
    model, plain = Taste(), Taste()
    fit(model, mh.optimizer("sgd", lr=0.1), clip=0.05)
    plain_loop(plain, [torch.optim.SGD(plain.parameters(), lr=0.1)], [0], limit_norm)
    assert_same(model, plain)


def test_adam_for_the_rest_is_lazy_adam_for_rows() -> None:
    model, plain = Taste(), Taste()
    fit(model, mh.optimizer("adam", lr=0.01), epochs=2)
    dense, tables = dense_and_tables(plain)
    plain_loop(plain, [torch.optim.Adam(dense, lr=0.01), torch.optim.SparseAdam(tables, lr=0.01)], [0, 1])
    assert_same(model, plain)


def test_sparse_adam_for_the_tables_alone() -> None:
    model, plain = Taste(), Taste()
    fit(model, torch.optim.SparseAdam(dense_and_tables(model)[1], lr=0.01))
    plain_loop(plain, [torch.optim.SparseAdam(dense_and_tables(plain)[1], lr=0.01)], [0])
    assert_same(model, plain)


def test_parameter_groups_and_a_schedule_reach_the_rows() -> None:
    model, plain = Taste(), Taste()

    def build(model: Taste) -> torch.optim.Optimizer:
        dense, tables = dense_and_tables(model)
        return torch.optim.SGD([{"params": dense, "lr": 0.2, "momentum": 0.9}, {"params": tables, "lr": 0.5}])

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    trainer = mh.Trainer(
        model, loss="mse", optimizer=build(model), workers=1, sync=server(), schedule=mh.PerEpoch(halve)
    )
    trainer.fit((IDS, RATING), **QUIET, epochs=3)
    optimizer = build(plain)
    schedule = halve(optimizer)
    for epoch in range(3):
        plain_loop(plain, [optimizer], [epoch])
        schedule.step()
    assert_same(model, plain)


def test_another_fit_goes_on_with_the_state_of_the_rows() -> None:
    model, plain = Taste(), Taste()
    trainer = fit(model, mh.optimizer("adagrad", lr=0.1))
    trainer.fit((IDS, RATING), **QUIET)
    plain_loop(plain, [torch.optim.Adagrad(plain.parameters(), lr=0.1)], [0, 0])
    assert_same(model, plain)


def test_pieces_of_a_batch_make_the_same_step() -> None:
    """Without BatchNorm, which sees pieces; rows that pieces have in common are moved once."""
    models = [Taste(), Taste()]
    for model in models:
        model.head[1] = nn.Identity()
    whole = fit(models[0], mh.optimizer("sgd", lr=0.1))
    pieces = fit(models[1], mh.optimizer("sgd", lr=0.1), accumulate=3)
    assert_same(*models)
    assert whole.history.rows == pieces.history.rows


@pytest.mark.parametrize("sync", ["allreduce", "server"])
def test_in_lock_step_nothing_is_held_by_row(sync: str) -> None:
    model, plain = Taste(), Taste()
    trainer = fit(model, mh.optimizer("adagrad", lr=0.1), sync=sync)
    plain_loop(plain, [torch.optim.Adagrad(plain.parameters(), lr=0.1)], [0])
    assert_same(model, plain)
    assert trainer.history.rows == {}


# -- what moves -------------------------------------------------------------------------------------------------
class Counting(mh.Callback):
    """After every step: the rows that it moved."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, int]] = []
        self._before = (0, 0)

    def on_step_end(self, state: mh.State) -> None:
        now = (state.history.rows["pulled"], state.history.rows["pushed"])
        self.moved.append((now[0] - self._before[0], now[1] - self._before[1]))
        self._before = now


@pytest.mark.parametrize("workers", [1, 3])
def test_the_rows_moved_in_a_step_are_the_distinct_rows_of_its_batch(workers: int) -> None:
    counting = Counting()
    fit(Taste(), "adagrad", workers=workers, epochs=2, callbacks=[counting])
    expected = []
    for epoch in range(2):
        for rows in np.split(epoch_order(0, epoch, SAMPLES), range(BATCH, SAMPLES, BATCH)):
            users, items = set(IDS[rows, 0].tolist()), set(IDS[rows, 1:].flatten().tolist())
            expected.append((len(users) + len(items), len(users) + len(items - {0})))
    assert counting.moved == expected


class Large(nn.Module):
    """A table of 256 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4_000_000, 16, sparse=True, _weight=torch.zeros(4_000_000, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids * 7919).sum((1, 2))


def private_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_a_worker_holds_little_of_a_large_table() -> None:
    model = Large()
    trainer = mh.Trainer(model, loss="mse", optimizer=mh.optimizer("sgd", lr=0.1), workers=2, sync=server())
    own_bytes, arena_bytes = [], []

    def look(state: mh.State) -> None:
        assert trainer._fit is not None
        arena = trainer._fit.session.arena
        arena_bytes.append(os.fstat(arena.segment.fd).st_blocks * 512)
        zygote = local.zygote_pid()  # which has torch and nothing else
        assert zygote is not None
        workers = [pid for role, pid in trainer.pids.items() if role.startswith("worker")]
        own_bytes.extend(private_bytes(pid) - private_bytes(zygote) for pid in workers)

    trainer.fit((IDS, RATING), callbacks=[mh.Lambda(on_epoch_end=look)], **QUIET)
    assert len(own_bytes) == 2 and max(own_bytes) < model.table.weight.nbytes / 4
    assert 0 <= arena_bytes[0] - model.table.weight.nbytes < 16e6  # the table once, and little beside it


@pytest.mark.parametrize("policy", ["bounded", "compensated", "rennala"])
def test_many_workers_learn_the_same_under_every_policy(policy: str) -> None:
    model = Taste()
    history = fit(model, mh.optimizer("adagrad", lr=0.1), workers=3, epochs=8, sync=server(policy=policy)).history
    assert history.metrics["loss"][-1] < 0.5 * history.metrics["loss"][0]


# -- the rest of the Trainer ------------------------------------------------------------------------------------
def test_evaluate_and_predict_see_the_rows_as_they_are() -> None:
    model = Taste()
    trainer = mh.Trainer(model, loss="mse", optimizer="adagrad", workers=2, sync=server())
    seen: list[tuple[float, torch.Tensor]] = []

    def look(state: mh.State) -> None:
        seen.append((trainer.evaluate((IDS, RATING), 50)["loss"], trainer.predict(IDS, 50)))
        with torch.no_grad(), jobs.one_thread():
            outputs = torch.cat([state.model.eval()(part) for part in IDS.split(50)])
        torch.testing.assert_close(seen[-1][1], outputs, rtol=0, atol=0)
        assert seen[-1][0] == pytest.approx(float(functional.mse_loss(outputs, RATING)), rel=1e-6)

    history = trainer.fit((IDS, RATING), (IDS, RATING), epochs=2, callbacks=[mh.Lambda(on_epoch_end=look)], **QUIET)
    assert len(seen) == 2 and not torch.equal(seen[0][1], seen[1][1])
    assert history.metrics["val_loss"] == pytest.approx([loss for loss, _ in seen], rel=1e-5)
    torch.testing.assert_close(trainer.predict(IDS, 50), seen[1][1], rtol=0, atol=0)


def test_a_run_that_is_resumed_ends_in_the_same_bits(tmp_path: Path) -> None:
    unbroken, resumed = Taste(), Taste()
    whole = fit(unbroken, "adam", epochs=3)
    first = fit(Taste(), "adam", epochs=2, run_dir=tmp_path, checkpoint_every_steps=7)
    second = fit(resumed, "adam", epochs=3, run_dir=tmp_path)
    assert mh.digest(resumed) == mh.digest(unbroken)
    assert first.history.rows["pulled"] < second.history.rows["pulled"]
    assert second.history.rows == whole.history.rows


def test_a_checkpoint_knows_nothing_of_rows(tmp_path: Path) -> None:
    """Written by row, read by a run that holds the same model whole; the state of the optimizer goes along."""
    fit(Taste(), mh.optimizer("adagrad", lr=0.1), run_dir=tmp_path)
    model, plain = Taste(), Taste()
    fit(model, mh.optimizer("adagrad", lr=0.1), epochs=2, run_dir=tmp_path, sync="allreduce")
    plain_loop(plain, [torch.optim.Adagrad(plain.parameters(), lr=0.1)], [0, 1])
    assert_same(model, plain)


# -- bad input --------------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[Callable[[], Taste], Any, str]] = {
    "momentum": (Taste, "momentum", r"users.weight is held by row .*momentum=0.9"),
    "decay": (Taste, mh.optimizer("adagrad", weight_decay=0.1), r"weight_decay=0.1.* decoupled \(AdamW\)"),
    "decay of adam": (Taste, mh.optimizer("adam", weight_decay=0.1), r"weight_decay=0.1.* decoupled \(AdamW\)"),
    "another optimizer": (Taste, "rmsprop", r"the optimizer is RMSprop; valid for rows: SGD without momentum, Adagrad"),
    "amsgrad": (Taste, mh.optimizer("adam", amsgrad=True), r"amsgrad=True"),
    "a norm": (lambda: Taste(max_norm=1.0), "adagrad", r"users.weight is held by row, .*max_norm=1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_by_row_is_refused_before_anything_starts(name: str) -> None:
    make, optimizer, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        fit(make(), optimizer)
    assert jobs.worker_processes() == []


def test_a_layer_that_is_not_sparse_is_free_of_these_limits() -> None:
    assert fit(Taste(sparse=False), "momentum").history.rows == {}


class Tied(Taste):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Embedding(USERS, 8, sparse=True)
        self.again.weight = self.users.weight


def test_a_weight_that_layers_share_or_that_is_frozen_is_held_whole() -> None:
    model = Tied()
    model.items.weight.requires_grad_(False)
    assert fit(model, mh.optimizer("sgd", lr=0.1)).history.rows == {}


class Penalty(Taste):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.users.weight.pow(2).sum()


def test_a_loss_that_needs_a_whole_table_ends_the_run_and_says_why() -> None:
    with pytest.raises(ModelError, match=r"users.weight is held by row .* another way than through its layer"):
        fit(Penalty(), "adagrad")


def test_a_row_that_does_not_exist_is_named_with_its_samples() -> None:
    ids = IDS.clone()
    ids[11, 1] = ITEMS
    trainer = mh.Trainer(Taste(), loss="mse", optimizer="adagrad", workers=2, sync=server())
    with pytest.raises(IndexError, match="out of range") as caught:
        trainer.fit((ids, RATING), **QUIET, shuffle=False)
    assert "samples [0, 1, 2" in " ".join(caught.value.__notes__)
