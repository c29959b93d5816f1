"""A codec in a Trainer: how it is chosen, that a resume ends in the same bits, and what is counted and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROWS, X, Y, mlp, train

import manyhands as mh
from manyhands.commands.explain import explain
from manyhands.errors import UsageError
from manyhands.train.callbacks import Lambda
from manyhands.train.checkpoint import CheckpointStore
from manyhands.train.strategy import resolve_sync

BATCH = 12
STEPS = -(-ROWS // BATCH)


def run(folder: Path | bool, codec: Any, workers: int = 2, **fit: Any) -> tuple[str, mh.History]:
    settings = {"run_dir": folder, "epochs": 3, "lanes": 3, "batch_size": BATCH} | fit
    trainer, history = train(mlp(0.3), workers=workers, fit=settings, sync=mh.AllReduce(codec=codec), seed=4)
    return mh.digest(trainer.model), history


def stop_at(step: int) -> mh.Callback:
    return Lambda(on_step_end=lambda state: state.stop("for the test") if state.step == step else None)


@pytest.mark.parametrize("step", [4, STEPS + 1])
@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_a_resume_at_another_worker_count_ends_in_the_same_bits(codec: str, step: int, tmp_path: Path) -> None:
    """After an even and after an odd number of steps: what lanes keep lies in either bank."""
    expected, whole = run(False, codec)
    run(tmp_path / "run", codec, callbacks=[stop_at(step)])
    checkpoint, _ = CheckpointStore(tmp_path / "run" / "checkpoints").load_latest()
    assert checkpoint is not None and checkpoint.step == step
    kept = [tensor for name, tensor in checkpoint.tensors.items() if "/residual/" in name]
    assert len(kept) == 3 * 4 and any(tensor.any() for tensor in kept)
    digest, history = run(tmp_path / "run", codec, workers=1)
    assert digest == expected
    assert history.metrics["loss"] == whole.metrics["loss"]


def test_without_what_lanes_kept_the_bits_would_be_others(tmp_path: Path) -> None:
    """A run may go on under another codec, or none; what it kept for the old one is left."""
    expected = run(False, "int8")[0]
    for number, codec in enumerate((None, "fp32", "topk")):
        folder = tmp_path / str(number)
        run(folder, "int8", callbacks=[stop_at(4)])
        digest, history = run(folder, codec)
        assert digest != expected and history.epochs == [0, 1, 2]


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_bytes_are_counted_and_told(codec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"run_dir": tmp_path / "run", "batch_size": 16, "lanes": 2, "epochs": 2, "progress": "plain"}
    still = mh.Limits(balance_s=0)  # lanes stay where they are, one with each worker
    trainer, history = train(workers=2, fit=settings, sync=f"allreduce:{codec}", limits=still)
    steps, parameters = 2 * -(-ROWS // 16), [p.numel() for p in trainer.model.parameters()]
    made = resolve_sync(f"allreduce:{codec}").codec
    assert not isinstance(made, str) and made is not None
    frames = sum(made.encode(torch.zeros(count)).size_bytes for count in parameters)
    # Summed over P workers, a ring takes (P - 1) frames of everything, and (P - 1) results of that size, in each step.
    assert history.bytes["received"] == steps * sum(made.payload_bytes(count) for count in parameters)
    assert steps * (frames - 1) <= history.bytes["sent"] <= steps * frames
    assert history.bytes["samples"] == 2 * ROWS
    told = f"sent {history.bytes['sent'] / (2 * ROWS):,.0f} · received {history.bytes['received'] / (2 * ROWS):,.0f} "
    assert capsys.readouterr().out.splitlines()[-1].endswith(f" · {told}bytes per sample")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["bytes"], record["codec"]) == (history.bytes, codec)
    assert mh.History.from_dict(history.to_dict()).bytes == history.bytes
    assert explain(str(tmp_path / "run")) == 0
    said = capsys.readouterr().out
    assert f"sync allreduce · codec {codec}\n" in said and f"bytes: {told}bytes per sample\n" in said


def test_without_a_codec_nothing_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, history = run(tmp_path / "run", None, progress="plain", epochs=1)
    assert history.bytes == {} and "bytes" not in capsys.readouterr().out
    assert explain(str(tmp_path / "run")) == 0
    assert "bytes" not in (said := capsys.readouterr().out) and "codec" not in said


@pytest.mark.parametrize("sync, updates", [("async", 6), (mh.Local(every=3, asynchronous=True), 2)], ids=str)
def test_asynchronous_servers_are_brought_the_numbers_as_they_are(sync: Any, updates: int) -> None:
    trainer, history = train(workers=1, fit={"batch_size": 15, "epochs": 2}, sync=sync)
    moved = 2 * updates * sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert history.bytes == {"sent": moved, "received": moved, "samples": 2 * ROWS}


def test_a_second_fit_goes_on() -> None:
    trainer = mh.Trainer(mlp(), workers=2, sync="allreduce:topk:0.1")
    first = trainer.fit((X, Y), epochs=2, batch_size=BATCH, run_dir=False, progress="quiet")
    second = trainer.fit((X, Y), epochs=2, batch_size=BATCH, run_dir=False, progress="quiet")
    assert second.metrics["loss"][-1] < first.metrics["loss"][0]


def test_words() -> None:
    assert resolve_sync("allreduce").codec is None and mh.AllReduce().codec is None
    assert resolve_sync("allreduce:int8") == mh.AllReduce(codec="int8")
    assert resolve_sync("allreduce:topk:0.05") == mh.AllReduce(codec="topk:0.05") == resolve_sync("auto:topk:0.05")
    for wrong in ("allreduce:", "allreduce:int9"):
        with pytest.raises(UsageError, match=r"unknown codec .* Valid: bf16, fp32, int4, int8, sign, topk"):
            resolve_sync(wrong)
    with pytest.raises(UsageError, match=r"unknown sync 'allredce:int8'. Did you mean 'allreduce'\?"):
        resolve_sync("allredce:int8")
