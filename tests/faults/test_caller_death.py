"""The caller dies, or everything does: nothing is left running, and the same script goes on where it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from scenes import Mlp, Scene, proof, table
from scripts import fit_script, running, shared_memory, still_there

pytestmark = pytest.mark.fault

EPOCHS = 6


def undisturbed() -> str:
    return Scene(Mlp, data=table(1600), epochs=EPOCHS).run(2).digest


def checkpoints(run_dir: Path) -> list[str]:
    folder = run_dir / "checkpoints"
    return sorted(path.name for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []


@pytest.mark.parametrize("whole_group", [False, True], ids=["caller", "everything"])
def test_kill_then_the_same_script_resumes_at_another_worker_count(whole_group: bool, tmp_path: Path) -> None:
    run_dir, segments = tmp_path / "run", shared_memory()
    with running(fit_script(str(run_dir), epochs=EPOCHS)) as program:
        pids = [int(word) for word in program.wait_for("pids")]
        end = time.monotonic() + 20
        while not checkpoints(run_dir) and time.monotonic() < end:
            time.sleep(0.005)
        for pid in pids[1:] * whole_group:
            os.kill(pid, signal.SIGKILL)
        os.kill(program.process.pid, signal.SIGKILL)
        assert "digest" not in program.end()
    assert still_there(pids) == []
    assert shared_memory() <= segments
    saved = checkpoints(run_dir)
    assert saved, "the run was killed before it had saved anything"
    begun = time.monotonic()
    with running(fit_script(str(run_dir), workers=3, epochs=EPOCHS, model="Mlp")) as program:
        program.wait_for("pids")
        resumed_s = time.monotonic() - begun
        text = program.end()
    assert f"resumed at step {int(saved[-1])}" in text
    assert text.split("digest")[1].split()[0] == undisturbed()
    assert proof(run_dir).exact
    assert len(proof(run_dir).epochs) == EPOCHS
    assert resumed_s < 15  # the goal is 5 s on a quiet machine: docs/guarantees.md


def test_a_resume_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    scene = Scene(fit={"run_dir": tmp_path / "run", "checkpoint_every_s": 60.0})
    first = scene.run(2)
    again = scene.run(3)
    assert again.digest == first.digest
    assert proof(tmp_path / "run").exact
