"""Processes from the zygote: how they start, how they end, and that none outlives its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import manyhands
from manyhands.engine import local
from manyhands.engine.channel import Channel, ChannelClosed
from manyhands.errors import EngineError


def describe(channel: Channel) -> None:
    """In a child."""
    import threading

    body = {"pid": os.getpid(), "parent": os.getppid(), "cwd": str(Path.cwd()), "argv": sys.argv, "path": sys.path}
    body |= {"threads": threading.active_count(), "torch": "torch" in sys.modules}
    channel.send("here", body)
    channel.receive(60)


def sleep(channel: Channel) -> None:
    channel.send("asleep", {"pid": os.getpid()})
    time.sleep(60)


def leave(channel: Channel) -> None:
    os._exit(7)


def fail(channel: Channel) -> None:
    raise SystemExit("on purpose")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_child_has_torch_the_callers_path_and_folder_and_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = local.spawn("test_local:leave")  # the zygote is warm from here on
    assert first.wait(60)
    first.close()
    monkeypatch.chdir(tmp_path)
    child = local.spawn("test_local:describe")
    message = child.channel.receive(30)
    assert message is not None
    body = message.body
    assert body["pid"] == child.pid != os.getpid()
    assert body["parent"] == local.zygote_pid()
    assert (body["cwd"], body["argv"], body["path"]) == (str(tmp_path), sys.argv, sys.path)
    assert body["threads"] == 1 and body["torch"]
    assert child.is_alive()
    child.channel.close()
    assert child.wait(10) and not child.is_alive()
    child.close()


@pytest.mark.parametrize(
    "target, number, words, killed",
    [
        ("sleep", signal.SIGKILL, "killed by SIGKILL", True),
        ("sleep", signal.SIGTERM, "killed by SIGTERM", True),
        ("sleep", signal.SIGSEGV, "killed by SIGSEGV", False),
        ("leave", None, "exited with code 7", False),
        ("fail", None, "exited with code 1", False),
    ],
)
def test_how_a_process_ended_is_known(target: str, number: int | None, words: str, killed: bool) -> None:
    child = local.spawn(f"test_local:{target}")
    if number is not None:
        assert child.channel.receive(30) is not None
        child.signal(number)
    assert child.wait(10)
    assert child.ending() == local.Ending(words, killed)
    child.signal(signal.SIGKILL)  # no error: it is gone
    child.close()


def test_a_wait_has_a_time_out() -> None:
    child = local.spawn("test_local:sleep")
    begun = time.monotonic()
    assert not child.wait(0.2)
    assert 0.19 < time.monotonic() - begun < 2
    child.signal(signal.SIGKILL)
    assert child.wait(10)
    child.close()


def test_workers_die_with_the_zygote_and_the_next_one_comes_from_a_new_one() -> None:
    children = [local.spawn("test_local:sleep") for _ in range(2)]
    for child in children:
        assert child.channel.receive(30) is not None
    old = local.zygote_pid()
    assert old is not None
    os.kill(old, signal.SIGKILL)
    for child in children:
        assert child.wait(5)
        with pytest.raises(ChannelClosed):
            child.channel.receive(5)
        child.close()
    child = local.spawn("test_local:describe")
    message = child.channel.receive(60)
    assert message is not None and message.body["parent"] == local.zygote_pid() != old
    child.channel.close()
    assert child.wait(10)
    child.close()


def test_shutdown_ends_everything_and_is_no_end_for_later() -> None:
    child = local.spawn("test_local:sleep")
    assert child.channel.receive(30) is not None
    zygote = local.zygote_pid()
    assert zygote is not None
    local.shutdown()
    assert local.zygote_pid() is None
    assert child.wait(5) and gone(zygote)
    assert child.ending().words == "ended"
    child.close()
    local.shutdown()
    local.warm()
    assert local.zygote_pid() is not None


def test_an_answer_that_comes_too_late_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    child = local.spawn("test_local:leave")
    assert child.wait(60)
    zygote = local.zygote_pid()
    assert zygote is not None
    monkeypatch.setattr(local, "_ANSWER_TIMEOUT_S", 0.2)
    os.kill(zygote, signal.SIGSTOP)
    try:
        assert child.ending().words == "ended"  # nobody can say more now
    finally:
        os.kill(zygote, signal.SIGCONT)
    monkeypatch.undo()
    other = local.spawn("test_local:sleep")
    assert other.channel.receive(30) is not None and other.is_alive()
    assert child.ending().words == "exited with code 7"
    other.signal(signal.SIGKILL)
    assert other.wait(10) and other.ending().words == "killed by SIGKILL"
    other.close()
    child.close()


def test_a_stopped_zygote_is_woken() -> None:
    zygote = local.zygote_pid()
    assert zygote is not None
    os.kill(zygote, signal.SIGSTOP)
    begun = time.monotonic()
    child = local.spawn("test_local:leave")
    assert child.wait(10) and child.ending().words == "exited with code 7"
    assert time.monotonic() - begun < 10 and local.zygote_pid() == zygote
    child.close()


def test_a_child_that_dies_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.pidfd_open

    def late(pid: int) -> int:
        os.kill(pid, signal.SIGKILL)
        assert within(10, lambda: not Path(f"/proc/{pid}").exists()), "nobody collected it"
        return really(pid)

    monkeypatch.setattr(os, "pidfd_open", late)
    child = local.spawn("test_local:sleep")
    monkeypatch.undo()
    assert child.wait(0) and not child.is_alive()
    assert child.ending().words == "killed by SIGKILL"
    child.close()


REFUSING = """
import os
really = os.fork
def fork():
    if os.path.exists({marker!r}):
        os.remove({marker!r})
        raise BlockingIOError(11, "no room, says the test")
    return really()
os.fork = fork
"""


def test_a_fork_that_fails_is_tried_again_and_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "sitecustomize.py").write_text(REFUSING.format(marker=str(marker)))
    local.shutdown()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first = local.spawn("test_local:sleep")
    assert first.channel.receive(60) is not None
    marker.touch()
    second = local.spawn("test_local:sleep")
    assert second.channel.receive(30) is not None
    assert not marker.exists(), "the fork did not fail"
    assert first.is_alive()
    for child in (first, second):
        child.signal(signal.SIGKILL)
        assert child.wait(10)
        child.close()
    monkeypatch.undo()
    local.shutdown()
    local.warm()


def test_the_zygote_stays_while_somebody_needs_it() -> None:
    child = local.spawn("test_local:sleep")
    assert not local.release() and child.is_alive()
    child.signal(signal.SIGKILL)
    assert child.wait(10)
    child.close()
    assert local.release() and local.zygote_pid() is None
    local.warm()


FOLDER = """
import sys, time
from manyhands.engine import local
local.remove_afterwards(sys.argv[1])
local.shutdown()
child = local.spawn("test_local:sleep")
child.channel.receive(60)
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.fault
@pytest.mark.parametrize("killed", [False, True])
def test_a_folder_outlives_the_zygote_but_not_the_caller(killed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    source = str(Path(manyhands.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, str(Path(__file__).parent)])}
    command = [sys.executable, "-c", FOLDER, str(folder), "60" if killed else "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"ready\n"
        assert folder.exists(), "it went with the first zygote"
        if killed:
            caller.kill()
        caller.wait(10)
        assert within(5, lambda: not folder.exists())


@pytest.mark.fault
def test_a_folder_goes_with_a_caller_that_is_killed_before_the_zygote_has_heard_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(manyhands.__file__).parents[1])}
    script = "import os, sys; from manyhands.engine import local; local.remove_afterwards(sys.argv[1]); os.abort()"
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, stderr=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGABRT
    assert within(20, lambda: not folder.exists())


SCRIPT = """
import sys, time
from manyhands.engine import local
child = local.spawn("test_local:sleep")
child.channel.receive(60)
print(local.zygote_pid(), child.pid, flush=True)
time.sleep(60)
"""
# A fork of the caller holds everything that the caller had open, and lives on.
FORKING = SCRIPT.replace("print(", "import os\nif os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)\nprint(")


@pytest.mark.fault
@pytest.mark.parametrize("script, number", [
    (SCRIPT, signal.SIGKILL), (SCRIPT, signal.SIGTERM), (SCRIPT, signal.SIGINT), (FORKING, signal.SIGKILL),
], ids=["SIGKILL", "SIGTERM", "SIGINT", "a fork lives on"])  # fmt: skip
def test_nothing_outlives_a_caller_that_is_killed(script: str, number: int) -> None:
    source = str(Path(manyhands.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, str(Path(__file__).parent)])}
    caller = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    with caller:
        assert caller.stdout is not None
        zygote, worker = map(int, caller.stdout.readline().split())
        assert not gone(zygote) and not gone(worker)
        forks = [child for child in psutil.Process(caller.pid).children() if child.pid != zygote]
        assert len(forks) == (script == FORKING)
        caller.send_signal(number)
        caller.wait(10)
        assert within(5, lambda: gone(worker) and gone(zygote))
        for fork in forks:
            fork.kill()


def test_a_target_that_does_not_exist_ends_the_child_and_not_the_zygote() -> None:
    child = local.spawn("test_local:nothing")
    assert child.wait(10)
    assert child.ending().words == "exited with code 1"
    child.close()
    assert local.zygote_pid() is not None


def test_a_zygote_that_cannot_start_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    local.shutdown()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="worker process could not be started"):
        local.spawn("test_local:sleep")
    monkeypatch.undo()
    local.shutdown()
    local.warm()
