"""Ctrl-C, SIGTERM and the death of the caller leave nothing behind: no process, no shared memory, no socket."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from scripts import fit_script, running, shared_memory, still_there

pytestmark = pytest.mark.fault


def unix_sockets() -> set[str]:
    """Names of Unix sockets on this machine; connected pairs have none."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {line.split()[7] for line in lines if len(line.split()) > 7}


@pytest.mark.parametrize("sync", [
    "'allreduce'", "'async'", "mh.Server(policy='async', replicas=1)", "'async-local'",
], ids=["allreduce", "async", "replicas", "async-local"])  # fmt: skip
@pytest.mark.parametrize(
    "number, codes",
    [
        (signal.SIGINT, (130, -signal.SIGINT)),  # Python ends by the signal where nobody catches KeyboardInterrupt
        (signal.SIGTERM, (143,)),
        (signal.SIGKILL, (-signal.SIGKILL,)),
    ],
    ids=["ctrl-c", "term", "kill"],
)
def test_nothing_is_left(number: signal.Signals, codes: tuple[int, ...], sync: str, tmp_path: Path) -> None:
    segments, sockets = shared_memory(), unix_sockets()
    with running(fit_script(str(tmp_path / "run"), sync=sync)) as program:
        pids = [int(word) for word in program.wait_for("pids")]
        time.sleep(random.Random(sync).random() * 0.5)
        os.kill(program.process.pid, number)
        text = program.end()
    assert still_there(pids) == []
    assert shared_memory() <= segments
    assert {name for name in unix_sockets() - sockets if "manyhands" in name} == set()
    assert program.process.returncode in codes, text
    if number is signal.SIGKILL:
        return
    receipt = re.search(r"saved step (\d+) · (\d+) processes stopped · 0 left · resume: manyhands resume (\S+)", text)
    assert receipt, text
    assert (tmp_path / "run" / "checkpoints" / f"{int(receipt[1]):09d}").is_dir()
    assert int(receipt[2]) == len(pids)


def test_twice_does_not_wait(tmp_path: Path) -> None:
    """The second Ctrl-C ends a run whose step does not."""
    script = fit_script(str(tmp_path / "run"))
    script = script.replace("model = Sluggish()", "from scenes import At\nmodel = At(40, lambda: time.sleep(1000))")
    with running(script) as program:
        pids = [int(word) for word in program.wait_for("pids")]
        time.sleep(1.0)
        os.kill(program.process.pid, signal.SIGINT)
        time.sleep(0.3)
        assert program.process.poll() is None
        begun = time.monotonic()
        os.kill(program.process.pid, signal.SIGINT)
        text = program.end()
    assert time.monotonic() - begun < 5, text
    assert program.process.returncode in (130, -signal.SIGINT)
    assert "KeyboardInterrupt" in text
    assert still_there(pids) == []


def test_a_caller_that_catches_the_interrupt_goes_on(tmp_path: Path) -> None:
    """As in a notebook: the run is over and saved, the process lives, the next fit works."""
    script = fit_script(str(tmp_path / "run")).replace("trainer.fit(", "try:\n  trainer.fit(")
    caught = "except KeyboardInterrupt: print('caught', flush=True)\ntrainer.fit(table(160), run_dir=False)\n"
    script = script.replace('print("digest"', caught + 'print("digest"')
    with running(script) as program:
        pids = [int(word) for word in program.wait_for("pids")]
        os.kill(program.process.pid, signal.SIGINT)
        program.wait_for("caught")
        assert still_there(pids) == []
        program.wait_for("digest")
        program.end()
    assert program.process.returncode == 0
