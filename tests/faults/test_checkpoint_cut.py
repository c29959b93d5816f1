"""A checkpoint is a cut between two steps: it holds the state of exactly its step, however busy the workers are."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenes import Killer, Mlp, Scene, table
from torch import nn

import manyhands as mh
from manyhands.train.checkpoint import CheckpointStore

pytestmark = pytest.mark.fault


def wide() -> nn.Module:
    return Mlp(width=3000, features=101)


class Record(mh.Callback):
    """The digest after every step."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}

    def on_step_end(self, state: mh.State) -> None:
        self.digests[state.step] = mh.digest(state.model)


@pytest.mark.parametrize("lanes, kills", [(1, 0), (4, 0), (4, 4)])
def test_every_checkpoint_is_the_state_of_its_step(lanes: int, kills: int, tmp_path: Path) -> None:
    scene = Scene(wide, optimizer="momentum", data=table(96, 101), epochs=16, batch_size=8, lanes=lanes)
    record = Record()
    scene.run(1, callbacks=[record])
    killer = Killer(kills, first=2, last=60) if kills else None
    saving = {"checkpoint_every_steps": 1, "keep": 1000, "run_dir": tmp_path / "run"}
    scene.run(3, killer, **saving)
    assert killer is None or killer.fired == kills
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1000)
    assert len(store.steps()) >= 5
    model = scene.make_model()
    for step in store.steps():
        tensors = store.load(step).tensors
        model.load_state_dict(
            {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
        )
        assert mh.digest(model) == record.digests[step], f"the checkpoint of step {step} is torn"
