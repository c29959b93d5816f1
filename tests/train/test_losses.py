"""Named losses are torch's means, without torch's silent broadcasts; losses of the user's are checked."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.errors import ModelError, UsageError
from manyhands.train.losses import LOSSES, check_scalar, resolve_loss

LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
VALUES, TRUTH = LOGITS[:, :1], torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    "name, output, target, expected",
    [
        ("cross_entropy", LOGITS, CLASSES, nn.CrossEntropyLoss()(LOGITS, CLASSES)),
        ("nll", LOGITS.log_softmax(1), CLASSES, nn.CrossEntropyLoss()(LOGITS, CLASSES)),
        ("token_cross_entropy", LOGITS.view(2, 3, 3), CLASSES.view(2, 3), nn.CrossEntropyLoss()(LOGITS, CLASSES)),
        ("mse", VALUES, TRUTH, (VALUES[:, 0] - TRUTH).square().mean()),
        ("mae", VALUES, TRUTH, (VALUES[:, 0] - TRUTH).abs().mean()),
        ("l1", VALUES, TRUTH, (VALUES[:, 0] - TRUTH).abs().mean()),
        ("huber", VALUES * 5, TRUTH, nn.HuberLoss()(VALUES[:, 0] * 5, TRUTH)),
        ("bce_with_logits", VALUES, TRUTH.long(), nn.BCEWithLogitsLoss()(VALUES[:, 0], TRUTH)),
        ("bce", VALUES.sigmoid(), TRUTH.long(), nn.BCEWithLogitsLoss()(VALUES[:, 0], TRUTH)),
        ("poisson_nll", VALUES, TRUTH, nn.PoissonNLLLoss()(VALUES[:, 0], TRUTH)),
        ("kl_div", LOGITS.log_softmax(1), LOGITS.softmax(1), torch.tensor(0.0)),
    ],
)
def test_named_losses(name: str, output: Tensor, target: Tensor, expected: Tensor) -> None:
    resolved, loss = resolve_loss(name)
    assert resolved == name
    assert float(loss(output, target)) == pytest.approx(float(expected), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy", "nll", "token_cross_entropy", "kl_div"}))
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_regression_losses_take_targets_of_any_type(name: str, dtype: torch.dtype) -> None:
    weights = torch.full((6, 1), 0.5, requires_grad=True)
    resolve_loss(name)[1](weights, TRUTH.to(dtype)).backward()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()


def test_weighted_means_of_lanes_are_the_mean_of_the_batch() -> None:
    for name in ("cross_entropy", "mse", "kl_div"):
        _, loss = resolve_loss(name)
        target = CLASSES if name == "cross_entropy" else LOGITS.softmax(1)
        lanes = [slice(0, 1), slice(1, 3), slice(3, 6)]
        total = sum(loss(LOGITS[lane], target[lane]) * (lane.stop - lane.start) for lane in lanes) / 6
        assert float(total) == pytest.approx(float(loss(LOGITS, target)), rel=1e-6)


def test_shapes_that_torch_would_broadcast_are_refused() -> None:
    with pytest.raises(ModelError, match=r"output has shape \(6, 3\) and the target \(6,\)"):
        resolve_loss("mse")[1](LOGITS, TRUTH)


def test_losses_of_the_users() -> None:
    def my_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean()

    module = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert resolve_loss(my_loss) == ("my_loss", my_loss)
    assert resolve_loss(module) == ("CrossEntropyLoss", module)
    assert resolve_loss(lambda output, target: output.sum())[0] == "loss"
    assert resolve_loss(partial(functional.mse_loss, reduction="mean"))[0] == "partial"


@pytest.mark.parametrize(
    "item, kind, message",
    [
        ("cross_entorpy", UsageError, "unknown loss 'cross_entorpy'. Did you mean 'cross_entropy'?"),
        (nn.MSELoss, ModelError, r"the class MSELoss; valid: an instance of it, MSELoss\(\)"),
        (nn.MSELoss(reduction="sum"), ModelError, "reduction='sum'; valid: 'mean'"),
        (nn.MSELoss(reduction="none"), ModelError, "reduction='none'"),
        (nn.Linear(2, 1), ModelError, r"trainable parameters \(weight, bias\)"),
        (3, ModelError, r"loss is 3 of type int; valid: a callable \(output, target\)"),
        (None, ModelError, "loss is None"),
    ],
)
def test_bad_losses(item: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message.replace("?", r"\?")):
        resolve_loss(item)


@pytest.mark.parametrize("value", [torch.ones(3), torch.tensor(1), 0.5, None])
def test_loss_that_is_not_a_scalar(value: Any) -> None:
    with pytest.raises(ModelError, match=r"the loss returned .*valid is a scalar tensor"):
        check_scalar(value)
    assert check_scalar(torch.tensor(0.5)) == 0.5


@pytest.mark.parametrize("item", [*LOSSES, nn.MSELoss(), lambda output, target: output.mean()], ids=str)
def test_losses_survive_cloudpickle(item: Any) -> None:
    name, loss = pickle.loads(cloudpickle.dumps(resolve_loss(item)))
    assert name
    assert callable(loss)
