"""Checkpoints: folders that are published whole or not at all, and verified byte by byte before anything uses them.

``checkpoints/000001204/`` holds safetensors files, ``manifest.json`` (the size and SHA-256 of each file, and the
caller's ``meta``) and ``manifest.sha256`` (the seal of the manifest, in the format of ``sha256sum -c``).

A save writes into a hidden sibling folder, makes every file and the folder durable, renames it and makes the rename
durable. Names beginning with a dot are a save's own: ``.writing-`` (locked by its living writer), ``.removing-``, and
``.replaced-`` (the older one of two checkpoints of the same step, which counts until the newer one is published).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.errors import CheckpointDamaged, CheckpointError, UsageError
from manyhands.train.run_folder import free_bytes, sync_folder
from manyhands.train.tensor_file import FileEntry, plan_files, read_tensors, verify_file, write_file

__all__ = ["BackgroundSaver", "Checkpoint", "CheckpointStore", "read_checkpoint"]

FILE_LIMIT_BYTES = 1024**3
_FORMAT = "manyhands checkpoint"
_VERSION = 1
_FILE_NAME = re.compile(r"tensors-\d{3,}\.safetensors")
_PUBLISHED = re.compile(r"(?P<replaced>\.replaced-)?(?P<step>\d{9,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run at ``step``. The tensors of one file share memory; ``meta`` is plain JSON data."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run, in one folder, of which at least ``keep`` good ones stay."""

    def __init__(self, folder: str | Path, keep: int = 2, *, file_limit_bytes: int = FILE_LIMIT_BYTES) -> None:
        if keep < 2:
            raise UsageError(f"keep={keep}: at least 2 checkpoints stay, so that one damaged file costs no run.")
        self.folder = Path(folder)
        if self.folder.is_file():
            raise _not_a_checkpoint(self.folder)
        self.keep = keep
        self._file_limit_bytes = file_limit_bytes

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in ascending order; damage shows only when one is loaded."""
        return sorted({step for step, _ in self._found()})

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Publish a checkpoint and prune older ones; on an error nothing is published and nothing older is lost."""
        files = plan_files(tensors, self._file_limit_bytes)
        try:
            meta_bytes = len(json.dumps(dict(meta)))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the meta of a checkpoint must be plain JSON data: {error}.") from error
        needed = sum(file.size_bytes for file in files) + meta_bytes
        final = self.folder / f"{step:09d}"
        temporary = self.folder / f".writing-{step:09d}-{secrets.token_hex(4)}"
        try:
            if not self.folder.exists():
                self.folder.mkdir(parents=True)
                sync_folder(self.folder.parent)
            self._mend()
            if needed > free_bytes(self.folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary.mkdir()
            with _held_by_writer(temporary):
                entries = [write_file(temporary / file.name, file.parts()) for file in files]
                _write_manifest(temporary, step, entries, dict(meta))
                sync_folder(temporary)
                self._publish(temporary, final)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {final} was not saved: {error.strerror or error}; needed {needed} bytes, "
                f"free {free_bytes(self.folder)} bytes. Older checkpoints are untouched."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # the checkpoint is safe; what could not be removed waits for the next save
            self._prune(final)
        return final

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of ``step``, after every byte of it was verified."""
        for found, path in self._found():
            if found == step:
                return read_checkpoint(path)
        raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; it has: {self.steps() or 'none'}.")

    def load_latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest good checkpoint, and a warning for each newer one that is damaged."""
        warnings: list[str] = []
        for _, path in self._found():
            try:
                return read_checkpoint(path), warnings
            except CheckpointError as error:
                warnings.append(f"passed over a checkpoint that cannot be used: {error}")
        return None, warnings

    def _found(self) -> list[tuple[int, Path]]:
        """(step, path) of everything published, newest first; of one step the replacing before the replaced."""
        if not self.folder.is_dir():
            return []
        matches = [match for entry in self.folder.iterdir() if (match := _PUBLISHED.fullmatch(entry.name))]
        matches.sort(key=lambda match: (int(match["step"]), match["replaced"] is None), reverse=True)
        return [(int(match["step"]), self.folder / match.string) for match in matches]

    def _publish(self, temporary: Path, final: Path) -> None:
        replaced = self.folder / f".replaced-{final.name}"
        if final.exists():
            _remove(replaced)
            final.rename(replaced)
        try:
            temporary.rename(final)
            sync_folder(self.folder)
        except OSError:
            # Not durable is not published: the name goes back to what it meant before.
            with contextlib.suppress(OSError):
                final.rename(temporary)
            if replaced.exists():
                replaced.rename(final)
            raise
        _remove(replaced)

    def _prune(self, written: Path) -> None:
        """Remove what is older than the ``keep`` newest good ones; those not written just now are read to be sure."""
        found = [path for _, path in self._found()]
        if len(found) <= self.keep:
            return
        good = 0
        for path in found:
            if good >= self.keep:
                _remove(path)
            elif path == written or _is_good(path):
                good += 1

    def _mend(self) -> None:
        """Clear up after writers that died."""
        for entry in self.folder.glob(".removing-*"):
            shutil.rmtree(entry, ignore_errors=True)
        for entry in self.folder.glob(".writing-*"):
            # Its writer holds this lock while it lives, so whoever gets the lock may clear up.
            with contextlib.suppress(OSError), _held_by_writer(entry):
                shutil.rmtree(entry, ignore_errors=True)
        for entry in self.folder.glob(".replaced-*"):
            published = self.folder / entry.name.removeprefix(".replaced-")
            if published.exists():
                _remove(entry)
            else:
                entry.rename(published)


class BackgroundSaver:
    """Saves in a thread. While one save runs, one more can wait; a newer request takes the place of the waiting one.

    ``on_saved(step, path, seconds)`` and ``on_error(error)`` are called in that thread and must not raise.
    """

    def __init__(
        self,
        store: CheckpointStore,
        on_error: Callable[[Exception], None],
        on_saved: Callable[[int, Path, float], None] | None = None,
    ) -> None:
        self.last_saved_step: int | None = None
        self._store = store
        self._on_error = on_error
        self._on_saved = on_saved
        self._waiting: tuple[int, Mapping[str, Tensor], Mapping[str, Any]] | None = None
        self._saving = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._save_forever, name="manyhands-checkpoints", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a save runs or waits: a copy made now for another save would have to wait, too."""
        return self._saving or self._waiting is not None

    def submit(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Ask for a save and return at once. The tensors must be copies that nobody changes any more."""
        with self._changed:
            if self._closing:
                raise CheckpointError(f"the checkpoint of step {step} came after the saver was closed.")
            self._waiting = (step, tensors, meta)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being saved; False when that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Finish what was asked for and end the thread; False when the disk did not take it within ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _save_forever(self) -> None:
        while True:
            with self._changed:
                self._saving = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                request, self._waiting, self._saving = self._waiting, None, True
            self._save(*request)
            del request  # the copies are large and the next request may be long in coming

    def _save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        started = time.perf_counter()
        try:
            path = self._store.save(step, tensors, meta)
        except Exception as error:
            self._on_error(error)
            return
        self.last_saved_step = step
        if self._on_saved is not None:
            self._on_saved(step, path, time.perf_counter() - started)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Load one checkpoint folder. Each file is read once: the bytes that are verified are the bytes that are used."""
    folder = Path(path)
    if not (folder / "manifest.json").exists() and not (folder / "manifest.sha256").exists():
        raise _not_a_checkpoint(folder)
    manifest = _read_manifest(folder)
    tensors: dict[str, Tensor] = {}
    for entry in manifest.files:
        tensors |= read_tensors(folder / entry.name, entry)
    return Checkpoint(step=manifest.step, tensors=tensors, meta=manifest.meta)


def _is_good(folder: Path) -> bool:
    try:
        for entry in _read_manifest(folder).files:
            verify_file(folder / entry.name, entry)
    except CheckpointError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    step: int
    files: list[FileEntry]
    meta: dict[str, Any]


def _write_manifest(folder: Path, step: int, entries: Sequence[FileEntry], meta: Mapping[str, Any]) -> None:
    files = [asdict(entry) for entry in entries]
    described = {"format": _FORMAT, "version": _VERSION, "step": step, "files": files, "meta": meta}
    content = json.dumps(described, indent=1).encode() + b"\n"
    write_file(folder / "manifest.json", [content])
    write_file(folder / "manifest.sha256", [_seal(content)])


def _seal(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  manifest.json\n".encode()


def _read_manifest(folder: Path) -> _Manifest:
    try:
        content = (folder / "manifest.json").read_bytes()
        seal = (folder / "manifest.sha256").read_bytes()
    except OSError as error:
        raise CheckpointDamaged(f"{folder} is damaged: {error.filename}: {error.strerror}.") from error
    if seal != _seal(content):
        raise CheckpointDamaged(f"{folder} is damaged: manifest.json does not fit its SHA-256 in manifest.sha256.")
    described: dict[str, Any] = json.loads(content)
    if (described.get("format"), described.get("version")) != (_FORMAT, _VERSION):
        raise CheckpointError(
            f"{folder} is of the format {described.get('format')!r}, version {described.get('version')}; "
            f"this manyhands reads {_FORMAT!r}, version {_VERSION}. Install the one that wrote it."
        )
    files = [FileEntry(**entry) for entry in described["files"]]
    if any(not _FILE_NAME.fullmatch(entry.name) for entry in files):
        raise CheckpointDamaged(f"{folder} is damaged: its manifest names files that no checkpoint has.")
    return _Manifest(step=described["step"], files=files, meta=described["meta"])


def _not_a_checkpoint(path: Path) -> CheckpointError:
    if not path.exists():
        return CheckpointError(f"there is no checkpoint {path}.")
    received = "a folder without manifest.json" if path.is_dir() else "a file"
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(4)[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"):
            received = "a pickle file, as torch.save writes it; loading one can run any code, so it is refused"
    return CheckpointError(
        f"{path} is not a checkpoint of manyhands: received {received}. Valid is a run folder, or a folder such as "
        f"runs/0001-name/checkpoints/000001204. To use weights from elsewhere, load them into the model yourself "
        f"(torch.load with weights_only=True, or safetensors) and start a new run from it."
    )


@contextlib.contextmanager
def _held_by_writer(folder: Path) -> Iterator[None]:
    """Hold a temporary folder; the kernel gives it free when the process dies. Raises when another writer holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        with contextlib.suppress(OSError):  # nothing was written through it, so nothing can be lost
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Unpublish first, so that no reader meets half a checkpoint. What fails here is tried again by the next save."""
    doomed = folder.with_name(f".removing-{folder.name.lstrip('.')}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
