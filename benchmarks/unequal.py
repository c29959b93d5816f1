"""Time to 97 % test accuracy when one of four workers is sixteen times slower: asynchronous against synchronous.

    python -m benchmarks.unequal --rounds 3

Real training on scikit-learn's digits; every worker sleeps a fixed time per row on top of its computing, sixteen times
as long in the slow one, so that speeds are 1, 1, 1 and 1/16 whatever the cores are doing. The ways of agreeing take
turns.
The clock runs from the first committed step to the end of the first epoch whose test accuracy reaches the goal; the
tests in between are part of it.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import manyhands as mh
from benchmarks.table import Spread, markdown, paired_ratio, write_block

WORKERS, SLOW_SLOT, SLOWDOWN = 4, 3, 16.0
SLEEP_PER_ROW_S = 0.0001
GOAL = 0.97
TRAINING_ROWS = 1437
MOST_EPOCHS = 200


class Uneven(nn.Module):
    """A perceptron that takes its time while it trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            slow = mh.worker_slot() == SLOW_SLOT
            time.sleep(len(x) * SLEEP_PER_ROW_S * (SLOWDOWN if slow else 1.0))
        output: Tensor = self.body(x)
        return output


class UntilGood(mh.Callback):
    """Stops at the goal and keeps the time."""

    def __init__(self) -> None:
        self.begun = self.seconds = 0.0

    def on_train_begin(self, state: mh.State) -> None:
        self.begun = time.monotonic()

    def on_epoch_end(self, state: mh.State) -> None:
        if state.metrics["val_accuracy"] >= GOAL and not self.seconds:
            self.seconds = time.monotonic() - self.begun
            state.stop("the goal is reached")


SYNCS = {
    "allreduce, equal lanes": ("allreduce", mh.Limits(balance_s=0)),
    "allreduce, lanes by speed": ("allreduce", mh.Limits()),
    "async": ("async", mh.Limits()),
    "async without dropping": (mh.Server(policy="plain"), mh.Limits()),
}


def measure(name: str, seed: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    sync, limits = SYNCS[name]
    until = UntilGood()
    trainer = mh.Trainer(
        Uneven(seed),
        optimizer=mh.optimizer("adam", lr=2e-3),
        metrics=["accuracy"],
        workers=WORKERS,
        sync=sync,
        limits=limits,
        seed=seed,
    )
    lanes = 16 if "speed" in name else None
    trainer.fit(train, test, MOST_EPOCHS, 32, lanes, [until], run_dir=False, progress="quiet")
    if not until.seconds:
        raise SystemExit(f"{name}: {GOAL:.0%} was not reached in {MOST_EPOCHS} epochs")
    return until.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    images, labels = torch.as_tensor(x / 16.0, dtype=torch.float32)[order], torch.as_tensor(y)[order]
    train = images[:TRAINING_ROWS], labels[:TRAINING_ROWS]
    test = images[TRAINING_ROWS:], labels[TRAINING_ROWS:]
    seconds: dict[str, list[float]] = {name: [] for name in SYNCS}
    for seed in range(options.rounds):
        for name in SYNCS:
            seconds[name].append(measure(name, seed, train, test))
            print(f"round {seed + 1}/{options.rounds} · {name}: {seconds[name][-1]:.2f} s", flush=True)
    ours = seconds["async"]
    rows = [
        [name, Spread.of(times).show(".2f"), paired_ratio(times, ours).show(".2f")] for name, times in seconds.items()
    ]
    headers = ["way of agreeing", f"seconds to {GOAL:.0%}", "of them per second of async"]
    write_block("unequal", markdown(headers, rows), module="unequal")


if __name__ == "__main__":
    main()
