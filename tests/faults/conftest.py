"""Set-up for the fault tests."""

from __future__ import annotations

import pytest

# Torch imports its compiler when the first optimizer is built, and that sets an environment variable. Done here, it
# is not held against the first test that builds one.
import torch._dynamo  # noqa: F401

from manyhands.train import state


@pytest.fixture(params=["whole", "shared out, kept", "shared out"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways to apply a step; models as small as those of the tests would all be applied whole."""
    way: str = request.param
    monkeypatch.setattr(state, "WHOLE_BYTES", state.KEPT_BYTES if way == "whole" else 0)
    if way == "shared out":
        monkeypatch.setattr(state, "KEPT_BYTES", 0)
    return way
