"""Metrics agree with scikit-learn, however the rows are cut into batches."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor

from manyhands.errors import ModelError, UsageError
from manyhands.train.metrics import F1, METRICS, R2, Metric, Precision, Recall, TopK, resolve_metrics

ROWS, CLASSES = 60, 7
generator = torch.Generator().manual_seed(3)
SCORES = torch.randn(ROWS, CLASSES, generator=generator)
LABELS = torch.randint(0, CLASSES - 1, (ROWS,), generator=generator)  # the last class has no row
LOGITS = torch.randn(ROWS, 1, generator=generator)
YES = torch.randint(0, 2, (ROWS,), generator=generator)
PREDICTED = SCORES.argmax(1)
VALUES = torch.randn(ROWS, 3, generator=generator)
TRUTH = VALUES + 0.3 * torch.randn(ROWS, 3, generator=generator)

CASES: dict[str, tuple[Metric, Tensor, Tensor, float]] = {
    "accuracy": (resolve_metrics("accuracy")[0], SCORES, LABELS, sk.accuracy_score(LABELS, PREDICTED)),
    "accuracy, column of labels": (
        resolve_metrics("accuracy")[0],
        SCORES,
        LABELS[:, None],
        sk.accuracy_score(LABELS, PREDICTED),
    ),
    "accuracy, one-hot": (
        resolve_metrics("accuracy")[0],
        SCORES,
        torch.nn.functional.one_hot(LABELS, CLASSES).float(),
        sk.accuracy_score(LABELS, PREDICTED),
    ),
    "accuracy, one logit": (resolve_metrics("accuracy")[0], LOGITS, YES, sk.accuracy_score(YES, LOGITS[:, 0] > 0)),
    "accuracy, pixels": (
        resolve_metrics("accuracy")[0],
        SCORES.view(6, 10, CLASSES).transpose(1, 2),
        LABELS.view(6, 10),
        sk.accuracy_score(LABELS, PREDICTED),
    ),
    "token_accuracy": (
        resolve_metrics("token_accuracy")[0],
        SCORES.view(6, 10, CLASSES),
        LABELS.view(6, 10),
        sk.accuracy_score(LABELS, PREDICTED),
    ),
    "binary_accuracy": (
        resolve_metrics("binary_accuracy")[0],
        VALUES,
        (TRUTH > 0).float(),
        sk.accuracy_score((TRUTH > 0).flatten(), (VALUES > 0).flatten()),
    ),
    "top5": (TopK(5), SCORES, LABELS, sk.top_k_accuracy_score(LABELS, SCORES, k=5, labels=range(CLASSES))),
    "top2": (
        resolve_metrics("top2")[0],
        SCORES,
        LABELS,
        sk.top_k_accuracy_score(LABELS, SCORES, k=2, labels=range(CLASSES)),
    ),
    "mse": (resolve_metrics("mse")[0], VALUES, TRUTH, sk.mean_squared_error(TRUTH, VALUES)),
    "rmse": (resolve_metrics("rmse")[0], LOGITS, YES, sk.root_mean_squared_error(YES, LOGITS[:, 0])),
    "mae": (resolve_metrics("mae")[0], VALUES, TRUTH, sk.mean_absolute_error(TRUTH, VALUES)),
    "r2": (resolve_metrics("r2")[0], VALUES[:, :1], TRUTH[:, 0], sk.r2_score(TRUTH[:, 0], VALUES[:, 0])),
    "r2, three outputs": (R2(outputs=3), VALUES, TRUTH, sk.r2_score(TRUTH, VALUES)),
    "precision": (Precision(), LOGITS, YES, sk.precision_score(YES, LOGITS[:, 0] > 0)),
    "recall": (Recall(), LOGITS, YES, sk.recall_score(YES, LOGITS[:, 0] > 0)),
    "f1": (F1(), LOGITS, YES, sk.f1_score(YES, LOGITS[:, 0] > 0)),
    "f1, two columns": (F1(), SCORES[:, :2], YES, sk.f1_score(YES, SCORES[:, :2].argmax(1))),
    "macro precision": (
        Precision(classes=CLASSES),
        SCORES,
        LABELS,
        sk.precision_score(LABELS, PREDICTED, average="macro", zero_division=0),
    ),
    "macro recall": (
        Recall(classes=CLASSES),
        SCORES,
        LABELS,
        sk.recall_score(LABELS, PREDICTED, average="macro", zero_division=0),
    ),
    "macro f1": (F1(classes=CLASSES), SCORES, LABELS, sk.f1_score(LABELS, PREDICTED, average="macro", zero_division=0)),
    "macro f1, absent classes": (F1(classes=40), SCORES, LABELS, sk.f1_score(LABELS, PREDICTED, average="macro")),
}


def measure(metric: Metric, output: Tensor, target: Tensor, cuts: list[int]) -> float:
    bounds = [0, *sorted({cut for cut in cuts if cut < len(output)} - {0}), len(output)]
    total = np.zeros(metric.width)
    for start, stop in itertools.pairwise(bounds):
        sums = metric.update(output[start:stop], target[start:stop])
        assert len(sums) == metric.width
        total += sums
    return metric.result(total.tolist(), len(output))


@pytest.mark.parametrize("case", CASES)
@given(cuts=st.lists(st.integers(0, ROWS), max_size=6))
def test_agrees_with_scikit_learn_for_any_batches(case: str, cuts: list[int]) -> None:
    metric, output, target, expected = CASES[case]
    assert measure(metric, output, target, cuts) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_metrics_survive_cloudpickle(case: str) -> None:
    metric, output, target, expected = CASES[case]
    again = pickle.loads(cloudpickle.dumps(metric))
    assert again.name == metric.name
    assert measure(again, output, target, []) == pytest.approx(expected, rel=1e-6)


def test_outputs_may_have_a_gradient() -> None:
    (metric,) = resolve_metrics("mse")
    sums = metric.update(VALUES.clone().requires_grad_(), TRUTH)
    assert all(isinstance(number, float) for number in sums)


def test_ignored_targets_do_not_count() -> None:
    labels = torch.tensor([0, -100, 1])
    scores = torch.tensor([[9.0, 0], [9, 0], [9, 0]])
    (accuracy,) = resolve_metrics("accuracy")
    assert accuracy.update(scores, labels) == [1.0, 2.0]
    assert Precision(classes=2).update(scores, labels) == [1.0, 0.0, 2.0, 0.0, 1.0, 1.0]


def test_functions_are_weighted_by_rows() -> None:
    def bias(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean()

    (metric,) = pickle.loads(cloudpickle.dumps(resolve_metrics(bias)))
    assert metric.name == "bias"
    expected = float((VALUES - TRUTH).mean())
    assert measure(metric, VALUES, TRUTH, [1, 2, 40]) == pytest.approx(expected, rel=1e-5)


def test_functions_may_take_outputs_that_are_trees() -> None:
    (metric,) = resolve_metrics([lambda output, target: output["a"][0].mean()])
    assert metric.name == "metric"
    assert metric.update({"a": (torch.tensor([1.0, 3.0]),)}, None) == [4.0, 2.0]


def test_nothing_measured_is_not_a_number() -> None:
    for name, make in METRICS.items():
        if name not in ("precision", "recall", "f1"):  # 0 by scikit-learn's convention
            assert math.isnan(make().result([0.0] * make().width, 0)), name


def test_resolving_lists() -> None:
    named = resolve_metrics(["accuracy", "top3", F1(classes=3)])
    assert [metric.name for metric in named] == ["accuracy", "top3", "f1"]
    assert resolve_metrics(None) == resolve_metrics([]) == []
    assert all(isinstance(make(), Metric) for make in METRICS.values())


@pytest.mark.parametrize(
    "items, message",
    [
        ("acuracy", r"unknown metric 'acuracy'. Did you mean 'accuracy'\? Valid: accuracy, binary_accuracy"),
        (["top0"], "unknown metric 'top0'"),
        ([3], r"a metric is 3 of type int; valid: a callable"),
        ([F1], r"a metric is the class F1; valid: an instance of it, F1\(\)"),
        (["mse", "mse"], "two metrics are called 'mse'"),
        ([type("F", (F1,), {"name": "loss"})()], "a metric is called 'loss', which the history uses"),
    ],
)
def test_bad_metrics(items: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_metrics(items)


@pytest.mark.parametrize(
    "metric, output, target, message",
    [
        (F1(), SCORES, LABELS, r"f1 was made for 2 classes and received class \d; valid: F1\(classes=...\)"),
        (R2(), VALUES, TRUTH, r"received 3; valid: R2\(outputs=3\)"),
        (TopK(9), SCORES, LABELS, r"top9 needs at least 9 classes; the output has shape \(60, 7\)"),
        (resolve_metrics("mse")[0], VALUES, YES, r"output has shape \(60, 3\) and the target \(60,\)"),
        (resolve_metrics("accuracy")[0], (SCORES,), LABELS, "'accuracy' needs a tensor; the model returned tuple"),
        (
            resolve_metrics(lambda output, target: output)[0],
            VALUES,
            TRUTH,
            "'metric' returned Tensor; valid: one",
        ),
    ],
)
def test_outputs_that_do_not_fit(metric: Metric, output: Any, target: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        metric.update(output, target)
