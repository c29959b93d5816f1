"""One process of the torch.distributed.rpc side: rank 0 is the server and reports, the others are workers.

Started by `benchmarks.server_peers`. As in PyTorch's example of batched updates, a push is one call that gives
gradients and returns the updated weights: when enough gradients are in, one update answers everybody who waits for it.
Asynchronous is the same with one gradient per update.
"""

import argparse
import os
import threading
from typing import Any

import torch
from torch.distributed import rpc

from benchmarks.job import Clock, Job
from benchmarks.server_peers import Course, Server, ServerPeer, Worker, read_records


class RpcServer:
    """The server's state, and the future that answers the pushes of the update under way."""

    def __init__(self, job: Job, clock: Clock, peer: ServerPeer) -> None:
        self.server = Server(job, peer)
        self.course = Course(job, clock, timeout_s=peer.timeout_s)
        self.needed = job.workers if peer.mode == "sync" else 1
        self.lean = bool(peer.lean)
        self.lock = threading.Lock()
        self.arrived: list[int] = []
        self.answer: torch.futures.Future[Any] = torch.futures.Future()

    def weights(self) -> Any:
        model = self.server.model
        return [parameter.detach() for parameter in model.parameters()] if self.lean else model


def fetch(reference: Any) -> Any:
    return reference.local_value().weights()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(reference: Any, rank: int, gradients: list[torch.Tensor]) -> "torch.futures.Future[Any]":
    """Adds a worker's gradients; the answer is the weights after the update, or None when the run is over."""
    state: RpcServer = reference.local_value()
    with state.lock:
        state.server.add(gradients)
        state.arrived.append(rank)
        answer = state.answer
        if len(state.arrived) == state.needed:
            state.server.apply()
            state.course.count(*state.arrived)
            state.arrived, state.answer = [], torch.futures.Future()
            answer.set_result(None if state.course.over else state.weights())
    return answer


def work(reference: Any, rank: int, job: Job, peer: ServerPeer) -> None:
    """A worker's whole run."""
    worker = Worker(rank, job, peer)
    weights = rpc.rpc_sync(reference.owner(), fetch, args=(reference,))
    while weights is not None:
        if peer.lean:
            for parameter, value in zip(worker.model.parameters(), weights, strict=True):
                parameter.data = value
        else:
            worker.model = weights
        weights = rpc.rpc_sync(reference.owner(), push, args=(reference, rank, worker.compute()))


def serve(job: Job, clock: Clock, peer: ServerPeer) -> None:
    state = RpcServer(job, clock, peer)
    reference = rpc.RRef(state)
    limit_s = 2 * peer.timeout_s + clock.warm_s + clock.seconds
    runs = [
        rpc.rpc_async(f"worker{rank}", work, args=(reference, rank, job, peer), timeout=limit_s)
        for rank in range(job.workers)
    ]
    torch.futures.wait_all(runs)
    state.course.report(job, state.server.marks, side="torch RPC", peer=peer)


def main() -> None:
    _, job, clock, peer = read_records(argparse.ArgumentParser(description=__doc__))
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(job.threads)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"worker{peer.rank - 1}" if peer.rank else "server",
        rank=peer.rank,
        world_size=job.workers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            rpc_timeout=peer.timeout_s, init_method=f"file://{peer.meeting_file}"
        ),
    )
    if peer.rank == 0:
        serve(job, clock, peer)
    rpc.shutdown(timeout=peer.timeout_s)


if __name__ == "__main__":
    main()
