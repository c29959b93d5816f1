"""The parameter servers that manyhands is measured against: Ray actors, torch.distributed.rpc, and TensorFlow.

    python -m benchmarks.server_peers ray --mode async --model mlp --workers 2
    python -m benchmarks.server_peers rpc --mode sync --model wide --workers 2
    python -m benchmarks.server_peers tensorflow --mode async --model mlp --workers 2

One server process holds the model and Adam; workers get its weights and give gradients. Asynchronous: every update
comes from one worker's batch. Synchronous: the workers share the batch of every update. Both follow the tool's own
example of a parameter server, without what it does beside training (evaluation, prints); `--lean=1` carries and copies
less than the example does. One thread per process, data in memory as tensors, fused Adam, everything on the loopback
interface. Steps in the report are updates of the server. TensorFlow's strategy is asynchronous only.
"""

import argparse
import dataclasses
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.job import Clock, Job, Mark, add_options, as_options, now, read_options, report
from benchmarks.peers import batches, memory_tensors, run_together

if TYPE_CHECKING:  # a launcher must not pay for torch
    from torch import Tensor

SETTLE_EVERY = 10  # Ray's example waits for its weights so often; in between, updates are queued
MODES = ("async", "sync")
SHUTDOWN_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerPeer:
    """Options of the parameter servers alone."""

    mode: str = "async"
    rows_per_update: int = 128  # takes the place of --batch-size
    lean: int = 0  # 1: weights travel as bare arrays that are used in place, not as a state_dict (Ray) or module (rpc)
    fused: int = 1
    timeout_s: float = 120.0  # of every single wait, and until all workers have delivered
    rank: int = -1  # internal (rpc, TensorFlow): which of the processes this is
    meeting_file: str = ""  # internal: where the ranks find each other (rpc), or their ports (TensorFlow)

    def check(self, job: Job) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}; valid: {', '.join(MODES)}")
        if job.slow_slot >= 0:
            raise ValueError(f"slow slot {job.slow_slot}; parameter servers have no slow worker, leave the option out")
        if self.mode == "sync" and self.rows_per_update % job.workers:
            raise ValueError(f"{self.rows_per_update} rows per update over {job.workers} workers must divide evenly")
        if job.rows < self.rows_per_update * job.workers:
            raise ValueError(
                f"{job.rows} rows are too few for {job.workers} workers with {self.rows_per_update} rows per update;"
                f" give at least {self.rows_per_update * job.workers}"
            )


class Course:
    """Counts updates: says when the run is over, and from which update on all workers take part."""

    def __init__(self, job: Job, clock: Clock, *, timeout_s: float) -> None:
        self.clock = clock
        self.missing = set(range(job.workers))
        self.updates = 0
        self.complete_at = 0
        self.deadline = now() + timeout_s

    def count(self, *workers: int) -> None:
        """One more update, made of these workers' gradients."""
        self.updates += 1
        self.missing.difference_update(workers)
        if not self.missing and not self.complete_at:
            self.complete_at = self.updates
            self.deadline = math.inf if self.clock.steps else now() + self.clock.warm_s + self.clock.seconds

    @property
    def over(self) -> bool:
        return now() >= self.deadline or (self.clock.steps > 0 and self.updates >= self.clock.steps)

    def report(self, job: Job, marks: Sequence[Mark], *, side: str, peer: ServerPeer) -> None:
        if self.missing:
            raise TimeoutError(f"no gradient from workers {sorted(self.missing)} in {self.updates} updates")
        steady = marks[self.complete_at - 1 :]  # a worker that starts late must not count as a slow one
        more = {"mode": peer.mode, "fused": bool(peer.fused), "lean": bool(peer.lean)}
        report(job, self.clock, steady, first_step_time=marks[0][0], side=side, **more)


class Server:
    """The model and its optimizer: adds gradients up and applies the sum."""

    def __init__(self, job: Job, peer: ServerPeer) -> None:
        import torch

        from benchmarks.models import build

        torch.set_num_threads(job.threads)
        self.model = build(job.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=bool(peer.fused))
        self.marks: list[Mark] = []

    def add(self, gradients: "Sequence[Tensor]") -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.marks.append((now(), len(self.marks) + 1))


class Worker:
    """A copy of the model and a share of the data: weights in, gradients out."""

    def __init__(self, rank: int, job: Job, peer: ServerPeer) -> None:
        import torch

        from benchmarks.models import build

        torch.set_num_threads(job.threads)
        self.model = build(job.model)
        together = peer.mode == "sync"
        round_size = job.batch_size if together else job.batch_size * job.workers
        self.stream = batches(*memory_tensors(job), batch_size=round_size, rank=rank, ranks=job.workers)
        self.weight = 1 / job.workers if together else 1.0  # so that the server need only add

    def compute(self) -> "list[Tensor]":
        from torch.nn.functional import cross_entropy

        inputs, target = next(self.stream)
        self.model.zero_grad()
        (cross_entropy(self.model(inputs), target) * self.weight).backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


class RayServer:
    """The server actor."""

    def __init__(self, job: Job, peer: ServerPeer) -> None:
        self.server, self.lean = Server(job, peer), bool(peer.lean)

    def apply_gradients(self, *gradients: Any) -> Any:
        import numpy as np
        import torch

        if self.lean:
            for one in gradients:
                self.server.add([torch.from_numpy(gradient) for gradient in one])
        else:
            sums = [np.stack(same).sum(axis=0) for same in zip(*gradients, strict=True)]
            self.server.add([torch.from_numpy(total) for total in sums])
        self.server.apply()
        return self.get_weights()

    def get_weights(self) -> Any:
        if self.lean:
            return [parameter.detach().numpy() for parameter in self.server.model.parameters()]
        return self.server.model.state_dict()

    def get_marks(self) -> list[Mark]:
        return self.server.marks


class RayWorker:
    """A worker actor."""

    def __init__(self, rank: int, job: Job, peer: ServerPeer) -> None:
        self.worker, self.lean = Worker(rank, job, peer), bool(peer.lean)

    def compute_gradients(self, weights: Any) -> Any:
        import torch

        if self.lean:
            for parameter, value in zip(self.worker.model.parameters(), weights, strict=True):
                parameter.data = torch.from_numpy(value)
        else:
            self.worker.model.load_state_dict(weights)
        return [gradient.numpy() for gradient in self.worker.compute()]


def drive_ray(job: Job, clock: Clock, peer: ServerPeer) -> None:
    """Ray's example: the driver moves references from worker to server and back, never the tensors themselves."""
    import ray

    def wait(references: list[Any]) -> Any:
        ready, _ = ray.wait(references, timeout=peer.timeout_s)
        if not ready:
            raise TimeoutError(f"Ray finished nothing in {peer.timeout_s:g} s")
        return ready[0]

    server = ray.remote(RayServer).remote(job, peer)
    workers = [ray.remote(RayWorker).remote(rank, job, peer) for rank in range(job.workers)]
    course = Course(job, clock, timeout_s=peer.timeout_s)
    weights = server.get_weights.remote()
    if peer.mode == "sync":
        while not course.over:
            weights = server.apply_gradients.remote(*[worker.compute_gradients.remote(weights) for worker in workers])
            if course.updates % SETTLE_EVERY == 0:
                wait([weights])
            course.count(*range(job.workers))
        last = [weights]
    else:
        gradients = {worker.compute_gradients.remote(weights): rank for rank, worker in enumerate(workers)}
        while not course.over:
            ready = wait(list(gradients))
            rank = gradients.pop(ready)
            weights = server.apply_gradients.remote(ready)
            gradients[workers[rank].compute_gradients.remote(weights)] = rank
            course.count(rank)
        last = list(gradients)
    ray.get(last, timeout=peer.timeout_s)  # whatever failed on the way is raised here
    marks = ray.get(server.get_marks.remote(), timeout=peer.timeout_s)
    course.report(job, marks, side="Ray", peer=peer)


def run_ray(job: Job, clock: Clock, peer: ServerPeer, folder: str) -> int:
    token = Path(folder) / "token"  # without one of its own, Ray would write one into the user's home
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # despite its name: stay on the loopback interface
    os.environ["SPT_NOENV"] = "1"  # a process that renames itself keeps its environment, by which it is found
    import ray

    ray.init(
        address="local",
        num_cpus=job.workers + 1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**30,
        _temp_dir=folder,
    )
    try:
        drive_ray(job, clock, peer)
    finally:
        processes = psutil.Process().children(recursive=True)
        ray.shutdown()
        psutil.wait_procs(processes, timeout=SHUTDOWN_S)  # shutdown does not wait for the actors
    return 0


def run_rpc(job: Job, clock: Clock, peer: ServerPeer, folder: str) -> int:
    ready = dataclasses.replace(peer, meeting_file=str(Path(folder) / "meeting"))
    options = [*as_options(job), *as_options(clock)]
    ranks = [as_options(dataclasses.replace(ready, rank=rank)) for rank in range(job.workers + 1)]
    limit_s = 3 * peer.timeout_s + clock.warm_s + clock.seconds
    return run_together("benchmarks.server_rpc", [[*options, *rank] for rank in ranks], timeout_s=limit_s)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_tensorflow(job: Job, clock: Clock, peer: ServerPeer, folder: str) -> int:
    """The coordinator ends by itself; server and workers serve until they are killed."""
    if peer.mode != "async":
        raise ValueError(f"mode {peer.mode!r}; TensorFlow's ParameterServerStrategy has only 'async'")
    ready = dataclasses.replace(peer, meeting_file=json.dumps(free_ports(job.workers + 1)))
    command = [sys.executable, "-m", "benchmarks.server_tf", *as_options(job), *as_options(clock)]
    ranks = [as_options(dataclasses.replace(ready, rank=rank)) for rank in range(job.workers + 2)]
    started = [subprocess.Popen([*command, *rank]) for rank in ranks]
    try:
        return started[0].wait(timeout=peer.timeout_s + clock.warm_s + clock.seconds)
    finally:
        for process in started:
            process.kill()
            process.wait()


def read_records(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Job, Clock, ServerPeer]:
    """The command line as the records that both sides and their processes share."""
    for record in (Job, Clock, ServerPeer):
        add_options(parser, record)
    namespace = parser.parse_args()
    peer, clock = read_options(namespace, ServerPeer), read_options(namespace, Clock)
    job = dataclasses.replace(read_options(namespace, Job), batch_size=peer.rows_per_update)
    return namespace, job, dataclasses.replace(clock, started=clock.start_time()), peer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = {"ray": run_ray, "rpc": run_rpc, "tensorflow": run_tensorflow}
    parser.add_argument("kind", choices=list(sides))
    namespace, job, clock, peer = read_records(parser)
    peer.check(job)
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
        return sides[namespace.kind](job, clock, peer, folder)


if __name__ == "__main__":
    sys.exit(main())
