"""The live view: what it prints on a terminal, in a pipe and when it should be silent."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from manyhands.errors import UsageError
from manyhands.train.progress import LIVE_INTERVAL_S, PLAIN_INTERVAL_S, Progress

HEADER = "batch 256 global = 4 lanes × 64 · each sample once per epoch"


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def show(progress: Progress, step: int = 1, loss: float = 0.5) -> None:
    progress.update(2, 5, step, 100, {"loss": loss, "accuracy": 0.875}, 12345.6, 4)


def test_plain_lines_come_at_most_every_few_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("plain", stream=stream, clock=clock)
    progress.begin([HEADER])
    for step in range(1, 101):
        show(progress, step)
        clock.now += PLAIN_INTERVAL_S / 50 + 1e-6
    progress.end("done")
    lines = stream.getvalue().splitlines()
    assert lines[0] == HEADER
    assert lines[1] == "epoch 2/5 · step 1/100 · loss 0.5 · accuracy 0.875 · 12,346 samples/s · 4 workers"
    assert [line.split(" · ")[1] for line in lines[1:-1]] == ["step 1/100", "step 51/100", "step 100/100"]
    assert lines[-1] == "done"


def test_auto_is_plain_when_the_stream_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = Progress("auto", stream=stream)
    progress.begin([HEADER])
    show(progress)
    progress.end()
    assert "\x1b" not in stream.getvalue()
    assert "step 1/100" in stream.getvalue()


def test_quiet_prints_nothing() -> None:
    stream = io.StringIO()
    progress = Progress("quiet", stream=stream)
    progress.begin([HEADER])
    show(progress)
    progress.event("worker-1 died")
    progress.end("done")
    assert stream.getvalue() == ""


def test_events_are_printed_at_once_and_as_they_are() -> None:
    stream = io.StringIO()
    progress = Progress("plain", stream=stream)
    progress.begin([])
    progress.event("worker-1 [red]died[/red] and was replaced in 0.12 s, " + "a long sentence " * 20)
    assert stream.getvalue().startswith("worker-1 [red]died[/red] and was replaced in 0.12 s, a long")
    assert stream.getvalue().count("\n") == 1


def test_nothing_is_printed_after_the_end() -> None:
    stream = io.StringIO()
    progress = Progress("plain", stream=stream)
    progress.begin([])
    progress.end("done")
    show(progress)
    progress.event("late")
    progress.end("again")
    assert stream.getvalue() == "done\n"


def test_the_live_region_is_drawn_at_most_eight_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream, clock = io.StringIO(), Clock()
    progress = Progress("live", stream=stream, clock=clock)
    progress.begin([HEADER])
    for step in range(1, 801):
        show(progress, step)
        clock.now += LIVE_INTERVAL_S / 100 + 1e-9
    drawn = stream.getvalue().count("samples/s")
    progress.end("done")
    assert drawn == 8
    assert stream.getvalue().rstrip().endswith("done")
    assert re.search(r"step 800/100", stream.getvalue()), "the last numbers are always shown"


def test_a_terminal_gets_a_live_region_and_its_cursor_back() -> None:
    script = (
        "from manyhands.train.progress import Progress\n"
        "p = Progress(); p.begin(['header']); p.update(1, 2, 3, 4, {'loss': 0.5}, 10.0, 1)\n"
        "p.event('something happened'); p.end('closing')\n"
    )
    main, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "MANYHANDS_WARM": "0"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(main, 65536):
            shown += piece
    except OSError:
        pass  # a terminal whose other end is closed reports an error instead of an end
    assert process.wait(60) == 0
    os.close(main)
    text = shown.decode()
    assert text.index("header") < text.index("step 3/4") < text.index("something happened") < text.index("closing")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


@pytest.mark.parametrize("target", ["/dev/full", "closed pipe"])
def test_a_view_that_cannot_be_written_does_not_end_the_run(target: str, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from manyhands.train.progress import Progress\n"
        "sys.stdin.readline()\n"
        "p = Progress(); p.begin(['header']); p.update(1, 2, 3, 4, {'loss': 0.5}, 10.0, 1); p.end('closing')\n"
        f"open({str(tmp_path / 'reached')!r}, 'w').close()\n"
    )
    if target == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(target, os.O_WRONLY)
    environment = {**os.environ, "MANYHANDS_WARM": "0"}
    command = [sys.executable, "-c", script]
    quiet = subprocess.DEVNULL
    subprocess.run(command, input=b"\n", stdout=writer, stderr=quiet, env=environment, timeout=60, check=False)
    os.close(writer)
    assert (tmp_path / "reached").exists()


def test_threads_may_report_at_the_same_time() -> None:
    stream = io.StringIO()
    progress = Progress("plain", stream=stream)
    progress.begin([])
    threads = [
        threading.Thread(target=lambda name=name: [progress.event(f"{name} said so") for _ in range(50)])
        for name in ("first", "second", "third")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.end()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 150
    assert all(re.fullmatch(r"(first|second|third) said so", line) for line in lines)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown progress mode 'loud'"):
        Progress("loud")  # type: ignore[arg-type]
