"""Bad input: each error says what was received, what is valid and what to do, before any process is started."""

from __future__ import annotations

import math
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import FEATURES, X, Y, memory_files, mlp, train, worker_processes
from torch import nn
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.engine import local
from manyhands.errors import DataError, ManyhandsError, ModelError, NotFinite, UsageError


class Frozen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Holder(nn.Module):
    """Carries something that no other process can have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        self.guard = {"inner": threading.Lock()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class LockedLoss:
    def __init__(self) -> None:
        self.mutex = threading.Lock()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)


class LockedData(Dataset[Any]):
    def __init__(self) -> None:
        self.handle = threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))


def foreign_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


# What is given, the type of the error, and the words that it must contain, in this order.
TRAINER: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "workers two": ({"workers": "two"}, UsageError, r"workers received 'two'; valid: an integer from 1 to 64"),
    "workers 0": ({"workers": 0}, UsageError, r"workers received 0; valid"),
    "workers -3": ({"workers": -3}, UsageError, r"workers received -3; valid"),
    "workers True": ({"workers": True}, UsageError, r"workers received True; valid"),
    "workers 2.0": ({"workers": 2.0}, UsageError, r"workers received 2.0; valid"),
    "workers upside down": ({"workers": (4, 2)}, UsageError, r"workers received \(4, 2\); valid"),
    "loss": ({"loss": "crossentropy"}, UsageError, r"unknown loss 'crossentropy'. Did you mean 'cross_entropy'\?"),
    "loss class": ({"loss": nn.MSELoss}, ModelError, r"loss is the class MSELoss; valid: an instance"),
    "loss sum": ({"loss": nn.MSELoss(reduction="sum")}, ModelError, r"reduction='sum'; valid: 'mean'"),
    "optimizer": ({"optimizer": "adamm"}, UsageError, r"unknown optimizer 'adamm'. Did you mean 'adam'\? Valid"),
    "optimizer number": ({"optimizer": 3}, ModelError, r"optimizer received 3; valid: a name"),
    "optimizer foreign": ({"optimizer": foreign_optimizer()}, ModelError, r"the model does not have; build"),
    "optimizer option": ({"optimizer": mh.optimizer("adam", rate=1)}, ModelError, r"cannot be built with .*rate"),
    "no optimizer": ({"optimizer": lambda p: 3}, ModelError, r"returned int; valid is a torch.optim.Optimizer"),
    "metric": ({"metrics": ["acuracy"]}, UsageError, r"unknown metric 'acuracy'. Did you mean 'accuracy'\? Valid"),
    "metric twice": ({"metrics": ["mae", "mae"]}, UsageError, r"two metrics are called 'mae'; valid"),
    "sync": ({"sync": "allreduc"}, UsageError, r"unknown sync 'allreduc'. Did you mean 'allreduce'\? Valid"),
    "codec": ({"sync": "allreduce:int9"}, UsageError, r"unknown codec 'int9'. Did you mean 'int\d'\? Valid: bf16"),
    "codec setting": ({"sync": "allreduce:topk:7"}, UsageError, r"fraction of codec topk received 7; valid"),
    "layout": ({"layout": "hole"}, UsageError, r"unknown layout 'hole'. Did you mean 'whole'\? Valid"),
    "engine": ({"engine": "locale"}, UsageError, r"unknown engine 'locale'. Did you mean 'local'\? Valid"),
    "device": ({"device": "cuda:0"}, UsageError, r"unknown device 'cuda:0'..* Valid: auto, cpu"),
    "precision": ({"precision": "bf-16"}, UsageError, r"unknown precision 'bf-16'. Did you mean 'bf16'\? Valid"),
    "nan": ({"nan": "ignore"}, UsageError, r"unknown nan 'ignore'..* Valid: skip, stop"),
    "schedule": ({"schedule": "cosin"}, UsageError, r"unknown schedule 'cosin'. Did you mean 'cosine'\? Valid"),
    "clip": ({"clip": -1.0}, UsageError, r"ClipNorm received -1.0; valid is a number above 0"),
    "clip True": ({"clip": True}, UsageError, r"received True; valid"),
    "clip word": ({"clip": "norm"}, UsageError, r"clip received 'norm'; valid"),
    "seed": ({"seed": -1}, UsageError, r"seed received -1; valid is an integer of at least 0"),
    "accumulate": ({"accumulate": 0}, UsageError, r"accumulate received 0; valid is an integer of at least 1"),
    "threads": ({"threads": 1.5}, UsageError, r"threads received 1.5; valid"),
    "model": ({"model": "mlp"}, ModelError, r"model received str; valid is a torch.nn.Module"),
    "model frozen": ({"model": mlp().requires_grad_(False)}, ModelError, r"no trainable parameters; set requires_grad"),
    "model empty": ({"model": Frozen()}, ModelError, r"no trainable parameters"),
    "model lazy": ({"model": lazy()}, ModelError, r"0.weight has no shape yet; call the model once"),
    "model unpicklable": ({"model": Holder()}, UsageError, r"model.*cannot be sent.*guard\['inner'\].*lock.*must be"),
    "loss unpicklable": ({"loss": LockedLoss()}, UsageError, r"loss.*cannot be sent to a worker: .*mutex.*lock"),
    "data unpicklable": ({"data": LockedData()}, UsageError, r"data.*cannot be sent to a worker: .*handle.*lock"),
    "an option": ({"wrokers": 2}, UsageError, r"unknown option 'wrokers'. Did you mean 'workers'\? Valid: accumulate"),
    "limits": ({"limits": 5}, UsageError, r"limits received 5; valid: mh.Limits"),
    "LBFGS by name": ({"optimizer": "lbfgs"}, ModelError, r"LBFGS evaluates the loss several times.*valid"),
    "LBFGS": ({"optimizer": torch.optim.LBFGS}, ModelError, r"LBFGS evaluates the loss several times.*valid"),
}  # fmt: skip

FIT: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "empty": ({"data": (X[:0], Y[:0])}, DataError, r"empty: 0 rows; valid: at least one row"),
    "empty dataset": ({"data": torch.utils.data.TensorDataset(X[:0], Y[:0])}, DataError, r"empty.*valid: at least one"),
    "empty generator": ({"data": iter(())}, DataError, r"empty.*valid: at least one"),
    "lengths": ({"data": (X, Y[:-1])}, DataError, r"differ in length: 90 and 89 rows"),
    "no target": ({"data": X}, DataError, r"no target: received torch.Tensor.*Pass a tuple \(x, y\)"),
    "a path": ({"data": "rows.csv"}, DataError, r"data is str 'rows.csv'; valid: .*read_table"),
    "objects": ({"data": (np.array([["a"], ["b"]], object), [0, 1])}, DataError, r"x is .*object.*valid: numbers"),
    "validation": ({"validation": (X, Y[:3])}, DataError, r"differ in length: 90 and 3 rows"),
    "batch < lanes": ({"batch_size": 2, "lanes": 4}, UsageError, r"batch_size=2 is smaller than lanes=4.*fewer"),
    "batch 0": ({"batch_size": 0}, UsageError, r"batch_size received 0; valid is an integer of at least 1"),
    "batch word": ({"batch_size": "big"}, UsageError, r"batch_size received 'big'; valid"),
    "epochs": ({"epochs": 0}, UsageError, r"epochs received 0; valid"),
    "epochs True": ({"epochs": True}, UsageError, r"epochs received True; valid"),
    "lanes": ({"lanes": -1}, UsageError, r"lanes received -1; valid"),
    "callback": ({"callbacks": [print]}, UsageError, r"a callback is .*print.*; valid: an instance"),
    "progress": ({"progress": "loud"}, UsageError, r"unknown .*'loud'.*[Vv]alid"),
    "an option": ({"epoch": 2}, UsageError, r"unknown option 'epoch'. Did you mean 'epochs'\? Valid: batch_size"),
    "no seconds": ({"checkpoint_every_s": 0}, UsageError, r"checkpoint_every_s received 0; valid is a number above 0"),
    "seconds": ({"checkpoint_every_s": "a"}, UsageError, r"checkpoint_every_s received 'a'; valid"),
    "no steps": ({"checkpoint_every_steps": 0}, UsageError, r"checkpoint_every_steps received 0; valid is an integer"),
    "steps": ({"checkpoint_every_steps": 2.5}, UsageError, r"checkpoint_every_steps received 2.5; valid"),
    "keep": ({"keep": 1, "run_dir": None}, UsageError, r"keep=1: at least 2"),
    "two folders": ({"run_dir": "a", "resume": "b"}, UsageError, r"run_dir='a' and resume='b' name two folders"),
    "resume nothing": ({"resume": "runs/0042-none", "run_dir": None}, UsageError, r"no run folder .*0042-none"),
}  # fmt: skip


class Watch(threading.Thread):
    """Sees every worker that lives for more than a moment."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[int] = set()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.005):
            self.seen.update(worker_processes())

    def stop(self) -> set[int]:
        self._done.set()
        self.join(10)
        return self.seen


@pytest.fixture
def nothing_started() -> Iterator[None]:
    """Fails when the call started a worker or kept memory."""
    local.warm()
    before, watch = memory_files(), Watch()
    watch.start()
    yield
    assert watch.stop() == set()
    assert memory_files() <= before, "the arena of the refused run is still held"


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("case", TRAINER)
def test_a_wrong_trainer_is_refused(case: str) -> None:
    options, kind, words = TRAINER[case]
    options = dict(options)
    with pytest.raises(kind, match=f"(?s){words}") as caught:
        train(options.pop("model", None), options.pop("data", (X, Y)), fit={"run_dir": None}, **options)
    assert isinstance(caught.value, ManyhandsError)


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("case", FIT)
def test_a_wrong_fit_is_refused(case: str) -> None:
    options, kind, words = FIT[case]
    options = {"run_dir": None} | options
    with pytest.raises(kind, match=f"(?s){words}") as caught:
        train(None, options.pop("data", (X, Y)), fit=options)
    assert isinstance(caught.value, ManyhandsError)


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_model_that_cannot_be_sent_is_refused_by_every_verb(verb: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be sent.*guard"):
        getattr(mh.Trainer(Holder()), verb)((X, Y))


HOOKS: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], object], str]] = {
    "gradient": (
        lambda model, optimizer: model[0].weight.register_post_accumulate_grad_hook(print),
        r"0\.weight has a hook that runs when its gradient is complete.*valid: parameter\.register_hook",
    ),
    "step": (
        lambda model, optimizer: optimizer.register_step_post_hook(print),
        r"SGD has hooks around its step.*valid: none",
    ),
}


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("case", HOOKS)
def test_hooks_that_would_not_run_are_refused(case: str) -> None:
    hook, words = HOOKS[case]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook(model, optimizer)
    with pytest.raises(ModelError, match=words):
        train(model, optimizer=optimizer)


@pytest.mark.parametrize("case", ["batch < lanes", "epochs", "callback", "validation"])
def test_a_refused_call_leaves_no_run_folder(case: str, run_root: Path) -> None:
    with pytest.raises(UsageError):
        train(fit={"run_dir": None} | FIT[case][0])
    assert not [entry.name for entry in run_root.glob("*-*")]


@pytest.mark.parametrize("wrong", [0, -1, "two", True, 1.5, 1000])
def test_resize_refuses_nonsense(wrong: Any) -> None:
    with pytest.raises(UsageError, match=f"resize received {wrong!r}; valid"):
        mh.Trainer(mlp(), workers=2).resize(wrong)


def test_resize_stays_in_the_range() -> None:
    with pytest.raises(UsageError, match=r"resize received 5; .*workers=\(1, 3\)"):
        mh.Trainer(mlp(), workers=(1, 3)).resize(5)


def test_a_callback_stays_in_the_range() -> None:
    ask = mh.Lambda(on_epoch_begin=lambda state: state.resize(5))
    with pytest.raises(UsageError, match=r"resize received 5; .*workers=\(1, 2\)"):
        train(workers=(1, 2), fit={"callbacks": [ask]})


OPTIONS: dict[str, tuple[Callable[[], object], str]] = {
    "sync": (lambda: mh.Server(polcy="async"), r"unknown option 'polcy'. Did you mean 'policy'\?"),  # type: ignore[call-arg]
    "policy": (lambda: mh.Server(policy=3), r"policy received 3; valid: sync, async, .*judge"),  # type: ignore[arg-type]
    "staleness": (lambda: mh.Server(staleness=4), r"staleness=4 and policy='sync': staleness goes with"),
    "no pause": (lambda: mh.Limits(pause_s=-1), r"pause_s of Limits received -1; valid is a number above 0"),
    "hang": (lambda: mh.Limits(hang_s="x"), r"hang_s of Limits received 'x'; valid"),  # type: ignore[arg-type]
    "lanes": (lambda: mh.launch(print, lanes=-2), r"lanes received -2; valid is an integer of at least 1"),
    "codec": (lambda: mh.launch(print, sync="allreduce:int8"), r"launch received sync=.*valid is allreduce without a"),
    "launch": (lambda: mh.launch(print, worker=2), r"unknown option 'worker'. Did you mean 'workers'\?"),  # type: ignore[call-arg]
}


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_refused(case: str) -> None:
    make, words = OPTIONS[case]
    with pytest.raises(UsageError, match=words):
        make()


def test_auto_is_never_more_than_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with more cores than seats."""
    from manyhands.train.team import worker_range

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(200)))
    assert worker_range("auto") == (64, 64)


NO_SCALARS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "vector": (
        lambda output, target: (output - 1).square().mean(1),
        r"a tensor of shape \(\d+,\) and type torch\.float32",
    ),
    "number": (lambda output, target: 1.0, r"1.0"),
    "nothing": (lambda output, target: None, r"None"),
}


@pytest.mark.parametrize("case", NO_SCALARS)
def test_a_loss_that_is_no_scalar(case: str) -> None:
    loss, words = NO_SCALARS[case]
    with pytest.raises(ModelError, match=f"the loss .*returned {words}; valid.* scalar"):
        train(loss=loss)


def test_a_loss_that_is_not_finite_names_worker_step_and_sample() -> None:
    poisoned = X.clone()
    poisoned[17] = math.nan
    with pytest.raises(NotFinite, match=r"not finite in step \d+, lane \d: sample 17\. .*nan='skip'") as caught:
        train(mlp(), (poisoned, Y))
    assert any(note.startswith("raised in worker ") for note in caught.value.__notes__)


def test_an_error_of_the_users_keeps_its_type_and_its_line() -> None:
    class Mine(Exception):
        pass

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise Mine("this line")

    with pytest.raises(Mine, match="this line") as caught:
        train(Broken())
    assert any("worker" in note and "step 0" in note and "samples [" in note for note in caught.value.__notes__)
    assert 'raise Mine("this line")' in str(caught.value.__cause__)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError, match=rf"cannot write into the run folder {tmp_path}/file/run: .*needed \d+ bytes, free \d+"
    ):
        train(fit={"run_dir": tmp_path / "file" / "run"})


@pytest.mark.parametrize("options, reason", [("size=32k", "No space left"), ("size=1m,ro", "Read-only")])
def test_a_full_or_read_only_disk(tmp_path: Path, options: str, reason: str) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    try:
        with pytest.raises(UsageError, match=rf"{tmp_path}.*{reason}.*needed \d+ bytes, free \d+ bytes"):
            train(fit={"run_dir": tmp_path / "run"})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_pickle_is_refused_and_not_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"weights": Bomb()}, tmp_path / "model.pt")
    with pytest.raises(ManyhandsError, match=r"model\.pt.*pickle"):
        train(fit={"run_dir": None, "resume": tmp_path / "model.pt"})
    with pytest.raises(ManyhandsError, match=r"model\.pt.*pickle"):
        mh.load(tmp_path / "model.pt")
    assert not (tmp_path / "exploded").exists()
