"""The event log never holds up its caller, whatever the disk does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from manyhands.observe.events import EventLog, read_events


def names(path: Path) -> list[str]:
    return [event["event"] for event in read_events(path)]


def wait_for_writer(log: EventLog, dropped: int) -> None:
    end = time.monotonic() + 5
    while log.dropped < dropped and time.monotonic() < end:
        time.sleep(0.01)
    assert log.dropped == dropped


def test_events_come_back_in_order_with_their_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    before = time.time()
    for step in range(500):
        log.emit("step", step=step, loss=0.5)
    assert log.close()
    events = read_events(tmp_path / "events.jsonl")
    assert [event["step"] for event in events] == list(range(500))
    assert all(before <= event["time"] <= time.time() for event in events)
    assert log.dropped == 0


def test_any_field_can_be_logged_and_every_line_is_plain_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    changing = {"loss": [1.0]}
    log.emit(
        "odd",
        number=np.float32(0.5),
        scalar=torch.tensor(2),
        array=np.zeros(3),
        nan=float("nan"),
        path=tmp_path,
        changing=changing,
    )
    changing["loss"].append(2.0)
    endless: list[object] = []
    endless.append(endless)
    log.emit("odder", endless=endless)
    log.close()
    odd, odder = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert (odd["number"], odd["scalar"], odd["nan"], odd["path"]) == (0.5, 2, None, str(tmp_path))
    assert odd["changing"] == {"loss": [1.0]}
    assert (odder["event"], odder["endless"]) == ("odder", "[[...]]")
    assert isinstance(odder["time"], float)


def test_a_second_log_appends_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for name in ("first", "second"):
        log = EventLog(path)
        log.emit(name)
        log.close()
        with path.open("ab") as file:
            file.write(b'{"event": "torn", "ti')
    assert names(path) == ["first", "second"]
    assert read_events(tmp_path / "missing.jsonl") == []


def test_a_full_disk_drops_and_counts_and_is_told_when_there_is_space_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    log.emit("lost")
    wait_for_writer(log, dropped=1)
    assert isinstance(log.last_error, OSError)
    path.unlink()
    log.emit("kept")
    assert log.close()
    assert names(path) == ["events_dropped", "kept"]
    assert read_events(path)[0]["count"] == 1
    assert log.last_error is None


def test_emit_returns_at_once_while_the_disk_hangs(tmp_path: Path) -> None:
    """A named pipe that nobody reads is a file whose write does not return."""
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    log = EventLog(path, queue_limit=100)
    slowest = 0.0
    for number in range(5000):
        started = time.perf_counter()
        log.emit("step", number=number, padding="x" * 1000)
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 0.5
    assert log.dropped > 1000
    assert not log.close(timeout_s=0.1)
    with path.open("rb") as reader:
        os.set_blocking(reader.fileno(), False)
        end = time.monotonic() + 5
        while not log.close(timeout_s=0.01) and time.monotonic() < end:
            reader.read(1_000_000)
    assert log.close(timeout_s=0), "the writer ends once the disk takes what it has"


@pytest.mark.fault
def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    script = (
        "import sys\nfrom manyhands.observe.events import EventLog\nlog = EventLog(sys.argv[1])\n"
        "step = 0\nwhile True:\n    log.emit('step', step=step)\n    step += 1\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)]) as writer:
        end = time.monotonic() + 30
        while (not path.exists() or path.stat().st_size < 100_000) and time.monotonic() < end:
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
    steps = [event["step"] for event in read_events(path) if event["event"] == "step"]
    assert len(steps) > 100
    assert steps == sorted(set(steps))
