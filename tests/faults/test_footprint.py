"""What a run occupies: no listening port, and one copy of the data for any number of workers."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from scenes import Scene, table
from torch import nn

import manyhands as mh
from manyhands.engine import local

LISTEN = "0A"
MEGABYTE = 1 << 20


def listening(pids: list[int]) -> list[str]:
    """Addresses on which one of the processes listens, from the kernel's own tables."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTEN or name.startswith("udp")):
                found.append(f"{name} {fields[1]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        theirs = fields[7:] and fields[7].startswith("@cuda")  # opened by the driver of a GPU in every process
        if fields[6] in inodes and int(fields[3], 16) & 0x10000 and not theirs:  # accepts connections
            found.append(f"unix {fields[7:]}")
    return found


def test_a_default_run_listens_on_nothing() -> None:
    seen: list[list[str]] = []

    def look(trainer: mh.Trainer) -> None:
        zygote = local.zygote_pid()
        assert zygote is not None
        assert len(trainer.pids) == 2
        seen.append(listening([os.getpid(), zygote, *trainer.pids.values()]))

    Scene(data=table(1600)).run(2, look)
    assert seen == [[]]


def test_the_look_at_listeners_sees_one() -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local_server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        local_server.bind(f"\0manyhands-test-{os.getpid()}")
        local_server.listen()
        assert len(listening([os.getpid()])) == 2


class Sum(nn.Module):
    """Reads every byte of its input and computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x.sum(dim=1, keepdim=True) * 1e-6)
        return out


class Weigh(mh.Callback):
    """Adds up what the workers and the caller occupy; memory that several share counts once."""

    def __init__(self) -> None:
        self.trainer: mh.Trainer | None = None
        self.most = 0

    def on_epoch_end(self, state: mh.State) -> None:
        assert self.trainer is not None
        pss = [psutil.Process(pid).memory_full_info().pss for pid in (*self.trainer.pids.values(), os.getpid())]
        assert len(pss) == 5
        self.most = max(self.most, sum(pss))


def weight_of(x: np.ndarray | torch.Tensor) -> int:
    weigh = Weigh()
    weigh.trainer = mh.Trainer(Sum(), optimizer="momentum", workers=4)
    target = np.zeros(len(x), np.int64)
    weigh.trainer.fit((x, target), epochs=2, batch_size=20, run_dir=False, progress="quiet", callbacks=[weigh])
    return weigh.most


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["array", "tensor in shared memory"])
def test_four_workers_share_one_copy_of_the_data(shared: bool) -> None:
    """Of an array of the caller's they have one between them; what it has shared itself is not copied at all."""
    before = weight_of(np.full((20, MEGABYTE // 4), 0.5, np.float32))
    x = np.full((300, MEGABYTE // 4), 0.5, np.float32)
    data, nbytes, wanted = (torch.from_numpy(x).share_memory_(), x.nbytes, 1) if shared else (x, x.nbytes, 2)
    del x
    copies = (weight_of(data) - before) / nbytes
    assert wanted - 0.3 < copies < wanted + 0.3, f"a caller and four workers took {copies:.2f} copies of the data"
