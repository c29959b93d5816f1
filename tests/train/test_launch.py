"""A loop of the user's own: the bits of the plain loop, at any number of workers, through a death."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import CLASSES, FEATURES, X, Y, memory_files, one_thread
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.order import epoch_order

BATCH, EPOCHS = 16, 3


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def loop(me: Any, die: str | None = None) -> nn.Module:
    model, optimizer = make()
    me.join(model, optimizer)
    loader = me.loader(TensorDataset(X, Y), batch_size=BATCH)
    for _ in range(EPOCHS):
        for x, y in loader:
            if die is not None and me.steps == 5:
                with contextlib.suppress(FileExistsError):  # one of the workers, once
                    Path(die).touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            me.backward(cross_entropy(model(x), y))
            me.step()
    return model


def plain() -> str:
    with one_thread():
        model, optimizer = make()
        for epoch in range(EPOCHS):
            for rows in torch.from_numpy(epoch_order(0, epoch, len(X))).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(model(X[rows]), Y[rows]).backward()
                optimizer.step()
        return mh.digest(model)


def test_one_lane_is_the_plain_loop_bit_for_bit() -> None:
    run = mh.launch(loop, workers=2, lanes=1)
    assert mh.digest(run.value) == plain()
    assert run.steps == EPOCHS * -(-len(X) // BATCH)


def test_any_number_of_workers_and_a_death_change_nothing(tmp_path: Path) -> None:
    digests = {mh.digest(mh.launch(loop, workers=workers, lanes=4).value) for workers in (1, 2, 4)}
    disturbed = mh.launch(loop, str(tmp_path / "died"), workers=3, lanes=4)
    assert digests == {mh.digest(disturbed.value)}
    assert [event["how"] for event in disturbed.events if event["event"] == "worker_died"] == ["killed by SIGKILL"]


def slow_afterwards(me: Any) -> nn.Module:
    model = loop(me)
    time.sleep(1.5)  # an evaluation of the user's own, say
    return model


def test_what_comes_after_the_loop_may_take_its_time() -> None:
    run = mh.launch(slow_afterwards, workers=2, lanes=1, limits=mh.Limits(hang_s=0.4))
    assert [event["event"] for event in run.events if event["event"].endswith(("_hung", "_died"))] == []
    assert mh.digest(run.value) == plain()


def test_a_launch_that_cannot_be_sent_keeps_no_memory() -> None:
    lock, before = threading.Lock(), memory_files()
    with pytest.raises(mh.ManyhandsError, match="cannot be sent to a worker"):
        mh.launch(lambda me: lock, workers=1)
    assert memory_files() <= before


def forgets_to_step(me: Any) -> None:
    model, optimizer = make()
    me.join(model, optimizer)
    for x, y in me.loader(TensorDataset(X, Y), batch_size=BATCH):
        me.backward(cross_entropy(model(x), y))


def joins_nothing(me: Any) -> None:
    for _ in me.loader(TensorDataset(X, Y), batch_size=BATCH):
        pass


def has_no_loop(me: Any) -> int:
    return 1


@pytest.mark.parametrize(
    "function, message",
    [(forgets_to_step, r"me\.step"), (joins_nothing, r"me\.join"), (has_no_loop, r"me\.loader"), (7, "function of me")],
)
def test_a_mistake_is_named(function: Any, message: str) -> None:
    with pytest.raises(mh.ManyhandsError, match=message):
        mh.launch(function, workers=2)
