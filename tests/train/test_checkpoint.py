"""Checkpoints: whole or absent, verified before use, never pruned below two good ones, whatever fails when."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manyhands.errors import CheckpointDamaged, CheckpointError, UsageError
from manyhands.train.checkpoint import BackgroundSaver, CheckpointStore, read_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NOT_SAVED = r"{path} was not saved: {why}.*; needed \d+ bytes, free \d+ bytes\. Older checkpoints are untouched"


def state(step: int, size: int = 100) -> dict[str, Tensor]:
    return {"weight": torch.full((size,), float(step)), "bias": torch.tensor(step), "half": torch.ones(3).bfloat16()}


def damage(checkpoint: Path, name: str = "tensors-000.safetensors") -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)


def hidden(store: CheckpointStore) -> list[str]:
    return [entry.name for entry in store.folder.iterdir() if entry.name.startswith(".")]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_what_was_saved_is_loaded(store: CheckpointStore) -> None:
    meta = {"epoch": 3, "history": {"loss": [0.5, 0.25]}, "name": "ü"}
    path = store.save(1204, state(1204), meta)
    assert path == store.folder / "000001204"
    for checkpoint in (store.load(1204), store.load_latest()[0], read_checkpoint(path)):
        assert checkpoint is not None
        assert (checkpoint.step, checkpoint.meta) == (1204, meta)
        assert all(torch.equal(tensor, checkpoint.tensors[name]) for name, tensor in state(1204).items())
    assert hidden(store) == []


def test_a_state_without_tensors_and_one_of_many_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, file_limit_bytes=1000)
    store.save(1, {}, {})
    assert store.load(1).tensors == {}
    path = store.save(2, {f"layer{index}": torch.full((100,), float(index)) for index in range(10)}, {})
    assert len(list(path.glob("*.safetensors"))) == 5
    assert store.load(2).tensors["layer7"].tolist() == [7.0] * 100


def test_the_files_can_be_checked_without_manyhands(store: CheckpointStore) -> None:
    path = store.save(1, state(1), {})
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=path, check=True)
    (file,) = json.loads((path / "manifest.json").read_text())["files"]
    summed = subprocess.run(["sha256sum", file["name"]], cwd=path, check=True, capture_output=True, text=True)
    assert summed.stdout.split()[0] == file["sha256"]


def test_nothing_saved_yet(store: CheckpointStore) -> None:
    assert store.steps() == []
    assert store.load_latest() == (None, [])
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 7; it has: none"):
        store.load(7)
    store.save(5, state(5), {})
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 7; it has: \[5\]"):
        store.load(7)


@pytest.mark.parametrize("name", ["tensors-000.safetensors", "manifest.json", "manifest.sha256"])
def test_damage_and_absence_fall_back_with_a_warning(store: CheckpointStore, name: str) -> None:
    store.save(1, state(1), {})
    newest = store.save(2, state(2), {})
    for hurt in (lambda: damage(newest, name), (newest / name).unlink):
        hurt()
        with pytest.raises(CheckpointDamaged, match=str(newest)):
            store.load(2)
        checkpoint, warnings = store.load_latest()
        assert checkpoint is not None
        assert checkpoint.step == 1
        assert len(warnings) == 1
        assert re.match(rf"passed over a checkpoint that cannot be used: {newest}.* is damaged: ", warnings[0])


def test_pruning_keeps_two_good_ones_and_knows_the_damaged_from_the_good(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        path = store.save(step, state(step), {})
    assert store.steps() == [3, 4]
    damage(path)
    store.save(5, state(5), {})
    assert store.steps() == [3, 4, 5], "4 is damaged, so 3 is one of the two good ones"
    store.save(6, state(6), {})
    assert store.steps() == [5, 6]
    with pytest.raises(UsageError, match="keep=1: at least 2"):
        CheckpointStore(store.folder, keep=1)


def test_a_step_saved_again_is_replaced(store: CheckpointStore) -> None:
    store.save(5, state(5), {"turn": 1})
    store.save(5, state(5), {"turn": 2})
    assert store.load(5).meta == {"turn": 2}
    assert hidden(store) == []
    store.save(6, state(6), {})
    (store.folder / "000000006").rename(
        store.folder / ".replaced-000000006"
    )  # as a crash between two renames leaves it
    latest, warnings = store.load_latest()
    assert latest is not None
    assert (latest.step, warnings) == (6, [])
    store.save(7, state(7), {})
    assert (store.steps(), hidden(store)) == ([6, 7], [])


def test_what_cannot_be_saved_is_refused_before_anything_is_written(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="meta of a checkpoint must be plain JSON data"):
        store.save(1, state(1), {"model": object()})
    assert not store.folder.exists()


def test_a_pickle_is_refused_and_not_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "sprung",)

    (tmp_path / "model.pkl").write_bytes(pickle.dumps(Trap()))
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    for name in ("model.pkl", "model.pt"):
        for use in (read_checkpoint, CheckpointStore):
            with pytest.raises(CheckpointError, match=rf"{name} is not a checkpoint.*received a pickle file.*refused"):
                use(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_other_things_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match="received a file"):
        read_checkpoint(tmp_path / "text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"received a folder without manifest\.json"):
        read_checkpoint(tmp_path / "folder")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "nothing")


def test_the_folder_of_a_dead_writer_is_removed_and_that_of_a_living_one_is_not(store: CheckpointStore) -> None:
    script = (
        "import fcntl, os, sys\nos.mkdir(sys.argv[1])\ndescriptor = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(descriptor, fcntl.LOCK_EX)\nprint('writing', flush=True)\nsys.stdin.read()\n"
    )
    store.save(1, state(1), {})
    writing = store.folder / ".writing-000000009-abcd"
    command = [sys.executable, "-c", script, str(writing)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        store.save(2, state(2), {})
        assert hidden(store) == [writing.name]
        writer.send_signal(signal.SIGKILL)
    store.save(3, state(3), {})
    assert hidden(store) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=16", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.fault
@pytest.mark.parametrize("size", [100_000, 10], ids=["no bytes left", "no inodes left"])
def test_a_full_disk_publishes_nothing_and_loses_nothing(small_disk: Path, size: int) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=9)

    def fill() -> None:
        for step in range(1, 9):
            store.save(step, state(step, size), {})

    with pytest.raises(CheckpointError) as caught:
        fill()
    assert re.search(NOT_SAVED.format(path=store.folder / "00000000.", why="No space left"), str(caught.value))
    kept = store.steps()
    assert len(kept) >= 2
    latest, warnings = store.load_latest()
    assert latest is not None
    assert (latest.step, warnings, hidden(store)) == (kept[-1], [], [])
    assert [store.load(step).step for step in kept] == kept


@pytest.mark.fault
def test_a_disk_that_ends_in_the_middle_of_a_file_publishes_nothing(tmp_path: Path) -> None:
    """The limit on the size of a file, in a process of its own: a write fails half way although space was free."""
    script = """
import resource, sys, torch
from manyhands.train.checkpoint import CheckpointStore
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
store = CheckpointStore(sys.argv[1])
store.save(1, {"weight": torch.ones(1000)}, {})
try:
    store.save(2, {"weight": torch.ones(1_000_000)}, {})
except Exception as error:
    print(type(error).__name__, error)
print(store.steps(), store.load_latest()[0].step, len(list(store.folder.iterdir())))
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    error, left = result.stdout.splitlines()
    assert error.startswith("CheckpointError")
    assert re.search(NOT_SAVED.format(path=tmp_path / "000000002", why="File too large"), error)
    assert left == "[1] 1 1"


@pytest.mark.fault
def test_flipped_bits_are_noticed() -> None:
    command = [sys.executable, str(BENCHMARKS / "fault_flips.py"), "--flips", "60", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "flips 60 · noticed 60 · missed 0 · files hit 5 of 5" in result.stdout


@pytest.mark.fault
def test_crashes_and_errors_at_system_calls_lose_nothing() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    command = [sys.executable, str(BENCHMARKS / "fault_syscalls.py"), "--sample", "12"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if "strace cannot trace here" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(r"(?:crash|error): \d+ calls · \d\d tried", result.stdout)) == 4
    assert "\nmissed 0 · " in result.stdout


class Gate:
    """Holds up a save from inside: a tensor mapping whose items come when the gate opens."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.reached, self.opened = threading.Event(), threading.Event()

    def items(self) -> object:
        self.reached.set()
        assert self.opened.wait(10)
        return self._tensors.items()


def test_a_newer_request_takes_the_place_of_a_waiting_one(store: CheckpointStore) -> None:
    errors: list[Exception] = []
    saved: list[int] = []
    saver = BackgroundSaver(store, errors.append, lambda step, path, seconds: saved.append(step))
    gate = Gate(state(1))
    saver.submit(1, gate, {})  # type: ignore[arg-type]
    assert gate.reached.wait(10)
    started = time.perf_counter()
    for step in (2, 3, 4):
        saver.submit(step, state(step), {})
    assert time.perf_counter() - started < 1
    assert saver.busy
    assert saver.last_saved_step is None
    assert not saver.wait(0.01)
    assert not saver.close(0.01)
    gate.opened.set()
    assert saver.close(10)
    assert (saved, saver.last_saved_step, store.steps(), errors) == ([1, 4], 4, [1, 4], [])
    with pytest.raises(CheckpointError, match="after the saver was closed"):
        saver.submit(5, state(5), {})


def test_an_error_is_reported_and_the_next_save_works(store: CheckpointStore) -> None:
    errors: list[Exception] = []
    saver = BackgroundSaver(store, errors.append)
    saver.submit(1, {"weight": torch.eye(2).to_sparse()}, {})
    assert saver.wait(10)
    assert saver.last_saved_step is None
    saver.submit(2, state(2), {})
    assert saver.close(10)
    assert [type(error) for error in errors] == [CheckpointError]
    assert (saver.last_saved_step, store.steps()) == (2, [2])
