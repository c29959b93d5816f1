"""A model that counts: after training, its weights say how often each sample had an effect.

``x`` is the identity, and the loss adds up the outputs, so sample *i* touches column *i* of the weight alone, with a
gradient of 1/batch whatever the weights are. With plain SGD at a rate of 1 and a batch that is a power of two, every
effect of a sample lowers its column by exactly 1/batch, in any order: an update that was lost, applied twice or half
stays visible to the end.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from scenes import committed
from torch import nn

import manyhands as mh

SAMPLES = 512
BATCH = 8


def counting_model(height: int = 1) -> nn.Module:
    """``height``: rows of the weight, all of which count the same; many make an update take its time."""
    model = nn.Linear(SAMPLES, height, bias=False)
    nn.init.zeros_(model.weight)
    return model


def counting_data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.eye(SAMPLES), torch.zeros(SAMPLES, 1)


def added_up(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over samples of the sum over the outputs."""
    return output.sum(dim=1).mean()


def counting_trainer(sync: object, workers: int = 3, height: int = 1, **more: object) -> mh.Trainer:
    model = counting_model(height)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    return mh.Trainer(model, loss=added_up, optimizer=plain, workers=workers, sync=sync, **more)


def worker_pids(trainer: mh.Trainer) -> list[int]:
    """Of the workers that live."""
    return [pid for name, pid in trainer.pids.items() if name.startswith("worker")]


def effects(model: nn.Module) -> set[float]:
    """How often samples had an effect: the different counts there are. ``{3.0}``: every sample three times."""
    weight = next(model.parameters()).detach()
    return set((-weight * BATCH).unique().tolist())


@dataclass
class Storm:
    """Signals random processes of a trainer, in the background, until it has done so ``most`` times."""

    trainer: mh.Trainer
    most: int
    seed: int = 0
    number: int = signal.SIGKILL
    roles: str = ""  # only those whose name begins so
    pause_s: tuple[float, float] = (0.02, 0.2)
    per_step: int | None = None  # at most so many while no step is committed: a run gives up when there are many more
    fired: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Storm:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._rage, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    @property
    def done(self) -> bool:
        return self.fired.total() >= self.most

    def _rage(self) -> None:
        chance, step, spent = random.Random(self.seed), -1, 0
        while not self.done and not self._over.is_set():
            time.sleep(chance.uniform(*self.pause_s))
            if (now := committed(self.trainer)) != step:
                step, spent = now, 0
            elif spent == self.per_step:
                continue
            pids = {name: pid for name, pid in self.trainer.pids.items() if name.startswith(self.roles)}
            if not pids:
                continue
            servers = [name for name in pids if name.startswith("server")]
            every_fourth = self.fired.total() % 4 == 3  # so that no storm passes servers by
            name = chance.choice(sorted(servers if servers and every_fourth else pids))
            try:
                os.kill(pids[name], self.number)
            except ProcessLookupError:
                continue
            self.fired[name.split("-")[0]] += 1
            spent += 1


class UntilOver(mh.Callback):
    """Ends the run at the end of the epoch in which the storm is over."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm

    def on_epoch_end(self, state: mh.State) -> None:
        if self.storm.done:
            state.stop("the storm is over")
