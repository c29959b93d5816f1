"""Samples per second of manyhands with a parameter server against those of Ray, torch RPC and TensorFlow.

    python -m benchmarks.vs_servers --pairs 5 --models mlp,wide --workers 2 --seconds 6

For each model every side runs once per round. Asynchronous sides make an update from every batch of one worker,
synchronous ones from a batch that the workers share. An asynchronous update has the rows that one worker has in a
global batch of 128, a synchronous one all of them. `server` is also measured against our own `allreduce`. Each peer is
measured twice: as its example does it with torch.optim.Adam as it comes, and tuned, with fused Adam (which is what
manyhands takes by itself) and, where that is faster, weights as bare arrays; TensorFlow's strategy, which has no
synchronous mode, tuned with ten updates in each closure. Ray comes with the extra `bench`; a peer that is not installed
is named under the table. Asynchronous workers of ours join in one after the other, so the first seconds of every side
are not measured.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version

from benchmarks.measure import Result, Side, footnote, ours, run_rounds
from benchmarks.table import markdown, write_block
from benchmarks.vs_ddp import rates, row

TUNED = ", tuned"
OURS = {"async": "async", "server": "sync", "allreduce": None}  # our word for sync: the mode of the peers it meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A parameter server of somebody else: a side of `benchmarks.server_peers`."""

    title: str
    package: str  # what must be installed
    options: tuple[str, ...]
    modes: tuple[str, ...] = ("async", "sync")

    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


PEERS = (
    Peer(title="Ray", package="ray", options=("ray", "--fused=0")),
    Peer(title=f"Ray{TUNED}", package="ray", options=("ray", "--fused=1", "--lean=1")),
    Peer(title="torch RPC", package="torch", options=("rpc", "--fused=0")),
    Peer(title=f"torch RPC{TUNED}", package="torch", options=("rpc", "--fused=1")),
    Peer(title="TensorFlow", package="tensorflow", options=("tensorflow",), modes=("async",)),
    Peer(title=f"TensorFlow{TUNED}", package="tensorflow", options=("tensorflow", "--lean=1"), modes=("async",)),
)


def make_sides(model: str, workers: int, times: Sequence[str], rows: int) -> dict[tuple[str, str], Side]:
    """Sides by (whose, mode), in the order in which they run: peers directly after ours of the same mode."""
    options = (f"--model={model}", f"--workers={workers}", *times, "--threads=1")
    sides = {}
    for word, mode in OURS.items():
        trainer, size = f"--trainer={json.dumps({'sync': word})}", rows // workers if mode == "async" else rows
        sides["ours", word] = ours(f"{word}, {workers} × 1", *options, f"--batch-size={size}", trainer)
        for peer in PEERS:
            if mode in peer.modes and peer.installed():
                sides[peer.title, mode] = Side(
                    name=f"{peer.title}, {mode}, {workers} × 1",
                    module="benchmarks.server_peers",
                    options=(*peer.options, *options, f"--mode={mode}", f"--rows-per-update={size}"),
                )
    return sides


def compare(sides: dict[tuple[str, str], Side], results: dict[str, list[Result]]) -> list[list[str]]:
    """Ours against the peers in its mode, `async` also against the best of them as they come and of the tuned ones;
    `server` against `allreduce`."""
    measured = {key: rates(results[side.name]) for key, side in sides.items()}

    def against(word: str, other: tuple[str, str], prefix: str = "") -> list[str]:
        mine = ("ours", word)
        return row(sides[mine].name, measured[mine], prefix + sides[other].name, measured[other])

    rows = []
    for word, mode in OURS.items():
        peers = [key for key in sides if key[0] != "ours" and key[1] == mode]
        rows += [against(word, key) for key in peers]
        for tuned in (False, True) if word == "async" else ():
            alike = [key for key in peers if key[0].endswith(TUNED) == tuned]
            best = max(alike, key=lambda key: statistics.median(measured[key]))
            rows.append(against(word, best, "best of the asynchronous: "))
    return [*rows, against("server", ("ours", "allreduce"), "manyhands, ")]


def installed_note() -> str:
    missing = sorted({peer.package for peer in PEERS if not peer.installed()})
    names = {peer.package: packages_distributions()[peer.package][0] for peer in PEERS if peer.installed()}
    versions = sorted(f"{package} {version(name)}" for package, name in names.items())
    note = f"Peers: {', '.join(versions)}."
    return f"\n\n{note} Not installed, so not measured: {', '.join(missing)}." if missing else f"\n\n{note}"


def measure(model: str, workers: list[int], rounds: int, times: Sequence[str], rows: int) -> str:
    by_count = [make_sides(model, count, times, rows) for count in workers]
    results = run_rounds([side for sides in by_count for side in sides.values()], rounds)
    headers = ["manyhands, workers × threads", "samples/s", "against", "its samples/s", "ratio"]
    lines = [line for sides in by_count for line in compare(sides, results)]
    return markdown(headers, lines) + installed_note() + footnote(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", default="mlp,wide")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--warm-s", type=float, default=6.0)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together")
    options = parser.parse_args()
    workers = [int(count) for count in options.workers.split(",")]
    times = (f"--seconds={options.seconds}", f"--warm-s={options.warm_s}")
    for model in options.models.split(","):
        body = measure(model, workers, options.pairs, times, options.batch_size)
        write_block(f"vs_servers {model}", body, module="vs_servers")


if __name__ == "__main__":
    main()
