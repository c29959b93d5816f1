"""The command line as users meet it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cyclopts import CycloptsError

from manyhands import errors
from manyhands.cli import exit_code, main

TIMEOUT_S = 90

# Slow enough to be interrupted, quick enough to wait for; fails or loses its numbers when told to.
OWN_RECIPE = """
import time
import torch
from torch import nn
from manyhands.recipes import Recipe, RecipeData

class Net(nn.Module):
    def __init__(self, pause_s, fail):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.pause_s, self.fail = pause_s, fail

    def forward(self, x):
        time.sleep(self.pause_s)
        if self.fail:
            raise LookupError("a mistake of mine")
        return self.layer(x)

def recipe(pause_s: float = 0.0, fail: bool = False, poison: bool = False):
    def data():
        x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        y = (x[:, 0] > 0).long()
        x[7] = float("nan") if poison else x[7]
        return RecipeData(train=(x, y), test=(x, y))

    return Recipe(
        name="own", description="mine", model=lambda: Net(pause_s, fail), data=data, loss="cross_entropy",
        optimizer="adamw", metrics=("accuracy",), epochs=5, batch_size=10,
    )
"""


class Shell:
    """A working folder and the command in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self.environment = {**os.environ, "MANYHANDS_RUNS": str(folder / "runs")}
        (folder / "own.py").write_text(OWN_RECIPE)

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def result(self, *words: str) -> dict[str, Any]:
        """The object that ``--json`` prints last, of a run that must succeed."""
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the own recipe when nothing happens to it."""
    return Shell(tmp_path_factory.mktemp("undisturbed")).result(
        "train", "own.py", "--workers", "1", "--lanes", "2", "--quiet"
    )


def explain(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What ``explain`` says of a run, in words and as an object; it starts nothing, so it needs no process."""
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(run), "--json"])
    assert ended.value.code == 0
    words, _, last = capsys.readouterr().out.strip().rpartition("\n")
    return words, json.loads(last)


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    pytest.fail(f"the command ended before it printed {beginning!r}")


def test_demo_trains_digits_to_98_percent_and_is_explained(shell: Shell) -> None:
    done = shell.run("demo", "--json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "batch 64 global = 2 lanes × 32 · each sample once per epoch" in lines
    result = json.loads(lines[-1])
    assert result["test"]["accuracy"] >= 0.98
    assert result["status"] == "finished"
    assert set(result["bill"]) == {"compute", "wait", "reduce", "data"}
    assert re.fullmatch(r"[0-9a-f]{64}", result["digest"])

    explained = shell.run("explain", "last")
    assert explained.returncode == 0, explained.stderr
    assert "ledger: in each of 20 epochs, each of 1,257 samples counted exactly once" in explained.stdout
    assert "deaths: none" in explained.stdout
    listed = shell.result("runs", "--quiet")
    assert [(run["recipe"], run["status"], run["steps"]) for run in listed["runs"]] == [("digits-cnn", "finished", 400)]


@pytest.mark.fault
def test_ctrl_c_leaves_a_receipt_and_resume_ends_in_the_same_weights(
    shell: Shell, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    process = shell.start("train", "own.py", "--workers", "2", "--set", "pause_s=0.02", "--run-dir", "cut", "--json")
    wait_for_line(process, "epoch ")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert re.search(r"saved step \d+ · \d+ processes stopped · 0 left · resume: manyhands resume cut", out)
    assert json.loads(out.splitlines()[-1])["status"] == "interrupted"
    assert children, "there was something to stop"
    assert psutil.wait_procs(children, timeout=5)[1] == []

    words, _ = explain(shell.folder / "cut", capsys)
    assert "interrupted at step" in words
    assert "go on with: manyhands resume" in words
    assert "still to come" in words
    resumed = shell.result("resume", "cut", "--workers", "3", "--quiet")
    assert resumed["digest"] == undisturbed["digest"]
    assert resumed["history"]["loss"] == undisturbed["history"]["loss"]
    _, found = explain(shell.folder / "cut", capsys)
    assert found["proof"]["exact"]
    assert [epoch["once"] for epoch in found["proof"]["epochs"]] == [200] * 5


@pytest.mark.fault
def test_a_killed_worker_is_explained_with_its_recovery(
    shell: Shell, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    process = shell.start("train", "own.py", "--workers", "2", "--set", "pause_s=0.02", "--run-dir", "hit", "--json")
    wait_for_line(process, "epoch ")
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if not child.children()]
    workers[0].kill()
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["digest"] == undisturbed["digest"]
    words, _ = explain(shell.folder / "hit", capsys)
    assert re.search(r"deaths: 1, recoveries: 1, longest stall \d", words)
    assert re.search(rf"worker \d \(pid {workers[0].pid}\) died: .*, at step \d+ in phase \w+", words)
    assert "ledger: in each of 5 epochs, each of 200 samples counted exactly once" in words


def test_an_error_of_the_users_keeps_its_traceback_and_ends_in_1(shell: Shell) -> None:
    done = shell.run("train", "own.py", "--workers", "2", "--set", "fail=yes", "--json")
    assert done.returncode == 1
    assert "LookupError: a mistake of mine" in done.stderr
    assert 'raise LookupError("a mistake of mine")' in done.stderr, "the user's own line is shown"
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["status"], result["exit_code"], result["error"]) == ("failed", 1, "LookupError")


def test_a_loss_that_is_not_finite_ends_in_1_with_one_message(shell: Shell) -> None:
    done = shell.run("train", "own.py", "--workers", "2", "--set", "poison=yes", "--quiet")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "sample 7" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_folder_that_another_run_holds_is_refused_with_3(shell: Shell) -> None:
    first = shell.start("train", "own.py", "--workers", "1", "--set", "pause_s=0.05", "--run-dir", "held")
    wait_for_line(first, "epoch ")
    second = shell.run("train", "own.py", "--workers", "1", "--run-dir", "held")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 3
    assert f"process {first.pid}" in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize(
    "sync, line",
    [
        ("local", "each lane makes 32 steps of its own"),
        ("async-local", "the fastest worker makes 32 steps of its own at a time"),
    ],
)
def test_local_steps_are_trained_and_resumed(sync: str, line: str, shell: Shell) -> None:
    words = ("train", "own.py", "--workers", "2", "--lanes", "2", "--sync", sync, "--run-dir", "own", "--json")
    done = shell.run(*words, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert line in done.stdout
    record = json.loads((shell.folder / "own" / "run.json").read_text())
    assert (record["sync"], record["sync_settings"]["every"], record["steps"]) == (sync, 32, 40)
    resumed = shell.run("resume", "own", "--epochs", "3", "--workers", "1", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1])["epochs"] == 3
    record = json.loads((shell.folder / "own" / "run.json").read_text())
    assert (record["sync"], record["steps"]) == (sync, 60)


def test_a_run_goes_on_under_another_way_of_agreeing(shell: Shell) -> None:
    words = ("train", "own.py", "--workers", "1", "--sync", "async", "--run-dir", "own", "--epochs", "2", "--json")
    assert shell.run(*words).returncode == 0
    resumed = shell.run("resume", "own", "--epochs", "3", "--sync", "allreduce", "--workers", "2", "--json")
    assert resumed.returncode == 0, resumed.stderr
    record = json.loads((shell.folder / "own" / "run.json").read_text())
    assert (record["sync"], record["steps"], record["lanes"]) == ("allreduce", 60, 2)
    refused = shell.run("resume", "own", "--epochs", "4", "--batch-size", "20")
    assert refused.returncode == 3
    assert "batch_size was 10, is 20" in refused.stderr


def test_scale_tells_staleness(shell: Shell) -> None:
    words = (
        "scale",
        "own.py",
        "--workers",
        "2",
        "--steps",
        "20",
        "--repeats",
        "1",
        "--sync",
        "async,bounded",
        "--json",
    )
    done = shell.run(*words)
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout.splitlines()[-1])["rows"]:
        assert 0 <= row["updates"]["staleness_p50"] <= row["updates"]["staleness_p95"]
        assert row["updates"]["applied"] == 40
        assert f"{row['sync']} with 2: staleness p50 {row['updates']['staleness_p50']}, p95" in done.stdout


def test_scale_measures_each_count_and_ends_in_the_same_weights(shell: Shell) -> None:
    words = ("scale", "own.py", "--workers", "1,2", "--steps", "20", "--repeats", "1", "--plot", "scale.png")
    done = shell.run(*words, "--sync", "allreduce,local", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [(row["sync"], row["workers"]) for row in result["rows"]] == [
        ("allreduce", 1), ("allreduce", 2), ("local", 1), ("local", 2),
    ]  # fmt: skip
    assert result["rows"][0]["speedup"] == 1.0
    assert len({row["digest"] for row in result["rows"]}) == 2
    assert all(0 < row["latency_p50_ms"] <= row["latency_p95_ms"] for row in result["rows"])
    for sync in ("allreduce", "local"):
        assert f"weights after {sync}: identical at every worker count" in done.stdout
    assert (shell.folder / "scale.png").read_bytes().startswith(b"\x89PNG")
    assert not (shell.folder / "runs").exists(), "a measurement is not a run"


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "digits-mlp", "--workers", "two"], "--workers two: not a number"),
        (["train", "digits-mlp", "--workers", "0"], "--workers 0: not a number"),
        (["train", "digits-mlp", "--workers", "-3"], "--workers -3: not a number"),
        (["train", "digits-mlp", "--workers", "4-2"], "the range is empty"),
        (["train", "digits-mlp", "--wrkers", "2"], "Did you mean --workers?"),
        (["train", "digits-mlp", "--sync", "allreduc"], "Did you mean 'allreduce'?"),
        (["train", "digits-mlp", "--set", "lrr=1"], "Did you mean 'lr'?"),
        (["train", "digits-mlp", "--set", "lr"], "valid: key=value"),
        (["train", "digits-mlp", "--epochs", "0"], "epochs is 0; valid"),
        (["train", "linear", "--batch-size", "2", "--lanes", "4"], "smaller than lanes=4"),
        (["train", "digits-cn"], "Did you mean 'digits-cnn'?"),
        (["train", "nowhere.py"], "does not exist"),
        (["train", "gpt"], "--set text=PATH"),
        (["train"], "requires an argument"),
        (["trian", "linear"], 'Did you mean "train"?'),
        (["resume", "17"], "no run '17'"),
        (["explain", "nothing"], "no run 'nothing'"),
        (["scale", "linear", "--workers", "1,x"], "such as 1,2,4"),
        (["scale", "linear", "--steps", "0"], "--steps 0: valid"),
        (["scale", "linear", "--lanes", "0"], "--lanes 0: valid"),
        (["scale", "linear", "--workers", "1,100"], "workers received 100; valid"),
        (["scale", "linear", "--sync", "allreduce,asnyc"], "Did you mean 'async'?"),
        (["scale", "linear", "--plot", "/nowhere/at/all.png"], "the folder does not exist"),
    ],
)
def test_a_wrong_call_ends_in_2_with_one_message_and_leaves_no_run(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MANYHANDS_RUNS", str(tmp_path / "runs"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith("error: ")
    assert message in said.err
    assert "Traceback" not in said.err
    assert list((tmp_path / "runs").glob("0*")) == []


def test_recipes_are_listed_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["recipes", "--json"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {recipe["name"]: recipe for recipe in json.loads(lines[-1])["recipes"]}
    assert listed["digits-cnn"]["settings"]["channels"] == 32
    assert any(line.startswith("digits-cnn") for line in lines)


def test_a_run_from_python_cannot_be_rebuilt_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "0001-mine"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "finished", "model": "Net"}')
    monkeypatch.setenv("MANYHANDS_RUNS", str(tmp_path / "runs"))
    with pytest.raises(SystemExit) as ended:
        main(["resume", "1"])
    assert ended.value.code == 2
    assert "was not started by the command line" in capsys.readouterr().err


def test_no_words_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in ("demo", "train", "resume", "runs", "recipes", "scale", "explain"))


@pytest.mark.parametrize(
    "error, code",
    [
        (errors.DataError("x"), 2),
        (errors.MissingExtra("x", "plot"), 2),
        (CycloptsError(msg="x"), 2),
        (errors.NotFinite("x"), 1),
        (ValueError("x"), 1),
        (errors.WorkerCrashed("x"), 3),
        (errors.RunLocked("x"), 3),
        (errors.EngineError("x"), 3),
        (errors.CheckpointDamaged("x"), 3),
        (errors.CheckpointMismatch("x"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code
