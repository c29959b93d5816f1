"""Trainer through real worker processes: against a plain loop, called again, beside another one."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import CLASSES, FEATURES, QUIET, X, Y, digest_of, mlp, one_thread, plain_loop, train, worker_processes
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import manyhands as mh


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Norm(nn.Module):
    """BatchNorm, dropout and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
            self.twice = nn.Linear(8, 8)
            self.again = self.twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.drop(self.twice(self.norm(self.first(x))))))


def test_one_lane_is_the_plain_loop_bit_for_bit() -> None:
    ours, plain = mlp(), mlp()
    _, history = train(ours, workers=2, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), fit={"epochs": 3, "lanes": 1})
    losses = plain_loop(plain, torch.optim.Adam(plain.parameters(), lr=0.01), epochs=3)
    assert mh.digest(ours) == mh.digest(plain)
    assert history.metrics["loss"] == losses
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("lanes", [2, 3, 5])
def test_any_lanes_are_the_plain_loop_but_for_rounding(lanes: int) -> None:
    """90 rows in batches of 16: the last batch of 10 rows is cut unevenly."""
    ours, plain = mlp(), mlp()
    train(ours, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), fit={"epochs": 2, "lanes": lanes})
    plain_loop(plain, torch.optim.Adam(plain.parameters(), lr=0.01), epochs=2)
    torch.testing.assert_close(parameters(ours), parameters(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "adamw"])
def test_the_workers_do_not_show_in_the_result(optimizer: str) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "clip": 1.0, "schedule": "cosine"}
    found = {digest_of(Norm(), workers=workers, fit={"lanes": 3, "epochs": 2}, **options) for workers in (1, 2, 3, 4)}
    assert len(found) == 1
    assert found != {mh.digest(Norm())}


def test_lanes_and_seed_do_show_in_the_result() -> None:
    found = {digest_of(mlp(0.5), seed=seed, fit={"lanes": lanes}) for seed in (0, 1) for lanes in (1, 2)}
    assert len(found) == 4


def test_parameter_groups_and_weight_decay() -> None:
    def build(model: nn.Sequential) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[3].parameters(), "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9)

    ours, plain = mlp(), mlp()
    train(ours, optimizer=build(ours), fit={"lanes": 1})
    plain_loop(plain, build(plain))
    assert mh.digest(ours) == mh.digest(plain)


def test_frozen_parameters_stay() -> None:
    ours, plain = mlp(), mlp()
    for model in (ours, plain):
        model[0].requires_grad_(False)
    train(ours, optimizer=mh.optimizer("adamw", lr=0.1, weight_decay=0.5), fit={"lanes": 1})
    plain_loop(plain, torch.optim.AdamW([*plain[3].parameters()], lr=0.1, weight_decay=0.5, fused=True))
    assert mh.digest(ours) == mh.digest(plain)
    assert torch.equal(ours[0].weight, mlp()[0].weight)


def test_clipping_by_value_and_by_norm() -> None:
    for clip, cut in (
        (mh.ClipValue(0.01), lambda model: clip_grad_value_(model.parameters(), 0.01)),
        (0.05, lambda model: clip_grad_norm_(model.parameters(), 0.05)),
    ):
        ours, plain, free = mlp(), mlp(), mlp()
        train(ours, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), clip=clip, fit={"lanes": 1})
        plain_loop(
            plain, torch.optim.SGD(plain.parameters(), lr=0.5), before_step=lambda cut=cut, plain=plain: cut(plain)
        )
        plain_loop(free, torch.optim.SGD(free.parameters(), lr=0.5))
        torch.testing.assert_close(parameters(ours), parameters(plain), rtol=1e-5, atol=1e-7)
        assert (parameters(plain) - parameters(free)).abs().max() > 1e-2


def test_accumulated_micro_batches_are_one_batch() -> None:
    whole, pieces = mlp(), mlp()
    train(whole, optimizer="sgd", fit={"lanes": 2})
    train(pieces, optimizer="sgd", accumulate=3, fit={"lanes": 2})
    torch.testing.assert_close(parameters(whole), parameters(pieces), rtol=1e-5, atol=1e-7)
    assert digest_of(mlp(0.5), accumulate=3, workers=1, fit={"lanes": 2}) == digest_of(
        mlp(0.5), accumulate=3, workers=3, fit={"lanes": 2}
    )


def test_bf16_is_autocast_over_fp32_weights() -> None:
    ours, plain = mlp(), mlp()
    trainer, _ = train(ours, optimizer="sgd", precision="bf16", fit={"lanes": 1})
    forward = plain.forward
    plain.forward = lambda x: torch.autocast("cpu", torch.bfloat16)(forward)(x)  # type: ignore[method-assign]
    plain_loop(plain, torch.optim.SGD(plain.parameters(), lr=0.01, fused=True))
    torch.testing.assert_close(parameters(ours), parameters(plain), rtol=1e-2, atol=1e-4)
    assert ours[0].weight.dtype is torch.float32
    assert mh.digest(ours) != digest_of(optimizer="sgd", fit={"lanes": 1})
    assert trainer.predict(X).dtype is torch.bfloat16


def test_the_callers_model_is_trained_in_place_and_nothing_is_left_running() -> None:
    model = mlp()
    weight, storage = model[0].weight, model[0].weight.data_ptr()
    seen: dict[str, int] = {}

    class Look(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            seen.update(trainer.pids)

    trainer = mh.Trainer(model, workers=3)
    assert trainer.pids == {}
    trainer.fit((X, Y), callbacks=[Look()], **QUIET)
    assert model[0].weight is weight and weight.data_ptr() == storage and weight.requires_grad
    assert mh.digest(model) != mh.digest(mlp())
    assert sorted(seen) == ["worker-0", "worker-1", "worker-2"]
    assert len({*seen.values(), os.getpid()}) == 4
    assert trainer.pids == {} and worker_processes() == []


def test_the_memory_of_a_fit_is_given_back_when_it_ends() -> None:
    """And not when the garbage collector happens to come by: an arena is as large as the model many times over."""

    def shared_kib() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssShmem" in line)
        return int(line.split()[1])

    gc.collect()
    before = shared_kib()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(FEATURES, 100_000), nn.Linear(100_000, CLASSES))
        trainer, _ = train(model, optimizer="adam", workers=1, fit={"batch_size": 90})
        trainer.predict(X)
        after = shared_kib()
    finally:
        gc.enable()
    assert after - before < 2_000, f"{after - before} KiB of shared memory are still mapped"


def test_fit_again_goes_on_where_it_was() -> None:
    """Weights and the optimizer's moments: two fits of an epoch are one of two."""
    fixed = {"shuffle": False, "lanes": 2}
    once, twice = mlp(), mlp()
    train(once, optimizer="adam", fit=fixed | {"epochs": 2})
    trainer, _ = train(twice, optimizer="adam", fit=fixed)
    trainer.fit((X, Y), **QUIET, **fixed)
    assert mh.digest(once) == mh.digest(twice)


def test_fit_again_with_a_schedule() -> None:
    trainer, first = train(schedule="cosine")
    second = trainer.fit((X, Y), **QUIET)
    assert second.metrics["loss"][0] < first.metrics["loss"][0]


def test_trainers_one_after_the_other_and_at_the_same_time() -> None:
    alone = [digest_of(mlp(0.2), workers=workers, seed=workers, fit={"lanes": 2}) for workers in (1, 2)]
    models, errors = [mlp(0.2), mlp(0.2)], list[BaseException]()

    def run(number: int) -> None:
        try:
            train(models[number], workers=number + 1, seed=number + 1, fit={"lanes": 2})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert [mh.digest(model) for model in models] == alone


def test_the_callers_random_streams_and_threads_are_left_alone() -> None:
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    trainer, _ = train(mlp(0.5))
    trainer.predict(X)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_one_model_in_two_trainers_by_turns() -> None:
    """Transfer: another loss and optimizer go on with the same object."""
    model = mlp()
    train(model, optimizer="sgd")
    between = mh.digest(model)
    train(model, (X, X[:, :CLASSES]), loss="mse", optimizer="sgd")
    assert mh.digest(model) != between


def test_losses_as_modules_and_functions() -> None:
    by_name = digest_of()
    assert digest_of(loss=nn.CrossEntropyLoss()) == by_name
    assert digest_of(loss=lambda output, target: nn.functional.cross_entropy(output, target)) == by_name


def test_the_state_of_every_epoch_is_reported() -> None:
    model = mlp()
    trainer, history = train(model, metrics=["accuracy"], fit={"epochs": 2, "validation": (X, Y)})
    assert history is trainer.history
    assert history.epochs == [0, 1]
    assert set(history.metrics) == {"loss", "accuracy", "val_loss", "val_accuracy", "seconds"}
    with one_thread(), torch.no_grad():
        right = float((model(X).argmax(1) == Y).double().mean())
    assert history.metrics["val_accuracy"][-1] == pytest.approx(right)
    assert set(history.bill) == {"data", "compute", "wait", "reduce"} and all(s > 0 for s in history.bill.values())
    assert history.first_step_s is not None and history.first_step_s > 0
    assert [event["event"] for event in history.events].count("worker_ready") == 2
