"""Models, losses, metrics, data sets and callbacks of ``__main__``, in a function, or in a notebook's cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh

# No guard: a process that ran this file again would show in "runs" and would start workers of its own.
CELLS = [
    """
import json, os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import manyhands as mh

with Path("runs.txt").open("a") as file:
    file.write(f"{os.getpid()}\\n")
""",
    """
SCALE = 2.0
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return SCALE * self.layer(x)


def loss(output, target):
    return nn.functional.cross_entropy(output, target) + 0.01 * output.square().mean()


def share(output, target):
    return (output.argmax(1) == target).float().mean()


class Points(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.arange(4) * 0.1 + index % 5
        return x + 0.1 * torch.randn(4), index % 2


pids = []


class Log(mh.Callback):
    def on_epoch_end(self, state):
        pids.append(os.getpid())
        print("epoch", state.epoch)
""",
    """
def job():
    class Inner(Net):
        def forward(self, x):
            return super().forward(x) + offset

    offset = 0.5
    model = Inner()
    trainer = mh.Trainer(model, loss=loss, metrics=[share], workers=2)
    history = trainer.fit(Points(), epochs=2, batch_size=8, callbacks=[Log()], run_dir=False, progress="quiet")
    return model, history, trainer.predict(Points())


model, history, rows = job()
""",
    """
print(json.dumps({
    "digest": mh.digest(model), "metrics": sorted(history.metrics), "rows": list(rows.shape),
    "runs": Path("runs.txt").read_text().split(), "pid": os.getpid(), "callbacks": pids,
}))
""",
]
SCRIPT = "\n".join(CELLS)


def start(command: list[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    folder.mkdir()
    source = str(Path(mh.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
        **options,
    )


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that the script prints as a file, and through standard input; both run at the same time."""
    place = tmp_path_factory.mktemp("scripts")
    (place / "job.py").write_text(SCRIPT)
    running = {
        "file": start([str(place / "job.py")], place / "file"),
        "stdin": start(["-"], place / "stdin", stdin=subprocess.PIPE),
    }
    lines = {}
    for name, process in running.items():
        text, errors = process.communicate(SCRIPT if name == "stdin" else None, timeout=90)
        assert process.returncode == 0, errors
        assert errors == ""
        lines[name] = text.splitlines()
    return lines


@pytest.mark.parametrize("way", ["file", "stdin"])
def test_a_script_runs_once_and_its_callbacks_in_its_own_process(way: str, outputs: dict[str, list[str]]) -> None:
    *printed, last = outputs[way]
    found = json.loads(last)
    assert printed == ["epoch 0", "epoch 1"]
    assert found["runs"] == [str(found["pid"])]
    assert found["callbacks"] == [found["pid"]] * 2
    assert found["rows"] == [40, 2]
    assert {"loss", "share"} <= set(found["metrics"])


def test_a_notebook_gives_what_the_script_gives(
    outputs: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells that are run one by one in a namespace, and the last two again, as a user would."""
    monkeypatch.chdir(tmp_path)
    cells: dict[str, Any] = {"__name__": "__main__"}
    for cell in (*CELLS, *CELLS[1:]):
        exec(compile(cell, "<cell>", "exec"), cells)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    expected = json.loads(outputs["file"][-1])["digest"]
    assert [line["digest"] for line in lines] == [expected] * 2
    assert json.loads(outputs["stdin"][-1])["digest"] == expected
