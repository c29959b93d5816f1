"""Final test accuracy under every way of agreeing, on the real MNIST, at the same number of epochs.

    python -m benchmarks.accuracy --seeds 3 --models mlp,cnn

Four workers unless said otherwise; the recipes of `manyhands recipes` with their own optimizer, rate and batch, and the
same schedule for all: with none the last few steps decide by chance. The files of MNIST are found as the recipes find
them.
"""

import argparse
import statistics
from typing import Any

import torch

import manyhands as mh
from benchmarks.table import Spread, markdown, write_block
from manyhands.recipes.mnist import mnist_cnn, mnist_mlp

RECIPES = {"mlp": mnist_mlp, "cnn": mnist_cnn}
WORKERS = 4
SYNCS: dict[str, Any] = {
    "allreduce": "allreduce",
    "server": "server",
    "async": "async",
    "async-unpredicted": mh.Server(policy="async", predict=False),
    "async-at-once": mh.Server(policy="async", ramp=0),
    "bounded": "bounded",
    "local": "local",
}


def measure(model: str, sync: str, seed: int, schedule: str | None, epochs: int | None, workers: int) -> float:
    recipe = RECIPES[model]()
    torch.manual_seed(seed)
    net = recipe.model()
    data = recipe.data()
    optimizer = recipe.optimizer(net.parameters())
    trainer = mh.Trainer(
        net, recipe.loss, optimizer, recipe.metrics, workers=workers, sync=SYNCS[sync], seed=seed, schedule=schedule
    )
    trainer.fit(
        data.train, epochs=epochs or recipe.epochs, batch_size=recipe.batch_size, run_dir=False, progress="quiet"
    )
    return 100 * trainer.evaluate(data.test)["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", default=",".join(RECIPES))
    parser.add_argument("--syncs", default=",".join(SYNCS))
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--epochs", type=int, help="the recipe's, unless given")
    parser.add_argument("--schedule", default="cosine", choices=["cosine", "none"])
    options = parser.parse_args()
    schedule = None if options.schedule == "none" else options.schedule
    for model in options.models.split(","):
        reached: dict[str, list[float]] = {sync: [] for sync in options.syncs.split(",")}
        for seed in range(options.seeds):
            for sync, values in reached.items():
                values.append(measure(model, sync, seed, schedule, options.epochs, options.workers))
                print(f"{model} · seed {seed} · {sync}: {values[-1]:.2f} %", flush=True)
        best = statistics.mean(reached["allreduce"])
        rows = [
            [
                sync,
                Spread.of(values).show(".2f"),
                f"{statistics.mean(values):.2f}",
                f"{statistics.mean(values) - best:+.2f}",
            ]
            for sync, values in reached.items()
        ]
        headers = ["way of agreeing", "test accuracy, %", "mean", "against all-reduce, points"]
        name = f"accuracy {model}" + " without schedule" * (schedule is None)
        name += f" {options.workers} workers" * (options.workers != WORKERS)
        write_block(name, markdown(headers, rows), module="accuracy")


if __name__ == "__main__":
    main()
