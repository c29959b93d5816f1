"""Run folders and resuming: what is on disk, and that going on from it ends in the same bits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROWS, X, Y, digest_of, mlp, train
from torch import nn

import manyhands as mh
from manyhands.errors import CheckpointDamaged, CheckpointMismatch, RunLocked, UsageError
from manyhands.observe.events import read_events
from manyhands.train.callbacks import EarlyStopping, Lambda
from manyhands.train.checkpoint import CheckpointStore
from manyhands.train.ledger_file import read_ledger

BATCH = 12  # the last batch has 6 rows, 2 for each of 3 lanes
STEPS = -(-ROWS // BATCH)
OPTIONS: dict[str, Any] = {
    "optimizer": "adamw", "schedule": "cosine", "clip": 1.0, "metrics": ["accuracy"], "seed": 4,
}  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(X.shape[1]), mlp(0.3))


def run(folder: Path | None, workers: int = 2, **fit: Any) -> tuple[str, mh.History, mh.Trainer]:
    settings = {"run_dir": folder, "epochs": 3, "lanes": 3, "batch_size": BATCH, "validation": (X, Y)} | fit
    trainer, history = train(net(), workers=workers, fit=settings, **OPTIONS)
    return mh.digest(trainer.model), history, trainer


def stop_at(step: int) -> mh.Callback:
    """Ends the run in the middle of things, as an interrupt would."""
    return Lambda(on_step_end=lambda state: state.stop("for the test") if state.step == step else None)


def numbers(history: mh.History) -> dict[str, list[float]]:
    return {name: values for name, values in history.metrics.items() if name != "seconds"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, mh.History]:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    digest, history, trainer = run(folder, events=True, checkpoint_every_steps=10)
    assert trainer.run_dir == folder
    return folder, digest, history


@pytest.mark.parametrize("sync, span", [("allreduce", 1), ("async", 1), (mh.Local(every=4), 4)])
def test_checkpoints_by_steps_are_of_just_these_steps(sync: object, span: int, tmp_path: Path) -> None:
    """However fast the steps are, the workers rest there. Some may be missing: a newer one replaces one that waits."""
    x, y = X.repeat(20, 1)[:800], Y.repeat(20)[:800]
    trainer = mh.Trainer(mlp(), optimizer="sgd", workers=2, sync=sync)
    options = {"checkpoint_every_steps": 7, "keep": 1000, "batch_size": 10, "progress": "quiet"}
    trainer.fit((x, y), epochs=2, run_dir=tmp_path, **options)
    steps = CheckpointStore(tmp_path / "checkpoints").steps()
    assert len(steps) >= 3 and steps[-1] == 160
    apart = -(-7 // span) * span
    assert all(step % apart == 0 for step in steps[:-1])


def test_a_run_leaves_its_settings_events_ledger_and_checkpoints(whole: tuple[Path, str, mh.History]) -> None:
    folder, _, history = whole
    settings = json.loads((folder / "run.json").read_text())
    wanted = {
        "status": "finished", "model": "Sequential", "loss": "cross_entropy", "optimizer": "AdamW", "seed": 4,
        "workers": [2, 2], "sync": "allreduce", "threads": 1, "precision": "fp32", "samples": ROWS,
        "batch_size": BATCH, "lanes": 3, "epochs": 3, "steps": 3 * STEPS, "metrics": ["accuracy"],
    }  # fmt: skip
    assert {name: settings[name] for name in wanted} == wanted
    assert settings["hyper"][0]["betas"] == [0.9, 0.999]
    assert settings["history"]["loss"] == history.metrics["loss"]
    events = list(read_events(folder / "events.jsonl"))
    assert [event["event"] for event in events].count("worker_ready") == 2
    assert [event["loss"] for event in events if event["event"] == "epoch"] == history.metrics["loss"]
    proof = read_ledger(folder / "ledger").verify()
    assert proof.exact and [epoch.once for epoch in proof.epochs] == [ROWS] * 3
    assert (store := CheckpointStore(folder / "checkpoints")).steps()[-1] == 3 * STEPS
    assert len(store.steps()) == 2


@pytest.mark.parametrize("step", [5, STEPS, STEPS + 1, 2 * STEPS])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resume_at_another_worker_count_ends_in_the_same_bits(
    step: int, workers: int, whole: tuple[Path, str, mh.History], tmp_path: Path
) -> None:
    """In mid-epoch and at its border; weights, history and ledger are those of the undisturbed run."""
    _, early, _ = run(tmp_path / "run", callbacks=[stop_at(step)])
    assert len(early) == step // STEPS
    digest, history, trainer = run(tmp_path / "run", workers=workers)
    assert digest == whole[1]
    assert numbers(history) == numbers(whole[2])
    assert history.epochs == [0, 1, 2]
    assert trainer.run_dir == tmp_path / "run"
    proof = read_ledger(tmp_path / "run" / "ledger").verify()
    assert proof.exact and [epoch.once for epoch in proof.epochs] == [ROWS] * 3


@pytest.mark.parametrize("every", [STEPS, 5])
def test_checkpoints_by_steps_hold_the_history_of_the_epochs_before_them(every: int, tmp_path: Path) -> None:
    run(tmp_path / "run", checkpoint_every_steps=every, callbacks=[Lambda(on_step_end=lambda state: None)])
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in store.steps():
        checkpoint = store.load(step)
        assert checkpoint.meta["history"]["epochs"] == list(range(step // STEPS)), f"at step {step}"
        within = step % STEPS
        assert checkpoint.meta["sums"][0] == min(within * BATCH, ROWS), f"at step {step}"


@pytest.mark.parametrize("first, then", [("adamw", "asgd"), ("adam", "momentum"), ("sgd", "adam")])
def test_another_optimizer_begins_anew(first: str, then: str, tmp_path: Path) -> None:
    """What it needs and the checkpoint lacks is not taken to be zero: it makes its first step."""
    train(fit={"run_dir": tmp_path, "epochs": 1, "lanes": 1, "shuffle": False}, optimizer=mh.optimizer(first, lr=0.01))
    saved, _ = CheckpointStore(tmp_path / "checkpoints").load_latest()
    assert saved is not None
    model = mlp()
    model.load_state_dict({name.removeprefix("model/"): t for name, t in saved.tensors.items() if "model/" in name})
    optimizer, epochs = mh.optimizer(then, lr=0.01), {"epochs": 2, "lanes": 1, "shuffle": False}
    resumed = digest_of(fit={"resume": tmp_path, "run_dir": None, **epochs}, optimizer=optimizer)
    assert resumed == digest_of(model, fit={**epochs, "epochs": 1}, optimizer=optimizer)


def test_going_on_with_a_finished_run_for_more_epochs(whole: tuple[Path, str, mh.History], tmp_path: Path) -> None:
    """Without a schedule that depends on the length, two epochs and one more are three."""
    settings = {"run_dir": tmp_path / "a", "batch_size": BATCH, "lanes": 2, "epochs": 3}
    expected = mh.digest(train(net(), fit=settings)[0].model)
    train(net(), fit=settings | {"run_dir": tmp_path / "b", "epochs": 2})
    trainer, history = train(net(), fit=settings | {"run_dir": None, "resume": tmp_path / "b"})
    assert mh.digest(trainer.model) == expected
    assert history.epochs == [0, 1, 2]
    again, history = train(net(), fit=settings | {"run_dir": tmp_path / "b"})
    assert mh.digest(again.model) == expected, "a run that is complete gives its weights"
    assert history.epochs == [0, 1, 2]


def test_early_stopping_remembers_over_a_resume(tmp_path: Path) -> None:
    still = {"optimizer": mh.optimizer("sgd", lr=0.0)}
    settings = {"run_dir": tmp_path / "run", "batch_size": BATCH, "shuffle": False, "epochs": 2}
    train(fit=settings | {"callbacks": [EarlyStopping("loss", patience=3)]}, **still)
    _, history = train(fit=settings | {"callbacks": [EarlyStopping("loss", patience=3)], "epochs": 9}, **still)
    assert history.epochs == [0, 1, 2, 3]


def test_a_rate_set_by_a_callback_survives_a_resume(tmp_path: Path) -> None:
    def halve(state: mh.State) -> None:
        if state.step == 4:
            state.lr = state.lr / 4

    settings = {"batch_size": BATCH, "epochs": 2}
    expected = mh.digest(train(fit=settings | {"callbacks": [Lambda(on_step_end=halve)]})[0].model)
    settings["run_dir"] = tmp_path / "run"  # type: ignore[assignment]
    train(fit=settings | {"callbacks": [Lambda(on_step_end=halve), stop_at(7)]})
    assert mh.digest(train(fit=settings | {"callbacks": [Lambda(on_step_end=halve)]})[0].model) == expected


def test_a_damaged_newest_checkpoint_costs_a_warning_and_no_bits(
    whole: tuple[Path, str, mh.History], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(folder, checkpoint_every_steps=4, callbacks=[stop_at(2 * STEPS - 2)])
    *_, older, newest = sorted((folder / "checkpoints").iterdir())
    damage(newest)
    digest, history, _ = run(folder, workers=1)
    assert digest == whole[1]
    assert numbers(history) == numbers(whole[2])
    told = [event for event in history.events if event["event"] == "checkpoint_damaged"]
    assert len(told) == 1 and newest.name in told[0]["text"]
    logged = [event for event in read_events(folder / "events.jsonl") if event["event"] == "checkpoint_damaged"]
    assert len(logged) == 1
    assert older.name != newest.name


def damage(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


def test_a_resume_with_nothing_good_left_says_so_instead_of_starting_again(tmp_path: Path) -> None:
    run(tmp_path / "run", epochs=1)
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        damage(checkpoint)
    with pytest.raises(CheckpointDamaged, match="checkpoints/0"):
        run(None, resume=tmp_path / "run")


def test_another_model_or_course_is_refused_and_the_run_is_left_as_it_was(
    whole: tuple[Path, str, mh.History], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(folder, epochs=1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "events.jsonl"}
    other = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.raises(CheckpointMismatch, match=r"1\.weight.*not in this model"):
        train(other, fit={"run_dir": folder, "batch_size": BATCH, "lanes": 3}, **OPTIONS)
    changed: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 10}, "batch_size was 12, is 10"),
        ({"lanes": 2}, "lanes was 3, is 2"),
        ({"shuffle": False}, "shuffle was True, is False"),
    ]
    for setting, text in changed:
        with pytest.raises(CheckpointMismatch, match=text):
            run(folder, **setting)
    with pytest.raises(CheckpointMismatch, match=f"samples was {ROWS}, is {ROWS - 1}"):
        train(net(), (X[1:], Y[1:]), fit={"run_dir": folder, "batch_size": BATCH, "lanes": 3}, **OPTIONS)
    with pytest.raises(UsageError, match=r"holds checkpoints.*another run_dir"):
        run(folder, resume=False)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "events.jsonl"}
    assert {path.name for path in before if before[path] != after[path]} <= {"lock"}


def test_a_folder_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, epochs=1)
    code = (
        "import sys; from manyhands.train.run_folder import RunFolder\n"
        "lock = RunFolder.open(sys.argv[1]).lock(); print('held', flush=True); sys.stdin.read()"
    )
    source = str(Path(mh.__file__).parents[1])
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": source, "MANYHANDS_WARM": "0"},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunLocked, match=str(holder.pid)):
            run(folder)
        holder.communicate()
    run(folder, epochs=1)


def test_run_folders_are_numbered_and_false_leaves_nothing(
    run_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trainer, _ = train(fit={"run_dir": False})
    assert trainer.run_dir is None
    assert not run_root.exists() and list(Path.cwd().iterdir()) == []
    for number in (1, 2):
        trainer, _ = train(fit={"run_dir": None})
        assert trainer.run_dir == run_root / f"000{number}-sequential"
    assert list(Path.cwd().iterdir()) == []


def test_no_rule_for_saving_saves_nothing(tmp_path: Path) -> None:
    run(tmp_path / "run", epochs=1, checkpoint_every_s=None)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == []
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_more_checkpoints_can_be_kept(tmp_path: Path) -> None:
    run(tmp_path / "run", checkpoint_every_steps=3, keep=4, callbacks=[Lambda(on_step_end=lambda state: None)])
    steps = CheckpointStore(tmp_path / "run" / "checkpoints").steps()
    assert 2 <= len(steps) <= 4 and steps[-1] == 3 * STEPS


def test_a_failed_run_says_how_to_go_on_and_can(whole: tuple[Path, str, mh.History], tmp_path: Path) -> None:
    def fail(state: mh.State) -> None:
        if state.step == STEPS + 4:
            raise OSError("the callback failed")

    folder = tmp_path / "run"
    with pytest.raises(OSError, match="the callback failed") as caught:
        run(folder, checkpoint_every_steps=3, callbacks=[Lambda(on_step_end=fail)])
    assert any(f"resume='{folder}'" in note for note in caught.value.__notes__)
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    assert run(folder, workers=1)[0] == whole[1]


def test_skipped_steps_are_in_the_ledger_and_in_the_events(tmp_path: Path) -> None:
    poisoned = X.clone()
    poisoned[17] = math.nan
    model = mlp()
    settings = {"run_dir": tmp_path / "run", "batch_size": BATCH, "epochs": 2}
    _, history = train(model, (poisoned, Y), nan="skip", fit=settings)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert all(math.isfinite(loss) for loss in history.metrics["loss"])
    proof = read_ledger(tmp_path / "run" / "ledger").verify()
    assert proof.exact
    assert [sum(epoch.skipped.values()) for epoch in proof.epochs] in ([BATCH, BATCH], [6, BATCH], [BATCH, 6], [6, 6])
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "step_skipped"]
    assert len(events) == 2
