"""Workers that make local steps, and their servers, die, pause, come and go: each sample has one effect per epoch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from counting import BATCH, SAMPLES, Storm, UntilOver, counting_data, counting_trainer, effects, worker_pids
from scenes import percentile, proof, wait_until

import manyhands as mh
from manyhands.train.checkpoint import CheckpointStore

pytestmark = pytest.mark.fault

QUIET = {"batch_size": BATCH, "progress": "quiet"}
DELAY = 2


def through(storm: Storm, *more: mh.Callback, **fit: object) -> mh.History:
    """Train until the storm is over; it begins with the second epoch, when there is something to disturb."""
    with contextlib.ExitStack() as stack:

        def begin(state: mh.State) -> None:
            if state.epoch == 1:
                stack.enter_context(storm)

        callbacks = [mh.Lambda(on_epoch_begin=begin), *more, UntilOver(storm)]
        return storm.trainer.fit(counting_data(), epochs=400, callbacks=callbacks, **QUIET, **fit)


def survived(history: mh.History, storm: Storm, folder: Path) -> None:
    epochs = len(history)
    assert proof(folder).exact and len(proof(folder).epochs) == epochs
    assert storm.done and storm.fired["server"] >= 1 and storm.fired["worker"] >= 1
    deaths = [event["event"] for event in history.events if event["event"].endswith("_died")]
    assert deaths.count("server_died") >= 1 and deaths.count("worker_died") >= 1
    stalls = sorted(e["seconds"] for e in history.events if e["event"] == "recovered")
    assert percentile(stalls, 0.75) <= 3.0, "somebody waited for a time-out"
    assert epochs * SAMPLES // BATCH // 4 <= history.updates["applied"] <= epochs * SAMPLES // BATCH


@pytest.mark.parametrize("servers, height", [(1, 1), (1, 600), (3, 600)])
def test_a_storm_of_kills(servers: int, height: int, tmp_path: Path) -> None:
    sync = mh.Local(every=4, outer="average", asynchronous=True, delay=DELAY, servers=servers)
    trainer = counting_trainer(sync, height=height)
    storm = Storm(trainer, most=16, per_step=2)
    history = through(storm, run_dir=tmp_path)
    assert effects(trainer.model) == {len(history) / DELAY}
    survived(history, storm, tmp_path)


def test_a_storm_of_kills_under_delayed_nesterov(tmp_path: Path) -> None:
    """Momentum adds to an effect later on, so effects cannot be read off the weights alone. But all that the parameters
    have moved, what the momentum holds and what is gathered for it add up to the sum of all changes, term by term."""
    rate, momentum = 0.5, 0.5
    sync = mh.Local(every=4, asynchronous=True, delay=DELAY, outer_lr=rate, outer_momentum=momentum, servers=2)
    trainer = counting_trainer(sync, height=600)
    storm = Storm(trainer, most=16, per_step=2, seed=1)
    history = through(storm, run_dir=tmp_path)
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints").load_latest()
    assert checkpoint is not None
    state = {name.rpartition("/")[2]: tensor.double() for name, tensor in checkpoint.tensors.items()}
    moved = -state["weight"] * (1 - momentum) / rate
    total = moved + momentum**2 * state["momentum_buffer"] + momentum * state["gathered"]
    counts = total * BATCH * DELAY
    torch.testing.assert_close(counts, torch.full_like(counts, len(history)), rtol=0, atol=0.01)
    survived(history, storm, tmp_path)


def test_resize_in_mid_epoch_and_resumed(tmp_path: Path) -> None:
    sync = mh.Local(every=4, outer="average", delay=DELAY, asynchronous=True)
    trainer = counting_trainer(sync, workers=1)
    sizes, seen = iter([4, 2, 3, 1]), set[int]()

    class Resize(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            if (size := next(sizes, None)) is not None:
                trainer.resize(size)
                wait_until(lambda: len(worker_pids(trainer)) >= size, 20)  # epochs may be shorter than a start
            seen.add(len(worker_pids(trainer)))
            if state.epoch == 29:
                state.stop("enough")

    trainer.fit(counting_data(), epochs=40, run_dir=tmp_path, callbacks=[Resize()], **QUIET)
    assert effects(trainer.model) == {30.0 / DELAY}
    assert max(seen) >= 2, "nobody ever joined"
    other = counting_trainer(sync, workers=3)
    history = other.fit(counting_data(), epochs=40, resume=tmp_path, **QUIET)
    assert effects(other.model) == {40.0 / DELAY}
    assert len(history) == 40 and proof(tmp_path).exact


def test_checkpoints_within_an_epoch_while_servers_are_killed(tmp_path: Path) -> None:
    """A rest that a new server declares is one: nobody's update comes in while the state is copied."""
    sync = mh.Local(every=4, outer="average", delay=DELAY, asynchronous=True)
    trainer = counting_trainer(sync, height=600)
    storm = Storm(trainer, most=10, per_step=2, seed=2, roles="server")
    history = through(storm, run_dir=tmp_path, checkpoint_every_steps=24, keep=1000)
    assert storm.done
    assert effects(trainer.model) == {len(history) / DELAY}
    store, within = CheckpointStore(tmp_path / "checkpoints"), 0
    for step in store.steps():
        checkpoint = store.load(step)
        total = float(-checkpoint.tensors["model/weight"][0].double().sum()) * BATCH * DELAY
        assert total == step * BATCH, "another number of samples than it says"
        within += step % (SAMPLES // BATCH) > 0
    assert within >= 3, "none was taken within an epoch"


@pytest.mark.parametrize("servers, height", [(1, 1), (2, 600)])
def test_a_storm_of_kills_while_parameters_are_mixed(servers: int, height: int, tmp_path: Path) -> None:
    """Both sides of a mixing move by the same step, so the servers' parameters and those of all workers add up to what
    all samples have done together."""
    sync = mh.Server(policy="mixing", beta=0.25, every=4, servers=servers)
    trainer = counting_trainer(sync, height=height)
    storm = Storm(trainer, most=16, per_step=2, seed=3)
    counts: list[torch.Tensor] = []

    def all_ask(state: mh.State) -> None:
        """Everybody takes part in the first epoch, before the storm."""
        assert trainer._fit is not None
        asked = trainer._fit.session.arena.exchange().asked
        if state.epoch == 0:
            wait_until(lambda: (asked[:3] > 0).all(), 10)

    def add_up(state: mh.State) -> None:
        assert trainer._fit is not None
        arena = trainer._fit.session.arena
        seats = [slot for slot, count in enumerate(arena.exchange().delivered[0].tolist()) if count]
        assert seats == [0, 1, 2]
        total = arena.parameters()[0].double() + sum(arena.pulled(slot)[0].double() for slot in seats)
        counts.append(-total * BATCH)

    history = through(storm, mh.Lambda(on_epoch_begin=all_ask, on_epoch_end=add_up), run_dir=tmp_path)
    assert len(counts) == len(history)
    for epochs, count in enumerate(counts):
        # One who is given parameters a moment after the others have brought something begins with a part of that.
        since = count - counts[0]
        torch.testing.assert_close(since, torch.full_like(since, epochs), rtol=0, atol=0.01)
    survived(history, storm, tmp_path)
