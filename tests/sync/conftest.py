"""The apply phase runs in workers, and a worker has one thread."""

from __future__ import annotations

import pytest
import torch
from torch import nn

# The first optimizer of a process makes torch import its compiler, which sets an environment variable: before a test.
torch.optim.SGD([nn.Parameter(torch.zeros(1))])


@pytest.fixture(autouse=True)
def as_in_a_worker(one_thread: None) -> None:
    """Nothing else."""
