"""``sync="local"``: against the same rounds written as plain PyTorch, and everything a fit does beside training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROWS, X, Y, digest_of, mlp, one_thread, train
from torch import nn
from torch.nn import functional

import manyhands as mh
from manyhands.comm.scaled import Int8
from manyhands.core.order import epoch_order, lane_slice
from manyhands.errors import ManyhandsError, ModelError, NotFinite, UsageError
from manyhands.recipes.digits import digits_mlp
from manyhands.train.callbacks import Lambda
from manyhands.train.ledger_file import read_ledger
from manyhands.train.schedule import Course
from manyhands.train.strategy import resolve_sync

BATCH, LANES, EPOCHS = 16, 4, 3  # 90 = 5 × 16 + 10 rows: the last batch is ragged


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def rounds_in_plain_torch(
    build: Callable[[Any], torch.optim.Optimizer], every: int, outer: Any, rate: float, clip: float | None = None
) -> tuple[nn.Module, list[float]]:
    """The same mathematics without manyhands: a model and an optimizer for each share, and one for all."""
    agreed, losses, step = mlp(), [], 0
    shares = [mlp() for _ in range(LANES)]
    inner = [build(share.parameters()) for share in shares]
    outside = outer(agreed.parameters())
    batches = -(-ROWS // BATCH)
    for epoch in range(EPOCHS):
        order, total = epoch_order(0, epoch, ROWS), 0.0
        for first in range(0, batches, every):
            counts = [0] * LANES
            for lane, (share, optimizer) in enumerate(zip(shares, inner, strict=True)):
                share.load_state_dict(agreed.state_dict())
                for batch in range(first, min(first + every, batches)):
                    start, stop = lane_slice(batch, lane, samples=ROWS, batch_size=BATCH, lanes=LANES)
                    rows = torch.from_numpy(order[start:stop])
                    optimizer.param_groups[0]["lr"] = rate * (1 - (step + batch - first) / (EPOCHS * batches))
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(share(X[rows]), Y[rows])
                    loss.backward()
                    if clip is not None:
                        nn.utils.clip_grad_norm_(share.parameters(), clip)
                    optimizer.step()
                    total += float(loss.detach()) * len(rows)
                    counts[lane] += len(rows)
            step += min(first + every, batches) - first
            with torch.no_grad():
                for index, parameter in enumerate(agreed.parameters()):
                    moved = [parameter - list(share.parameters())[index] for share in shares]
                    parameter.grad = sum(
                        (change * (count / sum(counts)) for change, count in zip(moved, counts, strict=True)),
                        torch.zeros_like(parameter),
                    )
            outside.step()
        losses.append(total / ROWS)
    return agreed, losses


class WarmedInTorch(torch.optim.SGD):
    """Torch's own Nesterov, with a momentum of 0, 1/6, 2/7, and so on up to 0.3."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5, momentum=0.3, nesterov=True)
        self.agreements = 0

    def step(self) -> None:  # type: ignore[override]
        self.agreements += 1
        warm = min((self.agreements - 1) / (self.agreements + 4), 0.3)
        self.param_groups[0]["momentum"] = max(warm, 1e-30)  # at 0 torch would not remember the change
        super().step()


@pytest.mark.parametrize("build, clip", [(momentum, None), (adam, 0.3)])
@pytest.mark.parametrize("outer", ["average", "nesterov"])
@pytest.mark.parametrize("every", [4, 50])
def test_rounds_are_those_of_plain_torch(every: int, outer: str, build: Any, clip: float | None) -> None:
    """The schedule counts batches, the clip is the share's own, state stays with the share, and rows weigh."""
    settings: dict[str, Any] = {
        "average": lambda p: torch.optim.SGD(p, lr=1.0),
        "nesterov": WarmedInTorch,
    }
    sync = mh.Local(every=every, outer=outer, outer_lr=0.5, outer_momentum=0.3)
    fit = {"epochs": EPOCHS, "batch_size": BATCH, "lanes": LANES}
    trainer, history = train(optimizer=build, sync=sync, schedule="linear", clip=clip, fit=fit)
    rate = build([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    with one_thread():
        expected, losses = rounds_in_plain_torch(build, every, settings[outer], rate, clip)
    assert history.metrics["loss"] == pytest.approx(losses, rel=1e-4)
    for mine, theirs in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def fragments_in_plain_torch(every: int, fragments: list[list[int]], rate: float) -> nn.Module:
    """The same for parameters that are agreed on in turns: a share keeps its own values of the others."""
    agreed, shares = mlp(), [mlp() for _ in range(LANES)]
    inner = [torch.optim.Adam(share.parameters(), lr=rate) for share in shares]
    outside = [torch.optim.SGD([list(agreed.parameters())[i] for i in part], lr=1.0) for part in fragments]
    batches, stride = -(-ROWS // BATCH), every // len(fragments)
    counts = torch.zeros(len(fragments), LANES)
    for epoch in range(EPOCHS):
        order = epoch_order(0, epoch, ROWS)
        for batch in range(batches):
            for lane, (share, optimizer) in enumerate(zip(shares, inner, strict=True)):
                start, stop = lane_slice(batch, lane, samples=ROWS, batch_size=BATCH, lanes=LANES)
                rows = torch.from_numpy(order[start:stop])
                optimizer.zero_grad()
                functional.cross_entropy(share(X[rows]), Y[rows]).backward()
                optimizer.step()
                counts[:, lane] += len(rows)
            turn = (batch + 1) // stride - 1
            due = [turn % len(fragments)] if (batch + 1) % stride == 0 else []
            for part in range(len(fragments)) if batch == batches - 1 else due:
                with torch.no_grad():
                    for index in fragments[part]:
                        parameter = list(agreed.parameters())[index]
                        parameter.grad = torch.zeros_like(parameter)
                        for lane, share in enumerate(shares):
                            weight = counts[part, lane] / counts[part].sum()
                            parameter.grad += weight * (parameter - list(share.parameters())[index])
                    outside[part].step()
                    for share in shares:
                        for index in fragments[part]:
                            list(share.parameters())[index].copy_(list(agreed.parameters())[index])
                counts[part] = 0
    return agreed


@pytest.mark.parametrize("every", [2, 4, 8])
def test_fragments_are_those_of_plain_torch(every: int) -> None:
    """Turns begin anew with each epoch, the last batch is ragged, and the end of an epoch agrees on everything."""
    cut = [[0, 1], [2, 3]]  # by layers: weight and bias
    sync = mh.Local(every=every, outer="average", fragments=len(cut))
    trainer, _ = train(optimizer=adam, sync=sync, fit={"epochs": EPOCHS, "batch_size": BATCH, "lanes": LANES})
    with one_thread():
        expected = fragments_in_plain_torch(every, cut, 0.01)
    for mine, theirs in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def large() -> nn.Module:
    """Its second layer writes its gradient straight into the lane."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(X.shape[1], 512), nn.ReLU(), nn.Linear(512, 600), nn.ReLU(), nn.Linear(600, 3))


@pytest.mark.parametrize("make_model", [mlp, large])
def test_averaging_after_every_step_of_sgd_is_all_reduce(make_model: Callable[[], nn.Module]) -> None:
    options: dict[str, Any] = {"optimizer": mh.optimizer("sgd", lr=0.1), "fit": {"epochs": 3, "lanes": 4}}
    one, history = train(make_model(), sync=mh.Local(every=1, outer="average"), **options)
    other, expected = train(make_model(), **options)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert history.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)


def test_buffers_dropout_and_accumulation() -> None:
    """BatchNorm's averages are those of the shares, put together; micro-batches change no more than rounding."""

    def net(dropout: float) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(X.shape[1]), mlp(dropout))

    fit = {"epochs": 2, "lanes": 2}
    digests = {digest_of(net(0.3), sync=mh.Local(every=3), workers=workers, fit=fit) for workers in (1, 2)}
    assert len(digests) == 1
    one, two = (train(mlp(), sync=mh.Local(every=3), accumulate=pieces, fit=fit)[0].model for pieces in (1, 2))
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    model = net(0.0)
    train(model, sync=mh.Local(every=3), fit=fit)
    mean, counted = model[0].running_mean, model[0].num_batches_tracked  # type: ignore[index]
    assert counted == 2 * -(-ROWS // 16)
    torch.testing.assert_close(mean, X.mean(0), atol=0.2, rtol=0)


def test_steps_are_counted_in_batches_and_validation_is_exact(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    models: list[nn.Module] = []
    watch = Lambda(
        on_step_end=lambda state: seen.append((state.step, dict(state.metrics))),
        on_epoch_end=lambda state: models.append(copy.deepcopy(state.model)),
    )
    fit = {"epochs": 2, "lanes": 4, "callbacks": [watch], "run_dir": tmp_path / "run", "validation": (X[:31], Y[:31])}
    trainer, history = train(sync=mh.Local(every=4), metrics=["accuracy"], fit=fit)
    assert [step for step, _ in seen] == [4, 6, 10, 12]  # six batches in an epoch
    rows = [64, 26, 64, 26]
    mean = sum(count * metrics["loss"] for count, (_, metrics) in zip(rows[:2], seen[:2], strict=True)) / ROWS
    assert mean == pytest.approx(history.metrics["loss"][0])
    for epoch, model in enumerate(models):
        with torch.no_grad(), one_thread():
            expected = float(functional.cross_entropy(model.eval()(X[:31]), Y[:31]))
        assert history.metrics["val_loss"][epoch] == pytest.approx(expected, rel=1e-5)
    assert trainer.evaluate((X[:31], Y[:31]))["loss"] == pytest.approx(history.metrics["val_loss"][-1], rel=1e-6)
    proof = read_ledger(tmp_path / "run" / "ledger").verify()
    assert proof.exact and [epoch.once for epoch in proof.epochs] == [ROWS, ROWS]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_sample() -> None:
    poisoned = X.clone()
    poisoned[17] = math.nan
    with pytest.raises(NotFinite, match=r"lane \d: sample 17"):
        train(data=(poisoned, Y), sync=mh.Local(every=4), fit={"lanes": 4})


def test_or_is_left_out_of_its_share_alone(tmp_path: Path) -> None:
    poisoned = X.clone()
    poisoned[17] = math.nan
    for workers in (1, 3):
        model = nn.Sequential(nn.BatchNorm1d(X.shape[1]), mlp())
        folder = tmp_path / str(workers)
        fit = {"run_dir": folder, "epochs": 2, "lanes": 4, "batch_size": 24}  # six rows for a share, or at the end four
        _, history = train(model, (poisoned, Y), sync=mh.Local(every=4), nan="skip", workers=workers, fit=fit)
        assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
        assert all(math.isfinite(loss) for loss in history.metrics["loss"])
        proof = read_ledger(folder / "ledger").verify()
        assert proof.exact
        for epoch in proof.epochs:
            assert sum(epoch.skipped.values()) in (4, 5, 6) and epoch.once == ROWS - sum(epoch.skipped.values())


def test_a_second_fit_goes_on_with_the_mean_of_the_shares_state() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = mh.Trainer(model, optimizer=optimizer, workers=2, sync=mh.Local(every=4))
    fit: dict[str, Any] = {"batch_size": BATCH, "lanes": 4, "run_dir": False, "progress": "quiet", "epochs": 3}
    first = trainer.fit((X, Y), **fit)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0 * 6}
    assert all(state["exp_avg_sq"].max() > 0 for state in optimizer.state.values())
    second = trainer.fit((X, Y), **fit)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0 * 6}
    assert second.metrics["loss"][-1] < first.metrics["loss"][-1]


def test_fewer_rows_than_shares_in_a_round() -> None:
    """With rounds of one batch the last one has rows for two of four shares; the others keep what they have."""
    data = (X[:66], Y[:66])
    digests = {
        digest_of(mlp(), data, sync=mh.Local(every=1), workers=workers, fit={"epochs": 3, "lanes": 4})
        for workers in (1, 3)
    }
    assert len(digests) == 1


def test_a_codec_compresses_the_changes_and_bytes_are_counted_by_the_round() -> None:
    options: dict[str, Any] = {"optimizer": adam, "limits": mh.Limits(balance_s=0)}  # a share stays with its worker
    fit = {"epochs": 4, "batch_size": BATCH, "lanes": 2}
    digests = {
        digest_of(sync=mh.Local(every=4, codec="int8"), workers=workers, fit=fit, **options) for workers in (1, 2)
    }
    assert len(digests) == 1
    assert digests != {digest_of(sync=mh.Local(every=4), fit=fit, **options)}
    assert digest_of(sync=mh.Local(every=4, codec="fp32"), fit=fit, **options) == digest_of(
        sync=mh.Local(every=4), fit=fit, **options
    )
    trainer, history = train(sync=mh.Local(every=4, codec="int8"), fit=fit, **options)
    rounds, parameters = 4 * 2, [p.numel() for p in trainer.model.parameters()]
    frames = sum(Int8().encode(torch.zeros(count)).size_bytes for count in parameters)
    # Summed over P workers: (P - 1) frames of everything and (P - 1) results, which travel in the same way, per round.
    assert history.bytes["received"] == rounds * sum(Int8().payload_bytes(count) for count in parameters)
    assert rounds * (frames - 1) <= history.bytes["sent"] <= rounds * frames
    assert history.bytes["samples"] == 4 * ROWS
    assert resolve_sync("local:int8") == mh.Local(codec="int8")


def test_an_agreement_on_a_fragment_moves_the_bytes_of_that_fragment() -> None:
    """Six batches an epoch: one fragment is agreed on after two, the other after four, both after six."""
    sync = mh.Local(every=4, codec="int8", fragments=2)
    fit = {"epochs": 3, "batch_size": BATCH, "lanes": 2}
    trainer, history = train(optimizer=adam, sync=sync, fit=fit, limits=mh.Limits(balance_s=0))
    whole = 3 * 2  # each parameter is agreed on twice an epoch
    parameters = [p.numel() for p in trainer.model.parameters()]
    frames = sum(Int8().encode(torch.zeros(count)).size_bytes for count in parameters)
    assert history.bytes["received"] == whole * sum(Int8().payload_bytes(count) for count in parameters)
    assert whole * (frames - 3) <= history.bytes["sent"] <= whole * frames
    digests = {digest_of(optimizer=adam, sync=sync, fit=fit, workers=workers) for workers in (1, 2, 3)}
    assert digests == {mh.digest(trainer.model)}


@pytest.mark.parametrize("every, begun", [(4, 0), (4, 7), (1, 5), (50, 13), (3, 18)])
def test_rounds_and_batches(every: int, begun: int) -> None:
    """Rounds never cross an epoch, cover every batch once, and the first may be what is left of one."""
    course = Course(samples=90, batch_size=16, lanes=4, every=every, begun=begun)
    turns = Course(samples=90, batch_size=16, lanes=4, every=every, begun=begun, fragments=2)
    number, seen = course.round_of(begun), list[int]()
    assert course.done(number) == begun
    while course.done(number) < 30:
        batches = course.batches(number)
        assert 1 <= len(batches) <= every and len({batch // 6 for batch in batches}) == 1
        assert {course.round_of(batch) for batch in batches} == {number}
        assert sum(course.lane_rows(number)) == sum(course.batch_rows(batch) for batch in batches)
        seen += batches
        number += 1
        assert turns.done(number) == course.done(number), "who agrees on what does not move a round"
    assert seen == list(range(begun, 30))


@pytest.mark.slow
def test_digits_as_well_as_all_reduce() -> None:
    """The recipe as it is: one point of the 361 test images is four of them."""
    recipe, accuracy = digits_mlp(), {}
    data = recipe.data()
    for sync in ("allreduce", "local"):
        torch.manual_seed(0)
        fit = {"epochs": recipe.epochs, "batch_size": recipe.batch_size, "lanes": 4}
        trainer, _ = train(
            recipe.model(), data.train, optimizer=recipe.optimizer, metrics=["accuracy"], sync=sync, fit=fit
        )
        accuracy[sync] = trainer.evaluate(data.test)["accuracy"]
    assert accuracy["allreduce"] > 0.97
    assert accuracy["local"] >= accuracy["allreduce"] - 0.01


BAD: dict[str, tuple[dict[str, Any], type[ManyhandsError], str]] = {
    "every 0": ({"every": 0}, UsageError, r"every received 0; valid is an integer of at least 1"),
    "every 1.5": ({"every": 1.5}, UsageError, r"every received 1.5; valid"),
    "every True": ({"every": True}, UsageError, r"every received True; valid"),
    "outer": ({"outer": "nesterof"}, UsageError, r"unknown outer 'nesterof'. Did you mean 'nesterov'\?"),
    "rate": ({"outer_lr": 0}, UsageError, r"outer_lr received 0; valid is a number above 0"),
    "rate nan": ({"outer_lr": math.nan}, UsageError, r"outer_lr received nan; valid"),
    "codec": ({"codec": "int9"}, UsageError, r"unknown codec 'int9'. Did you mean 'int8'\?"),
    "fragments": ({"every": 4, "fragments": 3}, UsageError, r"fragments received 3; valid is a divisor of every=4"),
    "pace": ({"pace": "sped"}, UsageError, r"unknown pace 'sped'. Did you mean 'speed'\?"),
    "quorum": ({"quorum": 1.5}, UsageError, r"quorum received 1.5; valid is a number above 0 and below 1"),
    "grace": ({"grace_s": -1}, UsageError, r"grace_s received -1; valid is a number above 0"),
    "no fragments": ({"fragments": 0}, UsageError, r"fragments received 0; valid"),
    "momentum": ({"outer_momentum": 1.0}, UsageError, r"outer_momentum received 1.0; valid.*above 0 and below 1"),
}


@pytest.mark.parametrize("settings, kind, text", BAD.values(), ids=BAD)
def test_bad_settings_are_refused(settings: dict[str, Any], kind: type[ManyhandsError], text: str) -> None:
    with pytest.raises(kind, match=text):
        mh.Local(**settings)


def test_what_cannot_be_done_locally_is_refused() -> None:
    with pytest.raises(UsageError, match=r"fragments received 8; valid is 1 to 2, the layers of the model"):
        train(sync=mh.Local(every=8, fragments=8))
    with pytest.raises(ModelError, match=r"Adafactor keeps state shaped unlike its parameters.*valid for local steps"):
        train(optimizer=torch.optim.Adafactor, sync="local")
    with pytest.raises(UsageError, match=r"launch received sync='local'; valid is allreduce"):
        mh.launch(print, workers=1, sync="local")
