"""The event log: one JSON object a line, appended by a thread of its own, so that training never waits for a disk.

What cannot be kept (the queue is full, the disk is full) is dropped and counted, and the count is itself an event
as soon as something can be written again.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["EventLog", "read_events"]


def _plain(value: Any) -> Any:
    # NumPy and torch scalars know their plain value; anything else is better seen as text than lost.
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return str(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)


def _encode(event: str, fields: dict[str, Any]) -> bytes:
    record = {"event": event, "time": time.time(), **fields}
    try:
        return _encoder.encode(record) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _encoder.encode(record | {name: str(value) for name, value in fields.items()}) + b"\n"


class EventLog:
    """Appends events to a file. ``emit`` never blocks, never touches the disk and never raises for its sake."""

    def __init__(self, path: str | Path, *, queue_limit: int = 10_000) -> None:
        self._path = Path(path)
        self._queue_limit = queue_limit
        self._pending: list[bytes] = []
        self._dropped = 0
        self._dropped_told = 0
        self._last_error: OSError | None = None
        self._closing = False
        # Held for list operations only, never across a write; re-entrant, so a signal handler may emit.
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._write_forever, name="manyhands-events", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many events could not be kept."""
        return self._dropped

    @property
    def last_error(self) -> OSError | None:
        """Why the newest attempt to write failed; None when it did not."""
        return self._last_error

    def emit(self, event: str, **fields: Any) -> None:
        """Record that ``event`` happened now."""
        # Encoded here, so that a field which the caller changes afterwards is logged as it was.
        line = _encode(event, fields)
        with self._wake:
            if self._closing or len(self._pending) >= self._queue_limit:
                self._dropped += 1
                return
            self._pending.append(line)
            self._wake.notify()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what is queued and end the thread; False when the disk did not take it within ``timeout_s``."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write_forever(self) -> None:
        while True:
            with self._wake:
                while not self._pending and not self._closing:
                    self._wake.wait()
                lines, self._pending = self._pending, []
                ending = self._closing
            if lines:
                self._write(lines)
            if ending:
                return

    def _write(self, lines: list[bytes]) -> None:
        lost = self._dropped
        if lost > self._dropped_told:
            lines = [_encode("events_dropped", {"count": lost - self._dropped_told}), *lines]
        try:
            # Opened for each batch: a folder that comes back (a mount, a freed quota) is used again.
            _append_lines(self._path, b"".join(lines))
        except OSError as error:
            self._last_error = error
            with self._wake:
                self._dropped += len(lines) - (1 if lost > self._dropped_told else 0)
        else:
            self._last_error = None
            self._dropped_told = lost


def _append_lines(path: Path, content: bytes) -> None:
    """Append all of ``content`` on lines of its own, or raise and leave the file as long as it was."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content  # the writer before us died in the middle of a line
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a log, oldest first. A line that a dying writer left unfinished is passed over."""
    place = Path(path)
    if not place.exists():
        return []
    events = []
    for line in place.read_bytes().splitlines():
        try:
            event = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events
