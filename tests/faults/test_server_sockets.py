"""Servers with memory of their own, over sockets: each sample has exactly one effect per epoch, whoever dies when."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from counting import BATCH, SAMPLES, Storm, UntilOver, counting_data, counting_trainer, effects
from proxy import Proxy
from scenes import Cnn, Scene, committed, meanwhile, percentile, proof, table, wait_until
from scripts import running, still_there

import manyhands as mh
from manyhands.comm.links import Wire, make_wire
from manyhands.core.messages import Ask, Timing, View, Views
from manyhands.server.messages import ENVELOPES
from manyhands.train import coordination, session

pytestmark = pytest.mark.fault

QUIET = {"batch_size": BATCH, "progress": "quiet"}
PAIR = mh.Server(policy="async", replicas=1)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The path of a socket may have no more than a hundred characters."""
    folder = Path(tempfile.mkdtemp(prefix="proxy-"))
    yield folder
    shutil.rmtree(folder)


class UntilSet(mh.Callback):
    """Ends the run at the end of the epoch in which something was seen."""

    def __init__(self) -> None:
        self.seen = False

    def on_epoch_end(self, state: mh.State) -> None:
        if self.seen:
            state.stop("seen")


def disturbed(
    trainer: mh.Trainer, disturb: Callable[[mh.Trainer], None], run_dir: Path, epochs: int = 1000
) -> mh.History:
    """Fit until ``disturb`` has returned, and check that every sample counted once per epoch."""
    until = UntilSet()

    def work(trainer: mh.Trainer) -> None:
        try:
            disturb(trainer)
        finally:
            until.seen = True

    with meanwhile(trainer, work):
        history = trainer.fit(counting_data(), epochs=epochs, run_dir=run_dir, callbacks=[until], **QUIET)
    assert effects(trainer.model) == {float(len(history))}
    assert proof(run_dir).exact and len(proof(run_dir).epochs) == len(history)
    return history


def events(trainer: mh.Trainer, name: str) -> list[dict[str, Any]]:
    return [event for event in list(trainer.history.events) if event["event"] == name]


def kill(trainer: mh.Trainer, name: str) -> int:
    """Kill the process of that name, once there is one."""
    wait_until(lambda: name in trainer.pids, 20)
    pid = trainer.pids[name]
    os.kill(pid, signal.SIGKILL)
    return pid


def go_on(trainer: mh.Trainer, steps: int = 5) -> None:
    now = committed(trainer)
    wait_until(lambda: committed(trainer) >= now + steps, 30)


def in_sync(trainer: mh.Trainer) -> bool:
    fit = trainer._fit
    assert fit is not None and fit.session._coordination is not None
    service = fit.session._coordination._machine.service
    return len(service.in_sync) == service.shards


@pytest.mark.parametrize(
    "sync",
    [
        mh.Server(policy="async", transport="socket"),
        mh.Server(policy="plain", servers=3, transport="socket"),
        mh.Server(policy="scaled", servers=2, replicas=1),
    ],
    ids=["one", "three", "two pairs"],
)
def test_one_worker_gives_the_bits_of_the_shared_arena(sync: mh.Server, tmp_path: Path) -> None:
    """Adam, buffers, clipping, a schedule, validation, a checkpoint in mid-epoch, and a resume from it."""
    arena = mh.Server(policy=sync.policy, servers=sync.servers, transport="arena")
    more = {"schedule": "cosine", "clip": 1.0}
    scene = Scene(Cnn, trainer={**more, "sync": arena}, lanes=1, fit={"validation": table(64)})
    first = scene.run(1)
    scene.trainer["sync"] = sync
    second = scene.run(1, run_dir=tmp_path / "run", checkpoint_every_steps=7)
    assert second.digest == first.digest
    for name, values in first.history.metrics.items():
        if name != "seconds":
            assert second.history.metrics[name] == values
    assert proof(tmp_path / "run").exact
    again = Scene(Cnn, trainer={**more, "sync": sync}, lanes=1, epochs=3, fit={"validation": table(64)})
    resumed = again.run(1, run_dir=tmp_path / "run", checkpoint_every_steps=7)
    assert len(resumed.history) == 3
    assert resumed.history.updates["applied"] == 25


def test_a_primary_that_dies_is_replaced_by_its_backup(tmp_path: Path) -> None:
    trainer = counting_trainer(PAIR, workers=2)
    killed: list[int] = []

    def disturb(trainer: mh.Trainer) -> None:
        for _ in range(6):
            wait_until(lambda: in_sync(trainer), 20)
            killed.append(kill(trainer, "server-0"))
            wait_until(lambda: trainer.pids.get("server-0", killed[-1]) != killed[-1], 20)
            go_on(trainer)

    history = disturbed(trainer, disturb, tmp_path)
    assert len(set(killed)) == 6
    assert [event for event in history.events if event["event"] == "rolled_back"] == []
    stalls = [e["seconds"] for e in history.events if e["event"] == "recovered" and "server" in e]
    assert len(stalls) == 6
    assert percentile(sorted(stalls), 0.5) <= 1.0, "somebody waited for a time-out"
    assert history.updates["applied"] == len(history) * SAMPLES // BATCH


def test_a_backup_that_dies_is_done_without_and_then_replaced(tmp_path: Path) -> None:
    trainer = counting_trainer(mh.Server(policy="async", servers=2, replicas=1), workers=2, height=64)

    def disturb(trainer: mh.Trainer) -> None:
        for name in ("server-0-backup", "server-1-backup", "server-0-backup"):
            wait_until(lambda: in_sync(trainer), 20)
            kill(trainer, name)
            go_on(trainer)
        wait_until(lambda: in_sync(trainer), 20)

    history = disturbed(trainer, disturb, tmp_path)
    assert [event for event in history.events if event["event"] == "rolled_back"] == []


@pytest.mark.parametrize(
    "sync", [PAIR, mh.Server(policy="async", servers=2, transport="socket")], ids=["pair", "alone"]
)
def test_without_a_copy_everything_goes_back_together(sync: mh.Server, tmp_path: Path) -> None:
    trainer = counting_trainer(sync, workers=2)

    def disturb(trainer: mh.Trainer) -> None:
        for times in range(1, 4):
            go_on(trainer, 20)
            pids = [pid for name, pid in trainer.pids.items() if name.startswith("server")]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda times=times: len(events(trainer, "rolled_back")) >= times, 20)
            go_on(trainer)

    history = disturbed(trainer, disturb, tmp_path)
    back = [event for event in history.events if event["event"] == "rolled_back"]
    assert len(back) >= 3
    assert f"back to step {back[0]['step']}" in back[0]["text"]


def test_a_paused_primary_is_replaced_and_acknowledges_nothing_afterwards(tmp_path: Path) -> None:
    """Nobody kills it: what keeps it from doing harm is its term, and the lease that has run out."""
    trainer = counting_trainer(PAIR, workers=2, limits=mh.Limits(pause_s=600))
    seconds: list[float] = []

    def disturb(trainer: mh.Trainer) -> None:
        for _ in range(2):
            wait_until(lambda: in_sync(trainer), 20)
            zombie = trainer.pids["server-0"]
            begun = time.monotonic()
            os.kill(zombie, signal.SIGSTOP)
            try:
                wait_until(lambda zombie=zombie: trainer.pids["server-0"] != zombie, 10)
                seconds.append(time.monotonic() - begun)
                go_on(trainer)
            finally:
                os.kill(zombie, signal.SIGCONT)
            go_on(trainer, 20)

    history = disturbed(trainer, disturb, tmp_path)
    assert len(seconds) == 2 and min(seconds) <= 3.0
    assert [e for e in history.events if e["event"] in ("rolled_back", "server_died", "server_hung")] == []


def test_a_paused_primary_is_killed_by_default(tmp_path: Path) -> None:
    trainer = counting_trainer(PAIR, workers=2, limits=mh.Limits(pause_s=0.5))

    def disturb(trainer: mh.Trainer) -> None:
        wait_until(lambda: in_sync(trainer), 20)
        os.kill(trainer.pids["server-0"], signal.SIGSTOP)
        wait_until(lambda: len(events(trainer, "recovered")) == 1, 10)

    history = disturbed(trainer, disturb, tmp_path)
    assert len([e for e in history.events if e["event"] == "server_hung"]) == 1
    assert max(e["seconds"] for e in history.events if e["event"] == "recovered") <= 3.0


@pytest.mark.parametrize("sync", [PAIR, mh.Server(policy="async", servers=2, replicas=1)], ids=["one", "two"])
def test_a_storm_of_kills(sync: mh.Server, tmp_path: Path) -> None:
    trainer = counting_trainer(sync, workers=3, height=64)
    with Storm(trainer, most=12, pause_s=(0.1, 0.4)) as storm:
        history = trainer.fit(counting_data(), epochs=1000, run_dir=tmp_path, callbacks=[UntilOver(storm)], **QUIET)
    assert effects(trainer.model) == {float(len(history))}
    assert proof(tmp_path).exact and len(proof(tmp_path).epochs) == len(history)
    assert storm.done and storm.fired["server"] >= 1 and storm.fired["worker"] >= 1
    stalls = sorted(e["seconds"] for e in history.events if e["event"] == "recovered")
    assert percentile(stalls, 0.5) <= 1.0


def test_envelopes_are_lost_doubled_reordered_and_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    """Between workers and servers, and between primary and backup, a quarter of all envelopes each."""
    made: list[Proxy] = []

    def wire_with_proxy() -> Wire:
        wire = make_wire()
        made.append(Proxy(wire, short_folder, share=0.25))
        return msgspec.structs.replace(wire, detour=str(short_folder))

    monkeypatch.setattr(coordination, "make_wire", wire_with_proxy)
    monkeypatch.setattr(session, "SAFE", Timing(beat_s=0.03, lease_s=0.4, retry_s=0.05, transfer_s=0.5))
    trainer = counting_trainer(PAIR, workers=2)
    try:
        quiet = {**QUIET, "batch_size": 4 * BATCH}
        history = trainer.fit(counting_data(), epochs=1, run_dir=tmp_path / "run", **quiet)
    finally:
        (proxy,) = made
        proxy.close()
    assert effects(trainer.model) == {0.25}  # of what a sample does in a batch of a quarter of the size
    assert proof(tmp_path / "run").exact
    assert history.updates["doubled"] > 0
    for what in ("lost", "doubled", "late", "damaged"):
        assert 0.15 < proxy.done[what] / proxy.done["envelopes"] < 0.35


GREETING = bytes([0xFF, *[0] * 8, 0x7F, 3, 0]) + b"PLAIN".ljust(20, b"\0") + bytes(32)
"""How a link begins that will show a token."""


def knock(path: Path, data: bytes) -> None:
    """Send bytes to a socket as they are, whatever it thinks of them."""
    with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
        stranger.settimeout(0.05)
        stranger.connect(str(path))
        stranger.sendall(data)
        stranger.recv(4096)


def harass(path: Path, trace: Path, dice: random.Random) -> None:
    """Noise, pickles, a length of 4 GiB, and envelopes of a sender without the token, and with a wrong one."""

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (Path.touch, (trace,))

    code = pickle.dumps(Bomb())
    for data in (dice.randbytes(300), code, b"GET / HTTP/1.1\r\n\r\n"):
        knock(path, data)
        knock(path, GREETING + data)
    for flags in (0x02, 0x06):
        knock(path, GREETING + bytes([flags]) + struct.pack(">Q", 4 << 30) + dice.randbytes(100_000))
    with zmq.Context() as context:
        for password in (None, b"0" * 64):
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                if password is not None:
                    stranger.plain_username, stranger.plain_password = b"manyhands", password
                stranger.connect(f"ipc://{path}")
                for parts in (
                    [code],
                    [dice.randbytes(50)],
                    ENVELOPES.encode(1, Ask(1, 1, None)),
                    ENVELOPES.encode(1, BLOW),
                ):
                    with contextlib.suppress(zmq.Again):  # it has been shown the door already
                        stranger.send_multipart(parts, zmq.NOBLOCK)
                assert not stranger.poll(30), "a stranger got an answer"


BLOW = Views(9, (View(0, 9, 9, None, None, 0),))
"""Would take the shard from everybody."""


def test_hostile_bytes_on_every_socket_of_a_run(tmp_path: Path) -> None:
    trainer, knocked = counting_trainer(PAIR, workers=2), list[str]()
    trace, dice, grown = tmp_path / "ran", random.Random(0), list[int]()

    def disturb(trainer: mh.Trainer) -> None:
        assert trainer._fit is not None and trainer._fit.session._coordination is not None
        wait_until(lambda: in_sync(trainer), 20)
        before = {pid: psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *trainer.pids.values())}
        folder = trainer._fit.session._coordination.wire.folder
        assert folder is not None
        for _ in range(3):
            for path in sorted(Path(folder).iterdir()):
                harass(path, trace, dice)
                knocked.append(path.name)
        assert before.keys() == {os.getpid(), *trainer.pids.values()}, "somebody died"
        grown.extend(psutil.Process(pid).memory_info().rss - size for pid, size in before.items())
        go_on(trainer)

    history = disturbed(trainer, disturb, tmp_path / "run")
    assert len(set(knocked)) == 3 and len(knocked) == 9
    assert max(grown) < 64 << 20
    assert not trace.exists()
    assert {event["event"] for event in history.events} == {"plan", "view", "worker_ready", "server_ready"}


def test_a_default_run_listens_on_private_sockets_alone(tmp_path: Path) -> None:
    trainer, found = counting_trainer(PAIR, workers=2), list[tuple[int, str]]()

    def look(trainer: mh.Trainer) -> None:
        for pid in (os.getpid(), *trainer.pids.values()):
            process = psutil.Process(pid)
            assert [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN] == []
            inodes = {str(fd.readlink())[8:-1] for fd in Path(f"/proc/{pid}/fd").iterdir() if is_socket(fd)}
            for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
                _, _, _, flags, _, _, inode, *path = line.split()
                if inode in inodes and int(flags, 16) & 0x10000:  # it accepts connections
                    found.append((stat.S_IMODE(Path(path[0]).stat().st_mode), path[0]))

    disturbed(trainer, look, tmp_path)
    assert {mode for mode, _ in found} == {0o600}
    assert len({path for _, path in found}) == 3


def is_socket(fd: Path) -> bool:
    try:
        return str(fd.readlink()).startswith("socket:")
    except OSError:
        return False


ENDLESS = """
import sys, threading, time
sys.path.insert(0, {folder!r})
import manyhands as mh
from counting import counting_data, counting_trainer
from scenes import committed
trainer = counting_trainer(mh.Server(policy="async", replicas=1), workers=2)
def tell():
    while committed(trainer) < 1:
        time.sleep(0.001)
    print("folder", trainer._fit.session._coordination.wire.folder, flush=True)
    print("pids", *trainer.pids.values(), flush=True)
threading.Thread(target=tell, daemon=True).start()
trainer.fit(counting_data(), epochs=100000, batch_size=8, run_dir=False, progress="quiet")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_nothing_is_left_when_the_caller_ends(number: signal.Signals) -> None:
    with running(ENDLESS.format(folder=str(Path(__file__).parent))) as program:
        (folder,) = program.wait_for("folder")
        pids = [int(word) for word in program.wait_for("pids")]
        assert len(pids) == 4 and len(list(Path(folder).iterdir())) == 3
        os.kill(program.process.pid, number)
        program.end()
    assert still_there(pids) == []
    wait_until(lambda: not Path(folder).exists(), 5)


def test_the_benchmark_counts_nothing_lost_and_nothing_doubled() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "benchmarks" / "fault_servers.py"), "--kills", "8", "--pause-s", "0.15"]
    environment = dict(os.environ, PYTHONPATH=str(root / "src"))
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert (told["lost"], told["doubled"], told["ledger_exact"]) == (0, 0, True)
    assert sum(told["kills"].values()) == 8
