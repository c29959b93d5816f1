"""Servers and workers die, pause, come and go: each sample has exactly one effect per epoch, on every weight."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from counting import (
    BATCH,
    SAMPLES,
    Storm,
    UntilOver,
    added_up,
    counting_data,
    counting_model,
    counting_trainer,
    effects,
    worker_pids,
)
from scenes import Cnn, Killer, Mlp, Scene, committed, meanwhile, percentile, proof, table, wait_until

import manyhands as mh
from manyhands.core.policies import Async
from manyhands.errors import UsageError

pytestmark = pytest.mark.fault

QUIET = {"batch_size": BATCH, "progress": "quiet"}


@pytest.mark.parametrize(
    "sync, height",
    [
        ("async", 1),
        (mh.Server(policy="async", ahead=True), 600),
        (mh.Server(policy="plain", ahead=True), 1),
        (mh.Server(policy="async", servers=2), 600),
        (mh.Server(policy="bounded", staleness=2), 600),
        (mh.Server(policy="plain", servers=3), 1),
        ("server", 600),
        (mh.Server(servers=2), 600),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_storm_of_kills(sync: object, height: int, tmp_path: Path) -> None:
    trainer = counting_trainer(sync, height=height)
    with Storm(trainer, most=16) as storm:
        history = trainer.fit(counting_data(), epochs=400, run_dir=tmp_path, callbacks=[UntilOver(storm)], **QUIET)
    epochs = len(history)
    assert effects(trainer.model) == {float(epochs)}
    assert proof(tmp_path).exact and len(proof(tmp_path).epochs) == epochs
    assert storm.done and storm.fired["server"] >= 1 and storm.fired["worker"] >= 1
    deaths = [event["event"] for event in history.events if event["event"].endswith("_died")]
    assert deaths.count("server_died") >= 1 and deaths.count("worker_died") >= 1
    stalls = sorted(e["seconds"] for e in history.events if e["event"] == "recovered")
    assert percentile(stalls, 0.75) <= 1.0  # its p95 on a quiet machine: docs/guarantees.md
    if history.updates:
        assert history.updates["applied"] == epochs * SAMPLES // BATCH


@pytest.mark.parametrize("role", ["server-0", "worker-0"])
def test_kills_from_outside_at_one_step_are_not_held_against_the_run(role: str) -> None:
    """As many as a crash loop is allowed, and one more."""
    trainer = counting_trainer("server", workers=1)
    fired: set[int] = set()

    class Strike(mh.Callback):
        def on_step_end(self, state: mh.State) -> None:
            while state.step == 3 and len(fired) < 4:
                wait_until(lambda: trainer.pids.get(role, 0) not in {0, *fired}, 10)
                fired.add(trainer.pids[role])
                os.kill(trainer.pids[role], signal.SIGKILL)

    history = trainer.fit(counting_data(), run_dir=False, callbacks=[Strike()], **QUIET)
    deaths = [event for event in history.events if event["event"].endswith("_died")]
    assert len(fired) == 4 == len(deaths) and len({event["step"] for event in deaths}) == 1
    assert effects(trainer.model) == {1.0}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.usefixtures("way")
def test_a_synchronous_server_gives_the_bits_of_all_reduce_through_kills(servers: int) -> None:
    sync = {"sync": mh.Server(servers=servers)}
    for make, more in ((Mlp, {}), (Cnn, {"clip": 1.0})):
        quiet = Scene(make, optimizer="momentum", data=table(1600), trainer=more).run(2)
        scene = Scene(make, optimizer="momentum", data=table(1600), trainer={**more, **sync})
        assert scene.run(1).digest == quiet.digest
        killer = Killer(kills=6, first=5, last=120)
        killed = scene.run(3, killer)
        assert killer.fired >= 3  # some may find their process gone already
        assert killed.digest == quiet.digest


def test_a_paused_server_is_replaced_and_its_late_work_counts_nothing(tmp_path: Path) -> None:
    trainer = counting_trainer(mh.Server(policy="async"), height=600, limits=mh.Limits(pause_s=0.3))
    paused: list[int] = []

    def pause() -> None:
        wait_until(lambda: "server-0" in trainer.pids, 10)
        time.sleep(0.2)
        paused.append(trainer.pids["server-0"])
        os.kill(paused[0], signal.SIGSTOP)

    thread = threading.Thread(target=pause)
    thread.start()

    class UntilReplaced(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            if any(event["event"] == "recovered" for event in state.history.events):
                state.stop("seen")

    history = trainer.fit(counting_data(), epochs=400, run_dir=tmp_path, callbacks=[UntilReplaced()], **QUIET)
    thread.join()
    assert effects(trainer.model) == {float(len(history))}
    texts = [event["text"] for event in history.events if event["event"] == "server_hung"]
    assert len(texts) == 1 and f"server 0 (pid {paused[0]}) was paused" in texts[0]
    assert max(e["seconds"] for e in history.events if e["event"] == "recovered") <= 3.0


@pytest.mark.parametrize("sync", [
    mh.Server(policy="async", ahead=False), mh.Server(policy="async", ahead=True),
    mh.Server(policy="async", transport="socket"), mh.Server(policy="async", replicas=1),
    mh.Local(every=4, outer="average", delay=1, asynchronous=True),
], ids=["async", "ahead", "socket", "replicas", "local"])  # fmt: skip
def test_resize_while_updates_come(sync: object, tmp_path: Path) -> None:
    trainer, sizes = counting_trainer(sync, workers=1), []

    def resize(trainer: mh.Trainer) -> None:
        for size in (4, 2, 3, 1, 2):
            trainer.resize(size)
            wait_until(lambda n=size: len(worker_pids(trainer)) == n or committed(trainer) < 0, 20)
            sizes.append(len(worker_pids(trainer)))

    class UntilResized(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            if len(sizes) == 5:
                state.stop("resized often enough")

    with meanwhile(trainer, resize):
        history = trainer.fit(counting_data(), epochs=4000, run_dir=tmp_path, callbacks=[UntilResized()], **QUIET)
    assert sizes == [4, 2, 3, 1, 2]
    assert effects(trainer.model) == {float(len(history))}
    assert proof(tmp_path).exact


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_too_stale_is_dropped_and_computed_again(ahead: bool) -> None:
    trainer = counting_trainer(mh.Server(policy=Async(oldest=0), ahead=ahead), workers=4)
    history = trainer.fit(counting_data(), epochs=10, run_dir=False, **QUIET)
    assert effects(trainer.model) == {10.0}
    assert history.updates["dropped"] > 0
    assert history.updates["applied"] == 10 * SAMPLES // BATCH


def test_nothing_becomes_staler_than_the_bound() -> None:
    trainer = counting_trainer(mh.Server(policy="bounded", staleness=1), workers=4)
    history = trainer.fit(counting_data(), epochs=10, run_dir=False, **QUIET)
    assert effects(trainer.model) == {10.0}
    assert history.updates["staleness_most"] <= 1
    plain = counting_trainer(mh.Server(policy="plain"), workers=4)
    assert plain.fit(counting_data(), epochs=10, run_dir=False, **QUIET).updates["staleness_most"] > 1


@pytest.mark.parametrize("word", ["async", "bounded"])
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_one_worker_is_never_behind_and_gives_the_bits_of_all_reduce(word: str, optimizer: str) -> None:
    scene = Scene(Mlp, optimizer=optimizer, lanes=1)
    usual = scene.run(1)
    scene.trainer["sync"] = word
    assert scene.run(1).digest == usual.digest


class Announced(torch.optim.SGD):
    """Plain steps, in spite of the momentum in its group: they are predicted, and can be counted."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["lr"])


@pytest.mark.parametrize(
    "sync",
    [mh.Server(policy="async", servers=2), "bounded", mh.Server(policy="async", transport="socket")],
    ids=["async", "bounded", "socket"],
)
def test_predicted_parameters_change_no_effect_through_kills(sync: object, tmp_path: Path) -> None:
    model = counting_model(64)
    announced = Announced(model.parameters(), lr=1.0, momentum=0.9)
    trainer = mh.Trainer(model, loss=added_up, optimizer=announced, workers=3, sync=sync)
    predicted: list[float] = []

    class Look(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            assert trainer._fit is not None
            predicted.append(float(trainer._fit.session.arena.exchange().ahead.max()))

    with Storm(trainer, most=8) as storm:
        history = trainer.fit(
            counting_data(), epochs=400, run_dir=tmp_path, callbacks=[Look(), UntilOver(storm)], **QUIET
        )
    assert storm.done and storm.fired["server"] >= 1
    assert effects(model) == {float(len(history))}
    assert proof(tmp_path).exact
    assert max(predicted) >= 0.5 or (isinstance(sync, mh.Server) and sync.sockets)  # there it is not in the arena


def test_each_worker_has_a_rate_of_its_own() -> None:
    alone = counting_trainer(mh.Server(policy="async", rates=[0.25]), workers=1)
    alone.fit(counting_data(), epochs=4, run_dir=False, **QUIET)
    assert effects(alone.model) == {1.0}
    three = counting_trainer(mh.Server(policy="async", servers=2, rates=[0.5, 2.0]), workers=3)
    three.fit(counting_data(), epochs=1, run_dir=False, **QUIET)
    seen = effects(three.model)
    assert seen <= {0.5, 2.0, 1.0} and len(seen) >= 2  # the third has 1


def test_a_rate_may_follow_the_share_of_the_updates() -> None:
    def halve(worker: int, share: float) -> float:
        return 0.5 if worker == 0 and share == 1 else 4.0

    trainer = counting_trainer(mh.Server(policy="async", rates=halve), workers=1)
    trainer.fit(counting_data(), epochs=2, run_dir=False, **QUIET)
    assert effects(trainer.model) == {1.0}
    wrong = counting_trainer(mh.Server(policy="async", rates=lambda worker, share: -share), workers=1)
    with pytest.raises(UsageError, match=r"rates\(0, 1\) returned -1.0; valid is a number above 0"):
        wrong.fit(counting_data(), epochs=1, run_dir=False, **QUIET)


def test_workers_join_in_one_after_the_other() -> None:
    alone = counting_trainer(mh.Server(policy="plain", ramp=10_000), workers=4)
    history = alone.fit(counting_data(), epochs=4, run_dir=False, **QUIET)
    assert effects(alone.model) == {4.0}
    assert history.updates["staleness_p95"] == 0
    joined = counting_trainer(mh.Server(policy="plain", ramp=20), workers=4)
    history = joined.fit(counting_data(), epochs=10, run_dir=False, **QUIET)
    assert effects(joined.model) == {10.0}
    assert history.updates["staleness_most"] > 1


def test_resumed_after_everything_was_stopped(tmp_path: Path) -> None:
    trainer = counting_trainer("async", workers=2)

    class Stop(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            if state.epoch == 2:
                state.stop("enough")

    trainer.fit(counting_data(), epochs=6, run_dir=tmp_path, callbacks=[Stop()], **QUIET)
    assert effects(trainer.model) == {3.0}
    other = counting_trainer("async", workers=3)
    history = other.fit(counting_data(), epochs=6, resume=tmp_path, **QUIET)
    assert effects(other.model) == {6.0}
    assert len(history) == 6 and proof(tmp_path).exact


def test_pids_have_roles() -> None:
    trainer = counting_trainer(mh.Server(policy="async", servers=2), workers=2)
    seen: dict[str, int] = {}

    class Look(mh.Callback):
        def on_epoch_end(self, state: mh.State) -> None:
            seen.update(trainer.pids)

    trainer.fit(counting_data(), epochs=1, run_dir=False, callbacks=[Look()], **QUIET)
    assert sorted(seen) == ["server-0", "server-1", "worker-0", "worker-1"]
