"""Small training jobs that the tests of this folder share, and the plain PyTorch loop they are compared with."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

import manyhands as mh
from manyhands.core.order import epoch_order
from manyhands.engine import local

ROWS, FEATURES, CLASSES = 90, 6, 3
_generator = torch.Generator().manual_seed(7)
X = torch.randn(ROWS, FEATURES, generator=_generator)
Y = (X[:, :CLASSES] + 0.3 * torch.randn(ROWS, CLASSES, generator=_generator)).argmax(1)

QUIET: dict[str, Any] = {"run_dir": False, "progress": "quiet", "batch_size": 16}


def mlp(dropout: float = 0.0) -> nn.Sequential:
    """The same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, CLASSES))


def train(
    model: nn.Module | None = None, data: Any = (X, Y), *, fit: dict[str, Any] | None = None, **options: Any
) -> tuple[mh.Trainer, mh.History]:
    """Fit quietly and without a run folder, unless ``fit`` says otherwise; ``options`` are the Trainer's."""
    trainer = mh.Trainer(mlp() if model is None else model, **({"workers": 2} | options))
    return trainer, trainer.fit(data, **(QUIET | (fit or {})))


def digest_of(*arguments: Any, **options: Any) -> str:
    """The fingerprint of the weights that ``train`` ends with."""
    return mh.digest(train(*arguments, **options)[0].model)


def memory_files() -> int:
    """Descriptors of anonymous memory that this process holds, without those that wait for the garbage collector."""
    gc.collect()
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(entry.readlink()).startswith("/memfd:")
    return count


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As many threads as a worker has: with more, a kernel may add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 1,
    batch_size: int = 16,
    seed: int = 0,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    after_epoch: Callable[[], object] = lambda: None,
) -> list[float]:
    """What a fit of ``X`` and ``Y`` computes, in one process; the mean loss of each epoch."""
    losses = []
    with one_thread():
        for epoch in range(epochs):
            order, total = torch.from_numpy(epoch_order(seed, epoch, ROWS)), 0.0
            for rows in order.split(batch_size):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(X[rows]), Y[rows])
                loss.backward()
                before_step()
                optimizer.step()
                after_step()
                total += float(loss.detach()) * len(rows)
            losses.append(total / ROWS)
            after_epoch()
    return losses


def worker_processes() -> list[int]:
    """The workers that run now: the children of the zygote, without those that are dead and not yet collected."""
    pid = local.zygote_pid()
    if pid is None:
        return []
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child.pid)
    return found
