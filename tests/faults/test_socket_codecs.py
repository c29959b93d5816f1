"""Codecs over sockets: each sample still has exactly one effect, and a backup holds the bits of its primary."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from counting import BATCH, Storm, UntilOver, counting_data, counting_trainer, effects
from proxy import Proxy
from scenes import Cnn, Scene, committed, proof, wait_until

import manyhands as mh
from manyhands.comm.links import Wire, make_wire
from manyhands.core.messages import Timing
from manyhands.train import coordination, session

pytestmark = pytest.mark.fault

QUIET = {"batch_size": BATCH, "progress": "quiet"}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The path of a socket may have no more than a hundred characters."""
    folder = Path(tempfile.mkdtemp(prefix="proxy-"))
    yield folder
    shutil.rmtree(folder)


def scene(sync: mh.Server, **more: object) -> Scene:
    return Scene(Cnn, trainer={"clip": 1.0, "sync": sync}, lanes=1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
def test_one_worker_gives_the_bits_of_the_shared_arena(codec: str) -> None:
    arena = scene(mh.Server(policy="async", codec=codec)).run(1)
    plain = scene(mh.Server(policy="async")).run(1)
    pair = scene(mh.Server(policy="async", replicas=1, codec=codec)).run(1)
    assert pair.digest == arena.digest != plain.digest
    assert pair.history.bytes["sent"] > 0


def test_after_the_death_of_its_primary_a_backup_goes_on_with_the_same_bits() -> None:
    """What the worker has left out stays with it, and what it sends again is decoded once."""
    sync = mh.Server(policy="async", replicas=1, servers=2, codec="int8")
    undisturbed = scene(sync, epochs=6).run(1)
    killed: list[int] = []

    def disturb(trainer: mh.Trainer) -> None:
        for step in (20, 60, 100):
            wait_until(lambda step=step: committed(trainer) >= step or committed(trainer) < 0, 30)  # type: ignore[misc]
            fit = trainer._fit
            if fit is None or fit.session._coordination is None:
                return
            service = fit.session._coordination._machine.service
            wait_until(lambda service=service: len(service.in_sync) == service.shards, 20)  # type: ignore[misc]
            pid = trainer.pids["server-0"]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            wait_until(lambda pid=pid: trainer.pids.get("server-0", pid) != pid, 20)  # type: ignore[misc]

    struck = scene(sync, epochs=6).run(1, disturb)
    assert len(set(killed)) == 3
    assert struck.events("rolled_back") == []
    assert struck.digest == undisturbed.digest


@pytest.mark.parametrize("codec", ["bf16", "topk:0.5"])
def test_a_storm_of_kills(codec: str, tmp_path: Path) -> None:
    """These codecs leave nothing out of the gradients of the model that counts."""
    sync = mh.Server(policy="async", servers=2, replicas=1, codec=codec, pull_codec="int8")
    trainer = counting_trainer(sync, workers=3, height=64)
    with Storm(trainer, most=10, pause_s=(0.1, 0.4)) as storm:
        history = trainer.fit(counting_data(), epochs=1000, run_dir=tmp_path, callbacks=[UntilOver(storm)], **QUIET)
    assert effects(trainer.model) == {float(len(history))}
    assert proof(tmp_path).exact and storm.done


def test_envelopes_are_lost_doubled_reordered_and_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    made: list[Proxy] = []

    def wire_with_proxy() -> Wire:
        wire = make_wire()
        made.append(Proxy(wire, short_folder, share=0.2))
        return msgspec.structs.replace(wire, detour=str(short_folder))

    monkeypatch.setattr(coordination, "make_wire", wire_with_proxy)
    monkeypatch.setattr(session, "SAFE", Timing(beat_s=0.03, lease_s=0.4, retry_s=0.05, transfer_s=0.5))
    sync = mh.Server(policy="async", replicas=1, codec="bf16", pull_codec="int8")
    trainer = counting_trainer(sync, workers=2)
    try:
        quiet = {**QUIET, "batch_size": 4 * BATCH}
        history = trainer.fit(counting_data(), epochs=1, run_dir=tmp_path / "run", **quiet)
    finally:
        (proxy,) = made
        proxy.close()
    assert effects(trainer.model) == {0.25}
    assert proof(tmp_path / "run").exact
    assert history.updates["doubled"] > 0 and proxy.done["damaged"] > 0


def test_bytes_are_those_of_the_codecs_in_both_directions() -> None:
    counted = {}
    for name, codecs in {"plain": {}, "up": {"codec": "int8"}, "both": {"codec": "int8", "pull_codec": "int8"}}.items():
        trainer = counting_trainer(mh.Server(policy="async", transport="socket", **codecs), workers=1, height=128)
        counted[name] = trainer.fit(counting_data(), epochs=2, run_dir=False, **QUIET).bytes
    size, updates = 4 * 128 * 512, 2 * 512 // BATCH
    assert size * updates < counted["plain"]["sent"] < 1.1 * size * updates
    assert size * updates < counted["plain"]["received"] < 1.1 * size * updates
    assert counted["plain"]["sent"] / 4 < counted["up"]["sent"] < counted["plain"]["sent"] / 3.5
    assert counted["up"]["received"] > size * updates
    # The first answer, and the one after a rest, are the parameters themselves.
    assert counted["both"]["received"] < counted["plain"]["received"] / 3.3
