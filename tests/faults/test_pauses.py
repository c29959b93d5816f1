"""A worker that is stopped, or hangs in user code, is named, ended and replaced; its return changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from scenes import At, Scene, committed, send, table, wait_until

import manyhands as mh

pytestmark = pytest.mark.fault


def test_a_stopped_worker_is_replaced_within_three_seconds() -> None:
    scene, seconds, stopped = Scene(data=table(6400), epochs=12), [], []  # long enough for both on a fast machine

    def pause(trainer: mh.Trainer) -> None:
        for _ in range(2):
            role, pid = next(reversed(trainer.pids.items()))
            assert send(pid, signal.SIGSTOP)
            begun = time.monotonic()
            wait_until(lambda role=role, pid=pid: trainer.pids.get(role, pid) != pid, 10)
            seconds.append(time.monotonic() - begun)
            stopped.append(pid)
            send(pid, signal.SIGCONT)  # it comes back late, if it is still there

    paused = scene.run(2, pause)
    assert len(seconds) == 2
    assert min(seconds) <= 3.0
    assert paused.digest == scene.run(2).digest
    sentences = [event["text"] for event in paused.events("worker_hung")]
    assert len(sentences) == 2
    for pid, sentence in zip(stopped, sentences, strict=True):
        assert f"(pid {pid}) was paused for" in sentence
        assert sentence.endswith("; it is being replaced")


def test_a_short_pause_changes_nothing() -> None:
    """Stopped for less than the limit, in the middle of whatever it did, and continued: it simply goes on."""
    scene, pauses = Scene(data=table(1600)), []

    def pause(trainer: mh.Trainer) -> None:
        while len(pauses) < 12 and committed(trainer) >= 0:
            pid = list(trainer.pids.values())[len(pauses) % 3]
            pauses.append(send(pid, signal.SIGSTOP))
            time.sleep(0.03)
            send(pid, signal.SIGCONT)
            time.sleep(0.01)

    paused = scene.run(3, pause)
    assert sum(pauses) >= 3
    assert paused.events("worker_hung") == []
    assert paused.events("worker_died") == []
    assert paused.digest == scene.run(1).digest


def sleep_forever() -> None:
    time.sleep(1000)


def test_a_hang_in_user_code_is_named_with_its_line(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    scene = Scene(lambda: At(40, sleep_forever, marker), trainer={"limits": mh.Limits(hang_s=1.0)})
    begun = time.monotonic()
    hung = scene.run(2)
    assert time.monotonic() - begun < 15
    assert marker.exists()
    (event,) = hung.events("worker_hung")
    line = sleep_forever.__code__.co_firstlineno + 1
    assert f"at test_pauses.py:{line} in sleep_forever" in event["text"]
    assert "gave no sign of life for 1." in event["text"]
    assert "in the compute phase of step" in event["text"]
    assert hung.digest == Scene().run(2).digest


def test_a_paused_caller_loses_nothing() -> None:
    """The whole group is stopped for longer than the limits allow a worker, and continued."""
    scene, done = Scene(data=table(1600), trainer={"limits": mh.Limits(hang_s=1.0)}), []

    def pause(trainer: mh.Trainer) -> None:
        pids = [*trainer.pids.values(), os.getpid()]
        waker = subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {' '.join(map(str, pids))}"])
        begun = time.monotonic()
        for pid in pids:
            send(pid, signal.SIGSTOP)
        waker.wait(10)
        done.append(time.monotonic() - begun)

    paused = scene.run(2, pause)
    assert done[0] >= 1.0
    assert paused.digest == scene.run(2).digest
