"""Set-up for the fault tests."""

from __future__ import annotations

import pytest

from manyhands.train import state


@pytest.fixture(params=["whole", "shared out, kept", "shared out"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways to apply a step; models as small as those of the tests would all be applied whole."""
    way: str = request.param
    monkeypatch.setattr(state, "WHOLE_BYTES", state.KEPT_BYTES if way == "whole" else 0)
    if way == "shared out":
        monkeypatch.setattr(state, "KEPT_BYTES", 0)
    return way
