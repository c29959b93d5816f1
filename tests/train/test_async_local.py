"""``sync="async-local"``: against the same steps in plain PyTorch, and everything a fit does beside training."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROWS, X, Y, mlp, one_thread, train
from torch import nn
from torch.nn import functional

import manyhands as mh
from manyhands.core.order import epoch_order
from manyhands.errors import NotFinite, UsageError
from manyhands.sync.delayed import DelayedNesterov
from manyhands.train.callbacks import Lambda
from manyhands.train.checkpoint import CheckpointStore
from manyhands.train.ledger_file import read_ledger
from manyhands.train.schedule import Course
from manyhands.train.strategy import resolve_sync

BATCH, EPOCHS = 16, 3
BATCHES = -(-ROWS // BATCH)  # five whole ones, and ten rows


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def steps_in_plain_torch(
    build: Callable[[Any], torch.optim.Optimizer], every: int, outer: Any, rate: float, clip: float | None
) -> tuple[nn.Module, list[float]]:
    """What one worker and its server compute, without manyhands."""
    centre, own, losses = mlp(), mlp(), []
    inner, outside = build(own.parameters()), outer(centre.parameters())
    for epoch in range(EPOCHS):
        order, total = epoch_order(0, epoch, ROWS), 0.0
        for first in range(0, BATCHES, every):
            own.load_state_dict(centre.state_dict())
            counts = []
            for batch in range(first, min(first + every, BATCHES)):
                rows = torch.from_numpy(order[batch * BATCH : (batch + 1) * BATCH])
                inner.param_groups[0]["lr"] = rate * (1 - (epoch * BATCHES + batch) / (EPOCHS * BATCHES))
                inner.zero_grad()
                loss = functional.cross_entropy(own(X[rows]), Y[rows])
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(own.parameters(), clip)
                inner.step()
                total += float(loss.detach()) * len(rows)
                counts.append(len(rows))
            weight = sum(counts) / (len(counts) * BATCH)
            for agreed, moved in zip(centre.parameters(), own.parameters(), strict=True):
                agreed.grad = (agreed.detach() - moved.detach()) * weight
            outside.step()
        losses.append(total / ROWS)
    return centre, losses


@pytest.mark.parametrize("build, clip", [(momentum, None), (adam, 0.3)])
@pytest.mark.parametrize("outer, delay", [("average", 2), ("delayed", 3), ("delayed", None)])
@pytest.mark.parametrize("every", [4, 50])
def test_one_worker_is_plain_torch(every: int, outer: str, delay: int | None, build: Any, clip: float | None) -> None:
    """The schedule counts batches, the clip is that of a step, state stays with the worker, and rows weigh."""
    settings: dict[str, Any] = {
        "average": lambda p: torch.optim.SGD(p, lr=1 / (delay or 1)),
        "delayed": lambda p: DelayedNesterov(p, lr=0.5, momentum=0.8, delay=delay or 1),
    }
    sync = mh.Local(every=every, outer=outer, asynchronous=True, delay=delay, outer_lr=0.5, outer_momentum=0.8)
    fit = {"epochs": EPOCHS, "batch_size": BATCH}
    trainer, history = train(optimizer=build, sync=sync, schedule="linear", clip=clip, workers=1, fit=fit)
    rate = build([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    with one_thread():
        expected, losses = steps_in_plain_torch(build, every, settings[outer], rate, clip)
    assert history.metrics["loss"] == pytest.approx(losses, rel=1e-4)
    for mine, theirs in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert history.updates["applied"] == EPOCHS * -(-BATCHES // every)
    assert history.updates["staleness_most"] == 0


def test_steps_are_counted_in_batches_and_validation_is_exact(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    watch = Lambda(on_step_end=lambda state: seen.append((state.step, state.metrics["loss"])))
    fit = {"epochs": 2, "callbacks": [watch], "run_dir": tmp_path / "run", "validation": (X[:31], Y[:31])}
    trainer, history = train(sync=mh.Local(every=4, asynchronous=True), workers=3, fit=fit)
    assert [step for step, _ in seen] == [4, 6, 10, 12]  # six batches in an epoch
    mean = (64 * seen[0][1] + 26 * seen[1][1]) / ROWS
    assert mean == pytest.approx(history.metrics["loss"][0])
    assert trainer.evaluate((X[:31], Y[:31]))["loss"] == pytest.approx(history.metrics["val_loss"][-1], rel=1e-6)
    proof = read_ledger(tmp_path / "run" / "ledger").verify()
    assert proof.exact and [epoch.once for epoch in proof.epochs] == [ROWS, ROWS]


class Unequal(nn.Module):
    """Slow in the first worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.012 if mh.worker_slot() == 0 else 0.002)
        found: torch.Tensor = self.layers(x)
        return found


def test_a_slow_worker_takes_fewer_batches_at_once() -> None:
    trainer = mh.Trainer(Unequal(), workers=2, sync=mh.Local(every=12, asynchronous=True))
    seen: list[list[int]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            if (fit := trainer._fit) is not None and fit.session.control.steps > 100:
                seen.append(fit.session.arena.exchange().grant_span[:2].tolist())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        data = (X.repeat(20, 1), Y.repeat(20))
        history = trainer.fit(data, epochs=3, batch_size=8, run_dir=False, progress="quiet")
    finally:
        over.set()
        watcher.join(10)
    slow, fast = (statistics.median(spans) for spans in zip(*seen, strict=True))
    assert fast >= 9 and slow <= 5, "a sixth of the speed"
    assert history.updates["staleness_most"] <= 6


def test_a_loss_that_is_not_finite_stops_the_run_or_is_left_out(tmp_path: Path) -> None:
    poisoned = X.clone()
    poisoned[17] = math.nan
    sync = mh.Local(every=4, asynchronous=True)
    with pytest.raises(NotFinite, match=r"lane 0: sample 17"):
        train(data=(poisoned, Y), sync=sync)
    for every in (1, 4):  # alone, the step leaves nothing to bring
        folder = tmp_path / str(every)
        model = nn.Sequential(nn.BatchNorm1d(X.shape[1]), mlp())
        sync = mh.Local(every=every, asynchronous=True)
        _, history = train(model, (poisoned, Y), sync=sync, nan="skip", fit={"run_dir": folder, "epochs": 2})
        assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
        assert all(math.isfinite(loss) for loss in history.metrics["loss"])
        proof = read_ledger(folder / "ledger").verify()
        assert proof.exact
        for epoch in proof.epochs:
            assert sum(epoch.skipped.values()) in (16, 10) and epoch.once == ROWS - sum(epoch.skipped.values())


def test_a_second_fit_goes_on_with_the_mean_of_the_workers_state() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = mh.Trainer(model, optimizer=optimizer, workers=1, sync=mh.Local(every=4, asynchronous=True))
    fit: dict[str, Any] = {"batch_size": BATCH, "run_dir": False, "progress": "quiet", "epochs": 3}
    trainer.fit((X, Y), **fit)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0 * BATCHES}
    assert all(state["exp_avg_sq"].max() > 0 for state in optimizer.state.values())
    trainer.fit((X, Y), **fit)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0 * BATCHES}


def test_a_codec_compresses_the_changes() -> None:
    fit = {"epochs": 4, "batch_size": BATCH}
    options: dict[str, Any] = {"optimizer": adam, "workers": 1, "fit": fit}
    digests = [
        mh.digest(train(sync=mh.Local(every=4, asynchronous=True, codec=codec), **options)[0].model)
        for codec in (None, "fp32", "int8")
    ]
    assert digests[0] == digests[1] != digests[2]
    _, history = train(sync="async-local:int8", **options)
    assert 0 < history.bytes["sent"] < history.bytes["received"]


def saved(folder: Path) -> Any:
    checkpoint, _ = CheckpointStore(folder / "checkpoints").load_latest()
    assert checkpoint is not None
    return checkpoint


def stop_at(step: int) -> mh.Callback:
    return Lambda(on_step_end=lambda state: state.stop("for the test") if state.step >= step else None)


def test_through_every_way_of_local_steps_and_all_reduce(tmp_path: Path) -> None:
    """Each in mid-epoch. The user's optimizer and the outer momentum go along, and the account is exact."""
    folder = tmp_path / "run"

    def run(sync: Any, until: int | None = None, **fit: Any) -> None:
        callbacks = [] if until is None else [stop_at(until)]
        settings = {"run_dir": folder, "epochs": 4, "batch_size": BATCH, "callbacks": callbacks} | fit
        train(optimizer="adamw", sync=sync, fit=settings)

    delayed = mh.Local(every=4, asynchronous=True, delay=2)
    run("allreduce", 2, lanes=2)
    run(delayed, 6)
    first = saved(folder)
    assert first.step == 6 and first.meta["course"]["sync"] == "async-local"
    name = "0.weight"
    assert first.tensors[f"outer/{name}/step"] == 1, "a batch of four, and nothing for the momentum yet"
    assert first.tensors[f"outer/{name}/gathered"].abs().max() > 0
    assert not first.tensors[f"outer/{name}/momentum_buffer"].any()
    assert not any(key.startswith("lanes/") for key in first.tensors)
    assert first.tensors[f"optimizer/{name}/step"] >= 2, "what all-reduce knew"
    run(delayed, 10)
    second = saved(folder).tensors
    assert second[f"outer/{name}/step"] == 0 and second[f"outer/{name}/momentum_buffer"].abs().max() > 0
    run(mh.Local(every=2), 14, lanes=3)
    third = saved(folder)
    assert third.meta["course"]["sync"] == "local" and third.meta["course"]["lanes"] == 3
    run("async-local", 18)
    run("async")
    assert not any(key.startswith("outer/") for key in saved(folder).tensors)
    proof = read_ledger(folder / "ledger").verify()
    assert proof.exact and [epoch.once for epoch in proof.epochs] == [ROWS] * 4


def test_a_resume_ends_where_the_run_would_have(tmp_path: Path) -> None:
    """One worker waits for nobody but itself, so its way is the same; stopped before and after the momentum moves."""

    def run(folder: Path, *callbacks: mh.Callback) -> nn.Module:
        fit = {"run_dir": folder, "epochs": 3, "batch_size": BATCH, "callbacks": callbacks}
        sync = mh.Local(every=2, asynchronous=True, delay=2)
        return train(optimizer="adamw", schedule="cosine", sync=sync, workers=1, fit=fit)[0].model

    expected = mh.digest(run(tmp_path / "whole"))
    for step in (2, 4):
        run(tmp_path / str(step), stop_at(step))
        assert saved(tmp_path / str(step)).step == step
        assert mh.digest(run(tmp_path / str(step))) == expected


@pytest.mark.parametrize("span", [1, 4, 50])
def test_what_a_worker_takes_at_once_ends_with_the_epoch(span: int) -> None:
    course, done, seen = Course(samples=90, batch_size=16, lanes=1, span=span), 0, list[int]()
    while done < 18:
        done = course.after(done)
        seen.append(done)
    assert seen == [step for step in range(1, 19) if step % 6 == 0 or step % 6 % span == 0]


def test_one_word_says_it() -> None:
    assert resolve_sync("async-local") == mh.Local(asynchronous=True) == mh.Local(outer="delayed")
    assert mh.Local().outer == "nesterov" and mh.Local().asynchronous is False
    assert mh.Local(outer="average").processes == 0
    assert mh.Local(outer="average", asynchronous=True, servers=3).processes == 3


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nesterov": ({"asynchronous": True, "outer": "nesterov"}, "asynchronous=True: valid are delayed, average"),
    "delayed": ({"asynchronous": False, "outer": "delayed"}, "asynchronous=False: valid are nesterov, average"),
    "word": ({"outer": "delaid"}, r"unknown outer 'delaid'"),
    "asynchronous": ({"asynchronous": "yes"}, "asynchronous received 'yes'; valid are True and False"),
    "delay 0": ({"asynchronous": True, "delay": 0}, "delay received 0; valid is an integer of at least 1"),
    "delay 1.5": ({"asynchronous": True, "delay": 1.5}, "delay received 1.5; valid"),
    "servers": ({"asynchronous": True, "servers": 17}, "servers received 17; valid is an integer from 1 to 16"),
    "delay in rounds": ({"delay": 2}, "delay=2 has no meaning in rounds; take asynchronous=True"),
    "servers in rounds": ({"servers": 2}, "servers=2 has no meaning in rounds"),
}


@pytest.mark.parametrize("settings, text", BAD.values(), ids=BAD)
def test_bad_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        mh.Local(**settings)
