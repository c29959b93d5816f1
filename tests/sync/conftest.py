"""The apply phase runs in workers, and a worker has one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_in_a_worker(one_thread: None) -> None:
    """Nothing else."""
