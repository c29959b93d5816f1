"""TensorFlow's ParameterServerStrategy as a side: a coordinator that reports, one parameter server, and the workers.

Started by `benchmarks.server_peers`. As in TensorFlow's guide, the coordinator schedules closures on whichever worker
is free; each makes one asynchronous update (`--lean=1`: ten of them, so that scheduling costs a tenth). The variables
and Adam's state live on the server, and `ResourceApplyAdam`, TensorFlow's own fused kernel, runs there. The servers of
TensorFlow choose the interfaces that they listen on themselves.
"""

import argparse
import json
import os
import sys
import threading
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import tensorflow as tf

from benchmarks.job import Clock, Job, Mark, now, report
from benchmarks.models import FEATURES, build, make_data
from benchmarks.server_peers import ServerPeer, read_records

UPDATES_PER_CLOSURE = 10
SAMPLE_S = 0.05
RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8


def cluster(peer: ServerPeer) -> Any:
    ports = json.loads(peer.meeting_file)
    hosts = [f"127.0.0.1:{port}" for port in ports]
    return tf.train.ClusterSpec({"ps": hosts[:1], "worker": hosts[1:]})


def serve(job: Job, peer: ServerPeer) -> None:
    """The parameter server (rank 1) or a worker: does what it is told until it is killed."""
    role, index = ("ps", 0) if peer.rank == 1 else ("worker", peer.rank - 2)
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=job.threads, inter_op_parallelism_threads=2)
    tf.distribute.Server(cluster(peer), job_name=role, task_index=index, protocol="grpc", config=config).join()


class Net:
    """The perceptron of `benchmarks.models` with Adam, as variables on the server."""

    def __init__(self, model: str) -> None:
        layers = [parameter.detach().numpy() for parameter in build(model).parameters()]
        self.weights = [tf.Variable(value.T if value.ndim == 2 else value) for value in layers]
        self.averages = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.squares = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.powers = [tf.Variable(1.0), tf.Variable(1.0)]
        self.updates = tf.Variable(0, dtype=tf.int64)

    def update(self, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            hidden, count = x, len(self.weights)
            for at in range(0, count, 2):
                hidden = hidden @ self.weights[at] + self.weights[at + 1]
                hidden = tf.nn.relu(hidden) if at + 2 < count else hidden
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=hidden))
        gradients = tape.gradient(loss, self.weights)
        powers = [self.powers[0].assign(self.powers[0] * BETA1), self.powers[1].assign(self.powers[1] * BETA2)]
        for weight, average, square, gradient in zip(self.weights, self.averages, self.squares, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle, m=average.handle, v=square.handle, beta1_power=powers[0], beta2_power=powers[1],
                lr=RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, grad=gradient,
            )  # fmt: skip
        self.updates.assign_add(1)


def coordinate(job: Job, clock: Clock, peer: ServerPeer) -> None:
    """Schedules closures until the time is over, and counts the updates on the server meanwhile."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster(peer), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        net = Net(job.model)

    def data() -> Any:
        x, y = make_data(job.rows)
        rows = tf.data.Dataset.from_tensor_slices((x.numpy().reshape(-1, FEATURES), y.numpy())).cache()
        return rows.shuffle(job.rows).repeat().batch(job.batch_size, drop_remainder=True).prefetch(4)

    stream = iter(coordinator.create_per_worker_dataset(data))
    updates = UPDATES_PER_CLOSURE if peer.lean else 1

    @tf.function
    def closure(batches: Any) -> None:
        for _ in range(updates):
            strategy.run(net.update, args=next(batches))

    marks: list[Mark] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            marks.append((now(), int(net.updates.numpy())))

    for _ in range(4 * job.workers):  # every worker traces the closure once
        coordinator.schedule(closure, args=(stream,))
    coordinator.join()
    watcher = threading.Thread(target=watch)
    watcher.start()
    deadline = now() + clock.warm_s + clock.seconds
    while now() < deadline:
        coordinator.schedule(closure, args=(stream,))
    over.set()
    watcher.join()
    report(job, clock, marks, first_step_time=marks[0][0], side="TensorFlow", mode=peer.mode, lean=bool(peer.lean))
    sys.stdout.flush()
    os._exit(0)  # closures that are still queued are of no interest


def main() -> None:
    _, job, clock, peer = read_records(argparse.ArgumentParser(description=__doc__))
    if peer.rank == 0:
        coordinate(job, clock, peer)
    else:
        serve(job, peer)


if __name__ == "__main__":
    main()
