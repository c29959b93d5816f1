"""Local rounds and checkpoints: going on ends in the same bits, and a run may change its way of agreeing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROWS, X, Y, mlp, train
from torch import nn

import manyhands as mh
from manyhands.errors import CheckpointMismatch
from manyhands.train.callbacks import Lambda
from manyhands.train.checkpoint import CheckpointStore
from manyhands.train.ledger_file import read_ledger

BATCH = 12  # eight batches, the last with 6 rows for 3 shares
STEPS = -(-ROWS // BATCH)
LOCAL = mh.Local(every=3)  # rounds of 3, 3 and 2 batches


def net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(X.shape[1]), mlp(0.3))


def run(folder: Path, sync: Any = LOCAL, workers: int = 2, **fit: Any) -> tuple[str, mh.History]:
    settings = {"run_dir": folder, "epochs": 3, "lanes": 3, "batch_size": BATCH, "validation": (X, Y)} | fit
    options: dict[str, Any] = {"optimizer": "adamw", "schedule": "cosine", "clip": 1.0, "seed": 4}
    trainer, history = train(net(), workers=workers, sync=sync, fit=settings, **options)
    return mh.digest(trainer.model), history


def stop_at(step: int) -> mh.Callback:
    """Ends the run after the round that reaches ``step`` batches."""
    return Lambda(on_step_end=lambda state: state.stop("for the test") if state.step >= step else None)


def numbers(history: mh.History) -> dict[str, list[float]]:
    return {name: values for name, values in history.metrics.items() if name != "seconds"}


def saved(folder: Path) -> Any:
    checkpoint, _ = CheckpointStore(folder / "checkpoints").load_latest()
    assert checkpoint is not None
    return checkpoint


def proves(folder: Path) -> bool:
    proof = read_ledger(folder / "ledger").verify()
    return proof.exact and [epoch.once for epoch in proof.epochs] == [ROWS] * 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, mh.History]:
    """A run that nothing disturbed."""
    return run(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("step, kept", [(4, 6), (STEPS, STEPS), (STEPS + 1, STEPS + 3)])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resume_ends_in_the_same_bits(
    step: int, kept: int, workers: int, whole: tuple[str, mh.History], tmp_path: Path
) -> None:
    """After an odd and an even number of rounds, so from both banks of what the shares keep."""
    run(tmp_path / "run", callbacks=[stop_at(step)])
    assert saved(tmp_path / "run").step == kept
    digest, history = run(tmp_path / "run", workers=workers)
    assert digest == whole[0]
    assert numbers(history) == numbers(whole[1])
    assert proves(tmp_path / "run")


@pytest.mark.parametrize("step", [3, 6])
def test_what_a_codec_left_out_is_kept(step: int, tmp_path: Path) -> None:
    sync = mh.Local(every=3, codec="topk:0.1")
    expected = run(tmp_path / "whole", sync)[0]
    run(tmp_path / "run", sync, callbacks=[stop_at(step)])
    tensors = saved(tmp_path / "run").tensors
    kept = [tensor for name, tensor in tensors.items() if "/change_residual/" in name]
    assert len(kept) == 3 * 6 and any(tensor.any() for tensor in kept)
    assert not any("/residual/" in name for name in tensors), "all-reduce must not take it for its own"
    assert run(tmp_path / "run", sync, workers=1)[0] == expected


FRAGMENTS = mh.Local(every=4, fragments=2, codec="int8")


@pytest.mark.parametrize("step", [1, 3, 5, STEPS + 1])
def test_a_resume_between_the_turns_of_fragments(step: int, tmp_path: Path) -> None:
    """A share goes on from its own values of what was not agreed on when the run stopped."""
    expected = run(tmp_path / "whole", FRAGMENTS)[0]
    run(tmp_path / "run", FRAGMENTS, callbacks=[stop_at(step)])
    stopped = saved(tmp_path / "run")
    assert stopped.step == step + 1
    own = {name: tensor for name, tensor in stopped.tensors.items() if name.startswith("lanes/0/own/")}
    assert own and any(
        not torch.equal(tensor, stopped.tensors[name.replace("lanes/0/own/", "model/")]) for name, tensor in own.items()
    )
    assert run(tmp_path / "run", FRAGMENTS, workers=1)[0] == expected
    assert proves(tmp_path / "run")


def test_fragments_may_begin_and_end_with_a_resume(tmp_path: Path) -> None:
    """Where a share has no values of its own yet, it begins with the agreed ones."""
    digests = set()
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        run(folder, "allreduce", workers, callbacks=[stop_at(3)])
        run(folder, FRAGMENTS, workers, callbacks=[stop_at(5)])
        run(folder, mh.Local(every=4, codec="int8"), workers, callbacks=[stop_at(STEPS + 4)])
        digests.add(run(folder, FRAGMENTS, workers)[0])
        assert proves(folder)
    assert len(digests) == 1


def test_checkpoints_are_counted_in_batches(tmp_path: Path) -> None:
    run(tmp_path / "run", checkpoint_every_steps=5, keep=9, callbacks=[Lambda(on_step_end=lambda state: None)])
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.steps()[-1] == 3 * STEPS
    for step in store.steps():
        assert store.load(step).meta["sums"][0] == min(step % STEPS * BATCH, ROWS)


def test_from_all_reduce_to_local_and_back(tmp_path: Path) -> None:
    """Each in mid-epoch, and in the middle of what would be a round; the account is exact all the way."""
    digests = set()
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        run(folder, "allreduce", workers, callbacks=[stop_at(4)])
        moments = saved(folder).tensors
        run(folder, workers=workers, callbacks=[stop_at(STEPS + 1)])
        local = saved(folder)
        assert local.step == STEPS + 3 and local.meta["course"]["sync"] == "local"
        digest, history = run(folder, "allreduce", workers)
        assert proves(folder)
        assert history.epochs == [0, 1, 2] and all(math.isfinite(loss) for loss in history.metrics["loss"])
        digests.add(digest)
    assert len(digests) == 1
    name = "1.0.weight"
    assert moments[f"optimizer/{name}/step"] == 4
    # Four batches with all-reduce, then each share went on by itself from what was known: 2 + 2 + 3 batches.
    assert local.tensors[f"optimizer/{name}/step"] == STEPS + 3
    shares = [local.tensors[f"lanes/{lane}/inner/exp_avg/{name}"] for lane in range(3)]
    assert not torch.equal(shares[0], shares[1])
    torch.testing.assert_close(local.tensors[f"optimizer/{name}/exp_avg"], sum(shares) / 3)
    assert local.tensors[f"outer/{name}/momentum_buffer"].abs().max() > 0
    ended = saved(folder).tensors
    assert not any(key.startswith(("outer/", "lanes/")) for key in ended)
    assert ended[f"optimizer/{name}/step"] == 3 * STEPS
    assert f"optimizer/{name}/momentum_buffer" not in ended, "the outer momentum is nothing of the user's optimizer"


def test_with_other_lanes_rounds_and_optimizer(tmp_path: Path) -> None:
    """Lanes belong to the mathematics of one way of agreeing; another one may have others."""
    folder = tmp_path / "run"
    run(folder, "allreduce", callbacks=[stop_at(5)])
    run(folder, lanes=2, callbacks=[stop_at(7)])
    assert saved(folder).step == STEPS  # what was left of the round was one batch, the next one had two
    with pytest.raises(CheckpointMismatch, match="lanes was 2, is 3"):
        run(folder)
    run(folder, mh.Local(every=5, outer="average"), lanes=2, callbacks=[stop_at(STEPS + 5)])
    assert saved(folder).step == STEPS + 5
    settings = {"run_dir": folder, "epochs": 3, "lanes": 2, "batch_size": BATCH}
    train(net(), optimizer="momentum", sync=LOCAL, seed=4, fit=settings)
    assert proves(folder)


def test_another_batch_size_is_refused_whatever_the_sync(tmp_path: Path) -> None:
    run(tmp_path / "run", "allreduce", epochs=1)
    with pytest.raises(CheckpointMismatch, match="batch_size was 12, is 10"):
        run(tmp_path / "run", batch_size=10)
