"""What codecs save and what they cost in accuracy: the MNIST CNN on two workers with one lane each.

    MANYHANDS_MNIST=FOLDER python -m benchmarks.codecs --seeds 3

Every seed gives the initial weights and the order of the data, the same for all ways of agreeing. Bytes are those that
workers send to each other and receive: frames of gradients (or of changes, where lanes make steps of their own) to
whoever adds them up, and frames of the sums back. ``--judge validation`` trains on all training images but the last
10,000 and tests on those: settings are chosen so, with seed 0, which is not in the table.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import manyhands as mh
from benchmarks.table import Spread, markdown, write_block
from manyhands.recipes import get, with_settings

WORKERS = 2
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adam-slow": partial(torch.optim.Adam, lr=1e-3),
}
TITLES = {"sgd": "SGD, momentum 0.9", "adam": "Adam, rate 0.01", "adam-slow": "Adam, rate 0.001"}
WAYS: dict[str, Any] = {
    "fp32": mh.AllReduce(codec="fp32"),
    "int8": mh.AllReduce(codec="int8"),
    "topk": mh.AllReduce(codec="topk"),
    "local topk": mh.Local(every=16, codec="topk:0.2"),
}
HELD_OUT = 10_000


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    accuracy: float
    sent: float
    received: float

    @property
    def moved(self) -> float:
        return self.sent + self.received


def split(data: Any, judge: str) -> tuple[Any, Any]:
    """What is trained on, and what the accuracy is taken of."""
    if judge == "test":
        return data.train, data.test
    x, y = (torch.cat(pair) for pair in zip(data.train, data.validation, strict=True))
    return (x[:-HELD_OUT], y[:-HELD_OUT]), (x[-HELD_OUT:], y[-HELD_OUT:])


def train(recipe: Any, data: tuple[Any, Any], optimizer: str, way: str, seed: int, epochs: int) -> Result:
    torch.manual_seed(seed)
    trainer = mh.Trainer(
        recipe.model(),
        loss=recipe.loss,
        optimizer=OPTIMIZERS[optimizer],
        metrics=["accuracy"],
        workers=WORKERS,
        sync=WAYS[way],
        schedule="cosine",
        seed=seed,
        limits=mh.Limits(balance_s=0),  # lanes that move between workers would make their bytes uneven
    )
    begun = time.monotonic()
    history = trainer.fit(
        data[0], epochs=epochs, batch_size=recipe.batch_size, lanes=WORKERS, run_dir=False, progress="quiet"
    )
    result = Result(
        100 * trainer.evaluate(data[1])["accuracy"],
        history.bytes["sent"] / history.bytes["samples"],
        history.bytes["received"] / history.bytes["samples"],
    )
    said = f"{optimizer} · {way} · seed {seed}: {result.accuracy:.2f} % in {time.monotonic() - begun:.0f} s"
    print(said, file=sys.stderr, flush=True)
    return result


def row(optimizer: str, way: str, results: list[Result], plain: list[Result]) -> list[str]:
    """A line of the table; ``plain`` are the results of fp32."""
    accuracy, base = (Spread.of([result.accuracy for result in these]) for these in (results, plain))
    moved, base_moved = (statistics.median(result.moved for result in these) for these in (results, plain))
    sync = WAYS[way]
    return [
        TITLES[optimizer],
        sync.name if sync.round_batches == 1 else f"{sync.name}, {sync.round_batches} batches",
        sync.codec.name,
        accuracy.show(".2f"),
        f"{accuracy.median - base.median:+.2f}",
        f"{statistics.median(result.sent for result in results):,.1f}",
        f"{statistics.median(result.received for result in results):,.1f}",
        f"÷{base_moved / moved:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ways", default=",".join(WAYS), help="the first one is what the others are compared with")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--judge", choices=("test", "validation"), default="test")
    parser.add_argument("--path", default="", help="the folder of the MNIST files")
    options = parser.parse_args()
    recipe = with_settings(get("mnist-cnn"), {"path": options.path})
    data, ways = split(recipe.data(), options.judge), options.ways.split(",")
    headers = [
        "optimizer",
        "agreement",
        "codec",
        "accuracy, %",
        "points off",
        "sent, bytes per sample",
        "received, bytes per sample",
        "both, ratio",
    ]
    for optimizer in options.optimizers.split(","):
        results: dict[str, list[Result]] = {way: [] for way in ways}
        for seed in range(1, options.seeds + 1) if options.judge == "test" else [0]:
            for way in ways:
                results[way].append(train(recipe, data, optimizer, way, seed, options.epochs))
        table = markdown(headers, [row(optimizer, way, results[way], results[ways[0]]) for way in ways])
        if options.judge == "test":
            write_block(f"codecs {optimizer}", table, module="codecs")
        else:
            print(table)


if __name__ == "__main__":
    main()
