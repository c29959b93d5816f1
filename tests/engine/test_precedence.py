"""Servers run before workers, with or without the privilege to arrange it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from manyhands.engine.precedence import go_first, step_back
if sys.argv[1] == "unprivileged":
    os.setgid(65534), os.setuid(65534)
before = os.getpriority(os.PRIO_PROCESS, 0)
(go_first if sys.argv[2] == "server" else step_back)()
print(os.getpriority(os.PRIO_PROCESS, 0) - before)
"""


def moved(*words: str) -> int:
    environment = {**os.environ, "MANYHANDS_WARM": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize(
    "who",
    ["mine", pytest.param("unprivileged", marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root to leave it"))],
)
def test_the_server_comes_first_either_way(who: str) -> None:
    server, worker = moved(who, "server"), moved(who, "worker")
    assert server <= 0 <= worker
    assert worker - server == 10
