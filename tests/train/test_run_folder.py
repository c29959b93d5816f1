"""Run folders: numbered without races, locked against a second run, checked before anything starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.errors import RunError, RunLocked, UsageError
from manyhands.train.run_folder import RunFolder, list_runs, write_atomically

HOLDER = """
import sys
from manyhands.train.run_folder import RunFolder
lock = RunFolder(sys.argv[1]).lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_runs_are_numbered_in_order_and_listed(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "runs", "digits")
    second = RunFolder.create(tmp_path / "runs", "my model / v2!")
    assert [first.path.name, second.path.name] == ["0001-digits", "0002-my-model-v2"]
    (tmp_path / "runs" / "0009-old").mkdir()
    (tmp_path / "runs" / "notes").mkdir()
    assert RunFolder.create(tmp_path / "runs", "..").path.name == "0010-run"
    assert [run.path.name[:4] for run in list_runs(tmp_path / "runs")] == ["0001", "0002", "0009", "0010"]
    assert list_runs(tmp_path / "nowhere") == []


def test_processes_that_create_at_once_get_different_numbers(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom manyhands.train.run_folder import RunFolder\nsys.stdin.read()\n"
        "for turn in range(30): RunFolder.create(sys.argv[1], f'{sys.argv[2]}-{turn}')\n"
    )
    root = tmp_path / "runs"
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(root), str(number)], stdin=subprocess.PIPE)
        for number in range(2)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    assert [child.wait(60) for child in children] == [0, 0]
    numbers = [int(run.path.name[:4]) for run in list_runs(root)]
    assert numbers == list(range(1, 61))


def test_a_held_folder_names_its_holder_and_is_free_when_that_is_killed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "held")
    command = [sys.executable, "-c", HOLDER, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunLocked, match=rf"{folder.path} is in use by process {holder.pid} on \S+ since 20\d\d-"):
            folder.lock()
        holder.send_signal(signal.SIGKILL)
    with folder.lock():
        assert json.loads((folder.path / "lock").read_text())["pid"] == os.getpid()


def test_a_folder_is_locked_against_this_process_too_and_released(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "twice")
    lock = folder.lock()
    with pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        folder.lock()
    lock.release()
    lock.release()
    folder.lock().release()


def test_a_forked_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = """
import os, sys
from manyhands.train.run_folder import RunFolder
lock = RunFolder(sys.argv[1]).lock()
if os.fork() == 0:
    os.write(1, b"forked")
    sys.stdin.read()
    os._exit(0)
os._exit(0)
"""
    folder = RunFolder.create(tmp_path, "forked")
    command = [sys.executable, "-c", script, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.read(6) == b"forked"
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        folder.lock().release()
        parent.stdin.close()  # the child ends


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "settings")
    folder.write_json("run.json", {"workers": 4, "path": tmp_path})
    folder.write_json("run.json", {"workers": 2})
    assert folder.read_json("run.json") == {"workers": 2}
    assert [entry.name for entry in folder.path.iterdir() if entry.name.startswith(".")] == []


def test_unreadable_json_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "settings")
    with pytest.raises(UsageError, match=r"run\.json does not exist"):
        folder.read_json("run.json")
    (folder.path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        folder.read_json("run.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", b"old")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "folder", b"new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


def test_opening_says_what_is_there(tmp_path: Path) -> None:
    made = RunFolder.create(tmp_path, "here")
    assert RunFolder.open(made.path).checkpoints == made.path / "checkpoints"
    with pytest.raises(UsageError, match=r"no run folder .*0002-gone\. There is: 0001-here\."):
        RunFolder.open(tmp_path / "0002-gone")
    (tmp_path / "model.pt").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"model\.pt is a file; valid is the folder of a run.* never loaded"):
        RunFolder.open(tmp_path / "model.pt")
    (tmp_path / "photos").mkdir()
    with pytest.raises(UsageError, match="photos is not a run folder"):
        RunFolder.open(tmp_path / "photos")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    for make in (lambda: RunFolder.create(tmp_path / "runs", "x"), lambda: RunFolder.at(tmp_path / "runs" / "mine")):
        with pytest.raises(UsageError, match=rf"cannot write into the run folder {tmp_path}/runs.*needed \d+ bytes"):
            make()


def test_too_little_space_is_known_before_a_run_starts(tmp_path: Path) -> None:
    folder = RunFolder.at(tmp_path / "mine")
    folder.check_writable(needed_bytes=1000)
    with pytest.raises(UsageError, match=rf"{folder.path} has too little space: needed \d+ bytes, free \d+ bytes"):
        folder.check_writable(needed_bytes=2**60)


@pytest.mark.fault
@pytest.mark.parametrize(
    "remount, reason", [("size=64k,nr_inodes=100", "No space left"), ("size=1m,ro", "Read-only file system")]
)
def test_a_full_or_read_only_disk_is_refused(tmp_path: Path, remount: str, reason: str) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    try:
        folder = RunFolder.at(tmp_path / "mine")
        (tmp_path / "ballast").write_bytes(bytes(40_000))
        subprocess.run(["mount", "-o", f"remount,{remount}", str(tmp_path)], check=True)
        with pytest.raises(UsageError, match=rf"{folder.path}: {reason}.*needed \d+ bytes, free \d+ bytes"):
            folder.check_writable()
        with pytest.raises(UsageError, match=rf"{tmp_path}.*{reason}"):
            RunFolder.create(tmp_path / "runs", "x")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
