"""What must happen once, before the tests of recipes."""

from __future__ import annotations

import torch
from torch import nn

# The first optimizer of a process makes torch import its compiler, which sets an environment variable: before a test.
torch.optim.SGD([nn.Parameter(torch.zeros(1))])
