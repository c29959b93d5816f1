"""Set-up for the conformance table."""

from __future__ import annotations

# Importing these sets environment variables. Done here, it is not held against the first test that uses them.
import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401
