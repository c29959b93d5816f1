"""A poisoned sample is named, and stops the run or is left out, as the user chose."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from scenes import Cnn, Mlp, Scene, proof, table

import manyhands as mh
from manyhands.core.order import epoch_order
from manyhands.errors import NotFinite

pytestmark = pytest.mark.fault

SAMPLES, BATCH, BAD = 400, 16, 123


def poisoned() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = table(SAMPLES)
    x[BAD, 0] = math.nan
    return x, y


def step_of(sample: int, epoch: int) -> int:
    return epoch * (SAMPLES // BATCH) + epoch_order(0, epoch, SAMPLES).tolist().index(sample) // BATCH


@pytest.mark.parametrize("workers", [1, 3])
def test_step_and_sample_are_named(workers: int) -> None:
    with pytest.raises(NotFinite) as caught:
        Scene(data=poisoned()).run(workers)
    assert f"not finite in step {step_of(BAD, 0)}, lane" in str(caught.value)
    assert f"sample {BAD}." in str(caught.value)
    assert any("raised in worker" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("make_model", [Mlp, Cnn])
def test_skip_leaves_the_step_out_and_says_so(make_model: type, tmp_path: Path) -> None:
    scene = Scene(make_model, data=poisoned(), epochs=2, trainer={"nan": "skip"})
    one, three = scene.run(1), scene.run(3, run_dir=tmp_path / "run", checkpoint_every_s=60.0)
    assert one.digest == three.digest
    assert all(bool(torch.isfinite(tensor).all()) for tensor in three.model.state_dict().values())
    assert all(math.isfinite(loss) for loss in three.history.metrics["loss"])
    shown = proof(tmp_path / "run")
    assert shown.exact
    assert [epoch.skipped for epoch in shown.epochs] == [{"the loss was not finite": BATCH}] * 2
    assert [epoch.once for epoch in shown.epochs] == [SAMPLES - BATCH] * 2


def test_a_skipped_step_changes_no_weight() -> None:
    scene = Scene(data=poisoned(), epochs=1, trainer={"nan": "skip"})
    digests: dict[int, str] = {}

    class Watch(mh.Callback):
        def on_step_end(self, state: mh.State) -> None:
            digests[state.step] = mh.digest(state.model)

    scene.run(2, callbacks=[Watch()])
    bad = step_of(BAD, 0)
    assert digests[bad + 1] == digests[bad]
    assert digests[bad + 2] != digests[bad + 1]
