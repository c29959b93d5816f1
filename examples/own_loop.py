"""The loop of examples/plain_loop.py on any number of workers; the changed lines are marked.

python examples/own_loop.py 4
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands as mh


def train(me):
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    me.join(model, optimizer)  # 1: train it together
    loader = me.loader(data, batch_size=64)  # 2: this worker's part of every batch
    for _ in range(20):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            me.backward(loss)  # 3
            me.step()  # 4: also clears the gradients
    return model, loss.item()


workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
run = mh.launch(train, workers=workers, lanes=4)  # 5
model, loss = run.value
print(f"{workers} workers · {run.steps} steps · last loss {loss:.4f} · weights {mh.digest(model)[:16]}")
