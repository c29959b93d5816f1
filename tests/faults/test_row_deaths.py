"""Workers and servers of tables by row die: every sample has exactly one effect per epoch on each of its rows.

The model counts. Sample *i* has rows of its own, whose gradient is 1/batch whatever they hold. With plain SGD at a rate
of 1 and a batch that is a power of two, every effect lowers its rows by exactly 1/batch, in any order: an update that
was lost, applied twice or to half of the rows stays visible to the end.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scenes import committed, meanwhile, send, wait_until
from torch import nn

import manyhands as mh
from manyhands.comm.tables import Tables

pytestmark = pytest.mark.fault

SAMPLES, BATCH, ROWS_EACH, WIDTH = 128, 16, 1024, 16


class Counter(nn.Module):
    """One table, no other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(
            SAMPLES * ROWS_EACH, WIDTH, sparse=True, _weight=torch.zeros(SAMPLES * ROWS_EACH, WIDTH)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(ids).sum(dim=(1, 2))
        return out


def added_up(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def train(
    disturb: Callable[[mh.Trainer], None] | None = None, epochs: int = 100, name: str = "sgd", **options: Any
) -> tuple[Counter, mh.History]:
    """Train for some epochs, or to the end of that one in which the disturbance is over."""
    model, over = Counter(), threading.Event()
    options = {"workers": 2, "sync": mh.Server(policy="async", servers=2)} | options
    trainer = mh.Trainer(model, loss=added_up, optimizer=mh.optimizer(name, lr=1.0), **options)
    ids = torch.arange(SAMPLES * ROWS_EACH).view(SAMPLES, ROWS_EACH)

    def work(trainer: mh.Trainer) -> None:
        assert disturb is not None
        disturb(trainer)
        over.set()

    def look(state: mh.State) -> None:
        if over.is_set():
            state.stop("it is over")

    settings: dict[str, Any] = {"batch_size": BATCH, "run_dir": False, "progress": "quiet"}
    with meanwhile(trainer, work if disturb else None):
        trainer.fit((ids, torch.zeros(SAMPLES)), epochs=epochs, callbacks=[mh.Lambda(on_epoch_end=look)], **settings)
    return model, trainer.history


def count(disturb: Callable[[mh.Trainer], None], **options: Any) -> mh.History:
    """Train under a disturbance; every sample must have had one effect in every epoch."""
    model, history = train(disturb, **options)
    effects = (-model.table.weight.detach() * BATCH).unique().tolist()
    assert effects == [len(history)], f"{len(history)} epochs, and samples counted {effects} times"
    return history


def storm_of(fired: list[str], wanted: int = 10) -> Callable[[mh.Trainer], None]:
    """Kills anybody at any moment."""

    def storm(trainer: mh.Trainer) -> None:
        dice = random.Random(4)
        while len(fired) < wanted and committed(trainer) >= 0:
            before = committed(trainer)  # a run that makes no step between deaths gives up, and rightly
            wait_until(lambda before=before: committed(trainer) != before, 30)
            time.sleep(dice.uniform(0, 0.05))
            if pids := trainer.pids:
                name = dice.choice(sorted(pids))
                fired.extend([name] * send(pids[name], signal.SIGKILL))

    return storm


def deaths(history: mh.History, role: str) -> list[dict[str, Any]]:
    return [event for event in history.events if event["event"] == f"{role}_died"]


def half_written(tables: Tables, server: int) -> bool:
    """Whether the first row of a batch has its new value, and the server still has others to write."""
    if not tables.mark[server]:
        return False
    ids, saved = tables.undo(server, 0, int(tables.undo_rows[server]))
    return bool(tables.planes[0][0][ids[0], 0] != saved[0][0, 0])


def kill_in_change(trainer: mh.Trainer, wanted: int = 4) -> None:
    """Kill a server whenever it has begun to write rows, also the successor over the same entry."""
    assert trainer._fit is not None
    tables = trainer._fit.session.arena.tables()
    while sum(event["undone"] for event in deaths(trainer.history, "server")) < wanted:
        if committed(trainer) < 0:
            return
        for server in (0, 1):
            pid = trainer.pids.get(f"server-{server}")
            if pid is not None and half_written(tables, server) and send(pid, signal.SIGKILL):
                wait_until(lambda pid=pid: pid not in trainer.pids.values(), 10)


def test_servers_die_while_they_change_rows() -> None:
    history = count(kill_in_change)
    assert sum(event["undone"] for event in deaths(history, "server")) >= 4


def test_one_worker_ends_in_the_same_bits_whatever_happens_to_its_servers() -> None:
    """With Adam, where state and the number of the step count as well."""
    struck, history = train(kill_in_change, name="adam", workers=1)
    assert sum(event["undone"] for event in deaths(history, "server")) >= 4
    quiet, _ = train(epochs=len(history), name="adam", workers=1)
    assert mh.digest(struck) == mh.digest(quiet)


@pytest.mark.parametrize("policy", ["async", "bounded"])
def test_anybody_dies_at_any_moment(policy: str) -> None:
    fired: list[str] = []
    history = count(storm_of(fired), workers=3, sync=mh.Server(policy=policy, servers=2))
    assert len(fired) == 10
    assert deaths(history, "server") and deaths(history, "worker")


@pytest.mark.parametrize("policy", ["async", "bounded"])
def test_anybody_dies_at_any_moment_over_sockets(policy: str) -> None:
    fired: list[str] = []
    sync = mh.Server(policy=policy, servers=2, replicas=1, codec="int8")
    history = count(storm_of(fired), workers=3, sync=sync)
    assert len(fired) == 10
    assert deaths(history, "server") and deaths(history, "worker")


def test_over_sockets_one_worker_ends_in_the_bits_of_the_shared_arena_whoever_of_its_servers_dies() -> None:
    sync, killed = mh.Server(policy="async", servers=2, replicas=1), list[int]()

    def kill_primaries(trainer: mh.Trainer) -> None:
        for number in range(4):
            fit = trainer._fit
            assert fit is not None and fit.session._coordination is not None
            service = fit.session._coordination._machine.service
            wait_until(lambda service=service: len(service.in_sync) == service.shards, 20)
            name = f"server-{number % 2}"
            killed.append(trainer.pids[name])
            assert send(killed[-1], signal.SIGKILL)
            wait_until(lambda name=name: trainer.pids.get(name, killed[-1]) != killed[-1], 20)

    struck, history = train(kill_primaries, name="adam", workers=1, sync=sync)
    assert len(set(killed)) == 4
    quiet, calm = train(epochs=len(history), name="adam", workers=1)
    assert mh.digest(struck) == mh.digest(quiet)
    assert history.rows == calm.rows


def test_over_sockets_without_a_copy_everything_goes_back_together() -> None:
    """Workers are in the midst of fetching rows then, of an epoch of the ledger that has ended."""

    def kill_all(trainer: mh.Trainer) -> None:
        for times in range(1, 4):
            before = committed(trainer)
            wait_until(lambda before=before: committed(trainer) >= before + 5, 30)
            for name, pid in trainer.pids.items():
                if name.startswith("server"):
                    send(pid, signal.SIGKILL)
            wait_until(lambda times=times: len(rolled_back(trainer.history)) >= times, 20)

    history = count(kill_all, workers=3, sync=mh.Server(policy="async", servers=2, transport="socket"))
    assert len(rolled_back(history)) >= 3


def rolled_back(history: mh.History) -> list[dict[str, Any]]:
    return [event for event in list(history.events) if event["event"] == "rolled_back"]
