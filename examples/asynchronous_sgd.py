"""Asynchronous SGD: workers bring their updates to a server and wait for nobody.

python examples/asynchronous_sgd.py 4
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import manyhands as mh

digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
train, test = mh.split(x, y, fractions=(0.8, 0.2), seed=0, stratify=y)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
)
trainer = mh.Trainer(
    model,
    optimizer=mh.optimizer("adam", lr=3e-3),
    metrics=["accuracy"],
    workers=int(sys.argv[1]) if len(sys.argv) > 1 else 2,
    sync="async",
    schedule="cosine",
)
history = trainer.fit(train, epochs=20, batch_size=32, run_dir=False)
accuracy = trainer.evaluate(test)["accuracy"]
print(f"accuracy {accuracy:.4f} · {history.updates['applied']} updates, each sample once per epoch")
