"""User code raises, crashes again and again, or runs out of memory: the run stops soon, with the user's own error."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import At, Scene
from scripts import fit_script, running, still_there
from torch import nn

import manyhands as mh
from manyhands.core.order import epoch_order
from manyhands.errors import WorkerCrashed

pytestmark = pytest.mark.fault


class Unlucky(ValueError):
    """An error of the user's own, with an argument it cannot do without."""

    def __init__(self, number: int, *, hint: str) -> None:
        super().__init__(number, hint)
        self.number, self.hint = number, hint

    def __reduce__(self) -> Any:
        return _unlucky, (self.number, self.hint)


def _unlucky(number: int, hint: str) -> Unlucky:
    return Unlucky(number, hint=hint)


def raise_unlucky() -> None:
    raise Unlucky(13, hint="thirteen")


def test_the_error_keeps_its_type_and_names_the_place(tmp_path: Path) -> None:
    sample = 40
    step = epoch_order(0, 0, 400).tolist().index(sample) // 16
    with pytest.raises(Unlucky) as caught:
        Scene(lambda: At(sample, raise_unlucky)).run(2)
    assert (caught.value.number, caught.value.hint) == (13, "thirteen")
    (note,) = [note for note in caught.value.__notes__ if note.startswith("raised in worker")]
    assert f"step {step}," in note
    assert f"{sample}" in note.partition("samples")[2]
    assert "in raise_unlucky" in str(caught.value.__cause__), "the user's frame is not visible"


@pytest.mark.parametrize("where", ["loss", "data", "metric", "optimizer"])
def test_errors_anywhere_arrive_once(where: str) -> None:
    model = Scene().make_model()
    options: dict[str, Any] = {"optimizer": "adam", "workers": 2}
    data: Any = Scene().data
    if where == "loss":
        options["loss"] = _broken
    elif where == "metric":
        options["metrics"] = [_broken]
    elif where == "optimizer":
        options["optimizer"] = lambda params: BrokenLater(params, lr=0.1)
    else:
        data = BrokenData()
    with pytest.raises(KeyError, match="broken"):
        mh.Trainer(model, **options).fit(data, batch_size=16, lanes=4, run_dir=False, progress="quiet")


@pytest.mark.parametrize("sync", ["server", "server:int8", "async", mh.Server(policy="async", replicas=1)])
def test_an_error_in_a_server_names_the_server(sync: Any) -> None:
    trainer = mh.Trainer(
        Scene().make_model(), optimizer=lambda params: BrokenLater(params, lr=0.1), workers=2, sync=sync
    )
    with pytest.raises(KeyError, match="broken") as caught:
        trainer.fit(Scene().data, batch_size=16, run_dir=False, progress="quiet")
    # A backup may be the first one to fail.
    assert any(note.startswith("raised in server") for note in caught.value.__notes__)


def _broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise KeyError("broken")


class BrokenData(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index == 50:
            raise KeyError("broken")
        return torch.zeros(20), 0


class BrokenLater(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if mh.worker_slot() is not None:
            raise KeyError("broken")


def crash() -> None:
    os._exit(7)


def test_a_crash_loop_ends_soon() -> None:
    begun = time.monotonic()
    with pytest.raises(WorkerCrashed, match=r"worker processes died in step \d+ .* exited with code 7"):
        Scene(lambda: At(40, crash)).run(2)
    assert time.monotonic() - begun < 30


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_loop_of_kills_ends_soon() -> None:
    """What a system that is out of memory does to whoever computes a certain sample."""
    begun = time.monotonic()
    with pytest.raises(WorkerCrashed, match=r"worker processes died in step \d+ .* killed by SIGKILL\. .*memory"):
        Scene(lambda: At(40, be_killed)).run(2)
    assert time.monotonic() - begun < 30


class Hungry(nn.Module):
    """Asks for more memory than its process may have."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit = 4 << 30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.empty(8 << 30, dtype=torch.uint8)
        out: torch.Tensor = self.head(x)
        return out


def test_out_of_memory_is_the_users_error() -> None:
    begun = time.monotonic()
    with pytest.raises((MemoryError, RuntimeError), match=r"(?i)memory") as caught:
        Scene(Hungry).run(2)
    assert not isinstance(caught.value, mh.ManyhandsError)
    assert any("raised in worker" in note for note in caught.value.__notes__)
    assert time.monotonic() - begun < 30


def test_a_class_of_the_script_itself_can_be_caught(tmp_path: Path) -> None:
    """An error class that exists only in ``__main__`` comes back as that very class, and is printed once."""
    script = fit_script(str(tmp_path / "run"))
    script = script.replace(
        "model = Sluggish()",
        """
class Mine(Exception): pass
class Failing(Mlp):
    def forward(self, x):
        if (x[:, -1] == 40).any(): raise Mine("as planned")
        return super().forward(x)
model = Failing()""",
    ).replace("trainer.fit(", "try:\n  trainer.fit(")
    caught = "except Mine as error:\n  print('mine', error.args[0], flush=True)\n  raise\n"
    script = script.replace('print("digest"', caught + 'print("digest"')
    with running(script) as program:
        assert program.wait_for("mine") == ["as", "planned"]
        text = program.end()
    assert program.process.returncode == 1
    assert len(re.findall(r"^(?:__main__\.)?Mine: as planned$", text, re.MULTILINE)) == 2  # as it is, and as its cause
    assert "raised in worker" in text
    assert still_there([program.process.pid]) == []
