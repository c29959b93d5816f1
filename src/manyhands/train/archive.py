"""What a fit leaves on disk: checkpoints, the ledger, the event log and run.json. Without a folder, nothing.

Trouble with the disk is told, never raised: training goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyhands.core.ledger import Ledger
from manyhands.errors import ManyhandsError, UsageError
from manyhands.observe.events import EventLog
from manyhands.train.checkpoint import BackgroundSaver, CheckpointStore
from manyhands.train.ledger_file import LedgerFile
from manyhands.train.run_folder import RunFolder

__all__ = ["Archive", "Saving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """When checkpoints are written. None turns a rule off; with neither, nothing is saved at the end either."""

    every_s: float | None = 60.0
    every_steps: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        seconds, steps = self.every_s, self.every_steps
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds <= 0):
            raise UsageError(f"checkpoint_every_s received {seconds!r}; valid is a number above 0, or None")
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise UsageError(f"checkpoint_every_steps received {steps!r}; valid is an integer of at least 1, or None")

    @property
    def on(self) -> bool:
        return self.every_s is not None or self.every_steps is not None


def _ignore(event: str, fields: dict[str, Any]) -> None:
    """Nobody listens any more."""


class Archive:
    """The files of one run."""

    def __init__(
        self,
        folder: RunFolder | None,
        saving: Saving,
        *,
        events: bool,
        on_event: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.folder, self._saving, self._on_event = folder, saving, on_event
        self.ledger = Ledger()
        self._saver: BackgroundSaver | None = None
        self._saved_step: int | None = None
        self._log: EventLog | None = None
        self._ledger_file: LedgerFile | None = None
        self._last_save_s, self._last_save_step = time.monotonic(), 0
        if folder is not None:
            store = CheckpointStore(folder.checkpoints, keep=saving.keep)
            self._ledger_file = LedgerFile(folder.ledger)
            self.ledger = self._ledger_file.load()
            self._saver = BackgroundSaver(store, on_error=self._tell, on_saved=self._saved)
            self._log = EventLog(folder.events) if events else None

    @property
    def last_saved_step(self) -> int | None:
        """The newest step that this fit has put on disk."""
        return self._saved_step if self._saver is None else self._saver.last_saved_step

    def go_to(self, step: int) -> None:
        """The run goes on at ``step``: what the ledger has of later steps does not count."""
        self._last_save_step = step
        if self.ledger.next_step:
            self.ledger.rollback(step)

    def emit(self, event: str, **fields: Any) -> None:
        """Log an event."""
        if self._log is not None:
            self._log.emit(event, **fields)

    def due(self, steps: int) -> bool:
        """Whether a checkpoint should be written now."""
        if self._saver is None or steps <= self._last_save_step:
            return False
        by_time = self._saving.every_s is not None and time.monotonic() - self._last_save_s >= self._saving.every_s
        return by_time or steps >= self.next_due

    @property
    def next_due(self) -> int:
        """The step at which a checkpoint should be written, where they are counted by steps; else never."""
        if self._saver is None or self._saving.every_steps is None:
            return sys.maxsize
        return self._last_save_step + self._saving.every_steps

    def wants_last(self, steps: int) -> bool:
        """Whether the end of a run should be saved."""
        return self._saver is not None and self._saving.on and steps > self._last_save_step

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Write a checkpoint in the background; the ledger is on disk before it."""
        if self._saver is None:
            return
        self._last_save_s, self._last_save_step = time.monotonic(), step
        if self._flush():
            self._saver.submit(step, tensors, meta)

    def _flush(self) -> bool:
        try:
            if self._ledger_file is not None:
                self._ledger_file.flush(self.ledger)
        except ManyhandsError as error:
            self._tell(error)
            return False
        return True

    def _tell(self, error: BaseException) -> None:
        self._on_event("checkpoint_failed", {"text": str(error)})

    def _saved(self, step: int, path: Path, seconds: float) -> None:
        self.emit("checkpoint", step=step, path=str(path), seconds=round(seconds, 3))

    def finish(self, timeout_s: float = 600.0) -> None:
        """Wait until everything that was asked for is on disk."""
        if self._saver is not None:
            self._saver.wait(timeout_s)
        self._flush()

    def write_run(self, values: Mapping[str, Any]) -> None:
        """Write run.json."""
        if self.folder is not None:
            try:
                self.folder.write_json("run.json", dict(values))
            except ManyhandsError as error:
                self._tell(error)

    def close(self) -> None:
        """End the threads, and let go of the fit."""
        if self._saver is not None:
            self._saver.close()
            self._saved_step, self._saver = self._saver.last_saved_step, None
        self._on_event = _ignore
        if self._log is not None:
            self._log.close()
