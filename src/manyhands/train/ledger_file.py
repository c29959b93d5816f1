"""The ledger on disk: its records as JSON lines, appended and made durable at checkpoints.

Flush the ledger before the checkpoint of the same step is published: then the file never knows less than a
checkpoint does, and a resume rolls the ledger back to the step it goes on from. Each line carries its own checksum.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.core.ledger import Ledger, Record
from manyhands.errors import CheckpointDamaged, CheckpointError
from manyhands.train.run_folder import free_bytes, sync_folder

__all__ = ["LedgerFile", "read_ledger"]


class LedgerFile:
    """Appends what a ledger has recorded since the last flush; one process at a time, under the run's lock."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._unwritten: list[Record] = []

    def load(self) -> Ledger:
        """The ledger so far; an empty one when the file does not exist yet."""
        return read_ledger(self.path)

    def flush(self, ledger: Ledger) -> None:
        """Append the new records and wait until they are on the disk.

        When the disk refuses, the file keeps its old length and the records are written with the next flush.
        """
        self._unwritten += ledger.drain()
        if not self._unwritten:
            return
        content = b"".join(_encode(record) for record in self._unwritten)
        try:
            self._append(content)
        except OSError as error:
            raise CheckpointError(
                f"could not write the ledger {self.path}: {error.strerror}; needed {len(content)} bytes, "
                f"free {free_bytes(self.path)} bytes. Its {len(self._unwritten)} new records are kept in memory "
                f"and written with the next checkpoint."
            ) from error
        self._unwritten.clear()

    def _append(self, content: bytes) -> None:
        is_new = not self.path.exists()
        with self.path.open("a+b", buffering=0) as file:
            keep = _whole_lines(file)
            try:
                os.ftruncate(file.fileno(), keep)
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), keep)
                raise
        if is_new:
            sync_folder(self.path.parent)


def _whole_lines(file: Any) -> int:
    """The length of the file without a line that a dying writer left unfinished."""
    end: int = file.seek(0, os.SEEK_END)
    start = max(0, end - 1024 * 1024)
    tail = os.pread(file.fileno(), end - start, start)
    return start + tail.rfind(b"\n") + 1


def _encode(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return f'{text[:-1]},"crc32":{zlib.crc32(text.encode())}}}\n'.encode()


def _decode(line: bytes) -> Record:
    record: Record = json.loads(line)
    if not isinstance(record, dict) or "crc32" not in record:
        raise ValueError("not a ledger record")
    record.pop("crc32")
    if _encode(record) != line + b"\n":
        raise ValueError("the checksum does not fit the record")
    return record


def read_ledger(path: str | Path) -> Ledger:
    """Replay a ledger file; an unfinished last line is passed over, other damage is an error that names its line."""
    place = Path(path)
    content = place.read_bytes() if place.exists() else b""
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(_decode(line))
        except ValueError as error:
            raise CheckpointDamaged(
                f"the ledger {place} is damaged at line {number}: {error}. Checkpoints are not affected; "
                f"restore the file, or move it away to go on with an account that starts at the checkpoint."
            ) from error
    return Ledger.from_records(records)
