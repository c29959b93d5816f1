"""Jobs small enough to be disturbed many times within seconds, and the hands that disturb them.

Everything a worker unpickles by name lives here, so that workers can import it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.core.ledger import Proof
from manyhands.train.ledger_file import read_ledger

FEATURES, CLASSES = 20, 4


def table(samples: int = 400, features: int = FEATURES) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose last column is the number of the row, so that a model can tell which samples it was given."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, features, generator=generator)
    y = x[:, :CLASSES].argmax(dim=1)
    x[:, -1] = torch.arange(samples)
    return x, y


class Mlp(nn.Module):
    """A perceptron with dropout. It does not look at the last column."""

    def __init__(self, width: int = 48, dropout: float = 0.1, features: int = FEATURES) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.body = nn.Sequential(
            nn.Linear(features - 1, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x[:, :-1])
        return out


class Cnn(nn.Module):
    """A convolution with BatchNorm over the table seen as a picture of one row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.body = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * (FEATURES - 1), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x[:, None, :-1]))
        return out


def first_time(marker: str | Path) -> bool:
    """True once for a marker, over all processes."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class At(Mlp):
    """Does something when a worker is given a certain sample: once, or ``always``."""

    def __init__(self, sample: int, act: Callable[[], None], marker: Path | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.sample, self.act, self.marker = sample, act, None if marker is None else str(marker)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, -1] == self.sample).any()) and (self.marker is None or first_time(self.marker)):
            self.act()
        return super().forward(x)


class Sluggish(Mlp):
    """Takes a millisecond longer for every row in the worker with slot 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if mh.worker_slot() == 0:
            time.sleep(0.001 * len(x))
        return super().forward(x)


def kill_self() -> None:
    """Die as ``kill -9`` makes die."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@dataclass
class Outcome:
    """What a fit left."""

    digest: str
    history: mh.History
    model: nn.Module
    trainer: mh.Trainer

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.history.events if event["event"] == name]

    def stalls(self) -> list[float]:
        return sorted(event["seconds"] for event in self.events("recovered"))


@dataclass
class Scene:
    """A fit that can be run again and again; every run of it must end in the same weights."""

    make_model: Callable[[], nn.Module] = Mlp
    optimizer: Any = "adam"
    data: tuple[torch.Tensor, torch.Tensor] = field(default_factory=table)
    epochs: int = 2
    batch_size: int = 16
    lanes: int | None = 4
    trainer: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)

    def run(
        self, workers: int | tuple[int, int], disturb: Callable[[mh.Trainer], None] | None = None, **fit: Any
    ) -> Outcome:
        """Fit. ``disturb`` runs in a thread of its own, from the first committed step on."""
        model = self.make_model()
        trainer = mh.Trainer(model, optimizer=self.optimizer, workers=workers, **self.trainer)
        options = {"run_dir": False, "progress": "quiet", "checkpoint_every_s": None, **self.fit, **fit}
        with meanwhile(trainer, disturb):
            history = trainer.fit(
                self.data, epochs=self.epochs, batch_size=self.batch_size, lanes=self.lanes, **options
            )
        return Outcome(mh.digest(model), history, model, trainer)


def committed(trainer: mh.Trainer) -> int:
    """Steps committed in the fit that is running; -1 when none is."""
    fit = trainer._fit
    return -1 if fit is None else fit.session.control.steps


@contextmanager
def meanwhile(trainer: mh.Trainer, disturb: Callable[[mh.Trainer], None] | None) -> Iterator[None]:
    """Run ``disturb(trainer)`` beside the body; its exception fails the test."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            wait_until(lambda: committed(trainer) > 0, 60)
            assert disturb is not None
            disturb(trainer)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="disturbance")
    if disturb is not None:
        thread.start()
    try:
        yield
    finally:
        if disturb is not None:
            thread.join(60)
    if errors:
        raise errors[0]


def wait_until(condition: Callable[[], Any], timeout_s: float) -> None:
    """Wait for something that must come true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not true after {timeout_s} s"
        time.sleep(0.0005)


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False when the process was gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Killer:
    """Kills a random worker at random steps between ``first`` and ``last``."""

    kills: int
    first: int
    last: int
    seed: int = 0
    fired: int = 0

    def __call__(self, trainer: mh.Trainer) -> None:
        dice = random.Random(self.seed)
        for step in sorted(dice.randint(self.first, self.last) for _ in range(self.kills)):
            wait_until(lambda due=step: committed(trainer) >= due or committed(trainer) < 0, 60)
            time.sleep(dice.random() * 0.004)  # anywhere in the step
            wait_until(lambda: self._strike(trainer, dice) or committed(trainer) < 0, 10)

    def _strike(self, trainer: mh.Trainer, dice: random.Random) -> bool:
        """Kill one that lives; False when the one that was chosen was gone already."""
        pids = list(trainer.pids.values())
        struck = bool(pids) and send(dice.choice(pids), signal.SIGKILL)
        self.fired += struck
        return struck


def proof(run_dir: str | Path) -> Proof:
    """What the ledger of a run shows."""
    return read_ledger(Path(run_dir) / "ledger").verify()


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of the sorted values do not exceed."""
    return values[min(int(share * len(values)), len(values) - 1)]
