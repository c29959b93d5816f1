"""trainer.save and mh.load, and the fingerprint of a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import CLASSES, FEATURES, X, mlp, train
from torch import nn

import manyhands as mh
from manyhands.errors import CheckpointError, CheckpointMismatch


class Plain(nn.Module):
    """Keeps what its constructor was given, as torch's own layers do."""

    def __init__(self, hidden: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.hidden, self.dropout = hidden, dropout
        self.body = nn.Sequential(nn.Linear(FEATURES, hidden), nn.BatchNorm1d(hidden), nn.Dropout(dropout))
        self.head = nn.Linear(hidden, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Secretive(nn.Module):
    """Forgets what its constructor was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    for number, model in enumerate((mlp(0.2), Plain(9))):
        trainer, _ = train(model)
        place = trainer.save(tmp_path / str(number))
        loaded = mh.load(place)
        assert mh.digest(loaded) == mh.digest(model)
        assert repr(loaded) == repr(model)
        assert torch.equal(mh.Trainer(loaded, workers=1).predict(X), trainer.predict(X))


def test_a_run_can_be_loaded_as_a_model(tmp_path: Path) -> None:
    trainer, _ = train(mlp(), fit={"run_dir": tmp_path / "run"})
    assert mh.digest(mh.load(tmp_path / "run")) == mh.digest(trainer.model)


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    trainer, _ = train(mlp())
    trainer.save(tmp_path / "model")
    trainer.fit((X, torch.zeros(len(X), dtype=torch.int64)), run_dir=False, progress="quiet")
    trainer.save(tmp_path / "model")
    assert mh.digest(mh.load(tmp_path / "model")) == mh.digest(trainer.model)


def test_a_model_that_cannot_be_described_is_loaded_into_one_that_is_given(tmp_path: Path) -> None:
    trainer, _ = train(Secretive(CLASSES))
    trainer.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"give the model: mh\.load\(path, model="):
        mh.load(tmp_path / "model")
    given = Secretive(CLASSES)
    assert mh.load(tmp_path / "model", model=given) is given
    assert mh.digest(given) == mh.digest(trainer.model)
    other = Secretive(CLASSES + 1)
    before = mh.digest(other)
    with pytest.raises(CheckpointMismatch, match=r"layer\.weight is \(3, 6\).*there, \(4, 6\)"):
        mh.load(tmp_path / "model", model=other)
    assert mh.digest(other) == before, "a refused load changed the model"


def test_a_flipped_bit_is_found_and_the_model_is_not_loaded(tmp_path: Path) -> None:
    mh.Trainer(mlp(), workers=1).save(tmp_path / "model")
    file = next((tmp_path / "model").rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        mh.load(tmp_path / "model")


def test_a_place_without_a_model_is_named(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=str(place)):
            mh.load(place)


def test_a_model_of_torch_is_loaded_in_a_new_process(tmp_path: Path) -> None:
    trainer, _ = train(mlp())
    trainer.save(tmp_path / "model")
    code = "import sys, manyhands as mh; print(mh.digest(mh.load(sys.argv[1])))"
    source = str(Path(mh.__file__).parents[1])
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    environment = {"PYTHONPATH": source, "MANYHANDS_WARM": "0"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout.split() == [mh.digest(trainer.model)], result.stderr


def test_the_fingerprint_tells_names_shapes_types_and_bytes_apart() -> None:
    def of(name: str, tensor: torch.Tensor) -> str:
        module = nn.Module()
        module.register_buffer(name, tensor)
        return mh.digest(module)

    zeros = torch.zeros(4)
    others = [
        of("b", zeros), of("a", zeros.view(2, 2)), of("a", zeros.int()), of("a", -zeros), of("a", zeros[:3]),
        of("a", torch.tensor(0.0)), of("a", zeros[:0]),
    ]  # fmt: skip
    assert len({of("a", zeros), *others}) == 8
    assert of("a", torch.zeros(4, 2).t()[0]) == of("a", zeros), "how it lies in memory does not matter"
