"""Run folders: where a run lives on disk, who holds it, and the durable writes that everything in it uses.

A run folder is ``runs/0001-name/`` with ``run.json``, ``events.jsonl``, ``ledger``, ``checkpoints/`` and ``lock``.
One live process at a time holds the lock; the kernel takes it back when that process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from manyhands.errors import RunError, RunLocked, UsageError

__all__ = ["RunFolder", "RunLock", "free_bytes", "list_runs", "sync_folder", "write_atomically"]

_NUMBERED = re.compile(r"(\d{4,})-.+")
_PROBE_BYTES = 64 * 1024

_held: set[int] = set()


def _close_inherited_locks() -> None:
    # A forked child shares the lock: without this, a child that outlives the run would keep the folder locked.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: a rename is only certain after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """The bytes that an unprivileged process can still write at ``path`` or at its nearest existing parent."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            numbers = os.statvfs(place)
            return numbers.f_bavail * numbers.f_frsize
    return 0


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by ``content``: a reader, or a crash at any moment, sees all of the old or all of the new."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


class RunLock:
    """The right to write into one run folder, held until ``release`` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe_holder(os.pread(self._descriptor, 4096, 0))
            os.close(self._descriptor)
            raise RunLocked(
                f"the run folder {path.parent} is in use by {holder}. Only one live run can write into a folder: "
                f"wait for that run, stop it, or give another run_dir."
            ) from None
        except OSError:
            os.close(self._descriptor)
            raise
        _held.add(self._descriptor)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        record = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(record).encode() + b"\n", 0)

    def release(self) -> None:
        """Give the folder free; calling it again does nothing."""
        # The file stays: removing it would let two runs lock two different files of the same name.
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _describe_holder(content: bytes) -> str:
    try:
        record = json.loads(content)
        return f"process {int(record['pid'])} on {record['host']} since {record['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process (it has just started and not yet written its number)"


class RunFolder:
    """One run on disk: its paths, its lock, its settings."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.events = self.path / "events.jsonl"
        self.ledger = self.path / "ledger"
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"

    @classmethod
    def create(cls, root: str | Path = "runs", name: str = "run") -> RunFolder:
        """Make ``root/<next number>-<name>``; two processes that do so at once get two numbers."""
        place = Path(root)
        word = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:60] or "run"
        try:
            place.mkdir(parents=True, exist_ok=True)
            with (place / ".numbering").open("ab") as numbering:
                fcntl.flock(numbering, fcntl.LOCK_EX)
                number = max((_number(entry.name) for entry in place.iterdir()), default=0) + 1
                path = place / f"{number:04d}-{word}"
                path.mkdir()
            sync_folder(place)
        except OSError as error:
            raise _unusable(place, error) from error
        return cls.at(path)

    @classmethod
    def at(cls, path: str | Path) -> RunFolder:
        """The run folder at exactly this path, made if it is not there, known to be writable."""
        folder = cls(path)
        try:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.path)
        except OSError as error:
            raise _unusable(folder.path, error) from error
        folder.check_writable()
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run folder; reading it needs no lock."""
        folder = cls(path)
        if not folder.path.exists():
            near = [run.path.name for run in list_runs(folder.path.parent)]
            there = f" There is: {', '.join(near[-10:])}." if near else ""
            raise UsageError(f"there is no run folder {folder.path}.{there}")
        if folder.path.is_file():
            raise UsageError(
                f"{folder.path} is a file; valid is the folder of a run, such as runs/0001-name. A pickle, as "
                f"torch.save writes it, is never loaded, because that can run any code."
            )
        if not (folder.path / "run.json").exists() and not folder.checkpoints.is_dir():
            raise UsageError(
                f"{folder.path} is not a run folder: it has neither run.json nor checkpoints/. "
                f"Give the folder that a run printed as its run_dir, such as runs/0001-name."
            )
        return folder

    def check_writable(self, needed_bytes: int = 0) -> None:
        """Write a probe and compare the free space, so that a full or read-only disk is known before a run starts."""
        probe = self.path / f".probe-{secrets.token_hex(4)}"
        needed = needed_bytes + _PROBE_BYTES
        try:
            try:
                write_atomically(probe, bytes(_PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self.path, error, needed) from error
        free = free_bytes(self.path)
        if free < needed:
            raise UsageError(
                f"the run folder {self.path} has too little space: needed {needed} bytes, free {free} bytes. "
                f"Free some, or give another run_dir."
            )

    def lock(self) -> RunLock:
        """Hold the folder for this process; ``RunLocked`` names who holds it already."""
        try:
            return RunLock(self.path / "lock")
        except OSError as error:
            raise _unusable(self.path, error) from error

    def write_json(self, name: str, data: Any) -> None:
        """Write ``data`` to the file ``name`` of this folder, whole or not at all."""
        path = self.path / name
        content = json.dumps(data, indent=2, default=str).encode() + b"\n"
        try:
            write_atomically(path, content)
        except OSError as error:
            raise RunError(
                f"could not write {path}: {error.strerror}; needed {len(content)} bytes, "
                f"free {free_bytes(self.path)} bytes. What was there before is unchanged."
            ) from error

    def read_json(self, name: str) -> Any:
        """What ``write_json`` wrote under this name."""
        path = self.path / name
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise UsageError(f"{path} does not exist: {self.path} is not the folder of a started run.") from error
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}. Restore it, or start a new run.") from error


def list_runs(root: str | Path = "runs") -> list[RunFolder]:
    """The numbered runs under ``root``, oldest first; none when the folder does not exist."""
    place = Path(root)
    if not place.is_dir():
        return []
    numbered = [entry for entry in place.iterdir() if _number(entry.name) and entry.is_dir()]
    return [RunFolder(entry) for entry in sorted(numbered, key=lambda entry: (_number(entry.name), entry.name))]


def _number(name: str) -> int:
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else 0


def _unusable(path: Path, error: OSError, needed_bytes: int = _PROBE_BYTES) -> UsageError:
    return UsageError(
        f"cannot write into the run folder {path}: {error.strerror}; needed {needed_bytes} bytes, "
        f"free {free_bytes(path)} bytes. Give a run_dir on a disk that is writable and has space."
    )
