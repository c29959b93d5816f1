"""Incremental SGD: every lane makes steps of its own, and now and then they put their changes together.

python examples/incremental_sgd.py 4
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = mh.split(x, y, fractions=(0.8, 0.2), seed=0, stratify=y)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
trainer = mh.Trainer(
    model,
    optimizer=mh.optimizer("sgd", lr=0.1),
    metrics=["accuracy"],
    workers=int(sys.argv[1]) if len(sys.argv) > 1 else 2,
    sync=mh.Local(every=8, outer="average"),
)
trainer.fit(train, epochs=20, batch_size=64, lanes=4, run_dir=False)
print(f"accuracy {trainer.evaluate(test)['accuracy']:.4f} · weights {mh.digest(model)[:16]}")
