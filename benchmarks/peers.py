"""The tools manyhands is measured against: the bare PyTorch loop, and DistributedDataParallel over gloo.

    python -m benchmarks.peers bare --model mlp --threads 2
    python -m benchmarks.peers ddp --model mlp --workers 2 [--launcher spawn]

Both get their best sensible settings: data already in memory as tensors, fused Adam, gradients as views of the
buckets, a static graph, no loss read back. DDP has one process per worker on the loopback interface; the
ranks meet through a file, so nothing listens on other interfaces. Launchers: "direct" starts all ranks at once from a
process without torch (the fastest way there is), "spawn" is torch.multiprocessing.spawn (what a plain script does).
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.job import Clock, Job, Mark, add_options, as_options, now, read_options, report

if TYPE_CHECKING:  # a launcher must not pay for torch
    from torch import Tensor, nn

CALIBRATION_STEPS = 20
GROUP_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Options of the peers alone."""

    launcher: str = "direct"
    fused: int = 1
    timeout_s: float = 300.0
    rank: int = -1  # internal: this process is that rank
    meeting_file: str = ""  # internal: where the ranks find each other


def batches(x: "Tensor", y: "Tensor", *, batch_size: int, rank: int, ranks: int) -> "Iterator[tuple[Tensor, Tensor]]":
    """This rank's share of every global batch, epoch after epoch, each epoch in a new seeded order."""
    import torch

    share = batch_size // ranks
    epoch = 0
    while True:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(x) - batch_size + 1, batch_size):
            index = order[start + rank * share : start + (rank + 1) * share]
            yield x.index_select(0, index), y.index_select(0, index)
        epoch += 1


def train(
    model: "nn.Module",
    stream: "Iterator[tuple[Tensor, Tensor]]",
    clock: Clock,
    *,
    fused: bool,
    agree: Callable[[int], int],
) -> list[Mark]:
    """Plain training until the clock's steps or seconds are over; `agree` gives all ranks the first one's count."""
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    marks: list[Mark] = []
    # Time becomes steps twice: cold steps size the warm-up, warm steps size the measured part.
    phases = [] if clock.steps else [clock.seconds, clock.warm_s]
    last = clock.steps or CALIBRATION_STEPS
    half = last // 2
    for step, (inputs, target) in enumerate(stream, start=1):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        marks.append((now(), step))
        if step == last and not phases:
            break
        if step == last:
            per_step_s = (marks[-1][0] - marks[half - 1][0]) / (step - half)
            half = step
            last = step + agree(max(1, round(phases.pop() / per_step_s)))
    return marks


def memory_tensors(job: Job) -> "tuple[Tensor, Tensor]":
    import torch

    from benchmarks.models import make_data

    x, y = make_data(job.rows, storage=job.storage)
    return (x if isinstance(x, torch.Tensor) else torch.from_numpy(x)), y


def run_bare(job: Job, clock: Clock, peer: Peer) -> None:
    import torch

    from benchmarks.models import build

    torch.set_num_threads(job.threads)
    x, y = memory_tensors(job)
    stream = batches(x, y, batch_size=job.batch_size, rank=0, ranks=1)
    marks = train(build(job.model), stream, clock, fused=bool(peer.fused), agree=lambda steps: steps)
    report(job, clock, marks, first_step_time=marks[0][0], side="bare loop", fused=bool(peer.fused))


def run_rank(rank: int, job: Job, clock: Clock, peer: Peer) -> None:
    """One rank of DDP; rank 0 reports."""
    import torch
    import torch.distributed as dist

    from benchmarks.models import build

    torch.set_num_threads(job.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(peer.meeting_file, job.workers)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=job.workers, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    model = torch.nn.parallel.DistributedDataParallel(
        build(job.model, slow_slot=job.slow_slot, own_slot=lambda: rank),
        gradient_as_bucket_view=True,
        static_graph=True,
    )

    def agree(steps: int) -> int:
        count = torch.tensor(steps)
        dist.broadcast(count, src=0)
        return int(count)

    x, y = memory_tensors(job)
    stream = batches(x, y, batch_size=job.batch_size, rank=rank, ranks=job.workers)
    marks = train(model, stream, clock, fused=bool(peer.fused), agree=agree)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        report(job, clock, marks, first_step_time=marks[0][0], side=f"DDP ({peer.launcher})", fused=bool(peer.fused))


def launch_direct(job: Job, clock: Clock, peer: Peer) -> int:
    """Starts all ranks at once."""
    options = ["ddp", *as_options(job), *as_options(clock)]
    ranks = [as_options(dataclasses.replace(peer, rank=rank)) for rank in range(job.workers)]
    return run_together("benchmarks.peers", [[*options, *rank] for rank in ranks], timeout_s=peer.timeout_s)


def run_together(module: str, processes: Sequence[Sequence[str]], *, timeout_s: float) -> int:
    """Runs the module once per list of options, all at once; if one fails, or time runs out, none is left."""
    started = [subprocess.Popen([sys.executable, "-m", module, *options]) for options in processes]
    deadline = now() + timeout_s
    try:
        codes = (process.wait(timeout=max(0.1, deadline - now())) for process in started)
        return next((abs(code) for code in codes if code), 0)
    finally:
        for process in started:
            process.kill()
            process.wait()


def launch_spawn(job: Job, clock: Clock, peer: Peer) -> int:
    from torch.multiprocessing.spawn import spawn

    spawn(run_rank, args=(job, clock, peer), nprocs=job.workers)  # type: ignore[no-untyped-call]
    return 0


def run_ddp(job: Job, clock: Clock, peer: Peer) -> int:
    if job.batch_size % job.workers:
        raise ValueError(f"batch size {job.batch_size} over {job.workers} DDP workers; it must divide evenly")
    launchers = {"direct": launch_direct, "spawn": launch_spawn}
    if peer.launcher not in launchers:
        raise ValueError(f"unknown launcher {peer.launcher!r}; valid: {', '.join(launchers)}")
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    with tempfile.TemporaryDirectory(prefix="benchmark-ddp-") as folder:
        ready = dataclasses.replace(peer, meeting_file=str(Path(folder) / "meeting"))
        return launchers[peer.launcher](job, dataclasses.replace(clock, started=clock.start_time()), ready)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["bare", "ddp"])
    for record in (Job, Clock, Peer):
        add_options(parser, record)
    namespace = parser.parse_args()
    job, clock, peer = read_options(namespace, Job), read_options(namespace, Clock), read_options(namespace, Peer)
    if namespace.kind == "bare":
        run_bare(job, clock, peer)
        return 0
    if peer.rank >= 0:
        run_rank(peer.rank, job, clock, peer)
        return 0
    return run_ddp(job, clock, peer)


if __name__ == "__main__":
    sys.exit(main())
