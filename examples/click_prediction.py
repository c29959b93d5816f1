"""A factorisation machine on made-up clicks: tables that servers hold by row, ids by Zipf's law.

python examples/click_prediction.py 2
"""

import sys
import time

import numpy as np
import torch
from torch import nn

import manyhands as mh

FIELDS, IDS = 5, 200_000  # ids of each field
SAMPLES, EPOCHS = 60_000, 2


class FactorisationMachine(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.weights = nn.Embedding(FIELDS * IDS, 1, sparse=True)  # sparse=True is all that it takes
        self.factors = nn.Embedding(FIELDS * IDS, width, sparse=True)
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.factors.weight, std=0.05)

    def forward(self, ids):
        factors = self.factors(ids)
        pairs = factors.sum(1).square() - factors.square().sum(1)  # all products of two different fields, twice
        return self.bias + self.weights(ids).sum((1, 2)) + pairs.sum(1) / 2


def clicks(seed=0):
    """Every id has a taste of its own; a click is likely where the tastes of a sample agree."""
    chance = np.random.default_rng(seed)
    ids = (chance.zipf(1.3, (SAMPLES, FIELDS)) - 1) % IDS + np.arange(FIELDS) * IDS
    weights, factors = chance.normal(size=FIELDS * IDS) * 0.5, chance.normal(size=(FIELDS * IDS, 2)) * 0.5
    found = factors[ids]
    logits = weights[ids].sum(1) + ((found.sum(1) ** 2) - (found**2).sum(1)).sum(1) / 2
    clicked = chance.random(SAMPLES) < 1 / (1 + np.exp(-logits))
    return torch.from_numpy(ids), torch.from_numpy(clicked.astype(np.float32)), logits


def auc(scores, clicked):
    """How likely a sample with a click has a higher score than one without."""
    ranks = scores.argsort().argsort() + 1
    hits = int(clicked.sum())
    return (ranks[clicked > 0].sum() - hits * (hits + 1) / 2) / (hits * (len(clicked) - hits))


workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
ids, clicked, logits = clicks()
split = SAMPLES * 9 // 10
model = FactorisationMachine()
trainer = mh.Trainer(
    model,
    loss="bce_with_logits",
    optimizer=mh.optimizer("adagrad", lr=0.05),
    workers=workers,
    sync=mh.Server(policy="async", servers=2),
)
begun = time.perf_counter()
history = trainer.fit((ids[:split], clicked[:split]), epochs=EPOCHS, batch_size=512, run_dir=False, progress="quiet")
seconds = time.perf_counter() - begun
scores, truth = trainer.predict(ids[split:]).numpy(), clicked[split:].numpy()
steps = EPOCHS * -(-split // 512)
print(f"{workers} workers, 2 servers · {steps} steps in {seconds:.1f} s · loss {history.metrics['loss'][-1]:.4f}")
print(f"AUC on unseen clicks {auc(scores, truth):.3f}, of the true odds {auc(logits[split:], truth):.3f}")
print(
    f"rows of {2 * FIELDS * IDS:,}: {history.rows['pulled'] / steps:,.0f} pulled and "
    f"{history.rows['pushed'] / steps:,.0f} pushed in a step"
)
