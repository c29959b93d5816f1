"""Set-up for the fault tests."""

from __future__ import annotations

# Torch imports its compiler when the first optimizer is built, and that sets an environment variable. Done here, it
# is not held against the first test that builds one.
import torch._dynamo  # noqa: F401
