"""Metrics as sums, so that they are exact over any number of batches, lanes and workers.

``update`` turns a batch into a few sums, sums are added, and ``result`` turns the total into the value. A mean of
batch means would depend on how the rows were cut; a ratio of sums does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from manyhands.errors import ModelError, UsageError, unknown_name
from manyhands.train.losses import match_shape

__all__ = [
    "F1",
    "R2",
    "Accuracy",
    "BinaryAccuracy",
    "CallableMetric",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "TokenAccuracy",
    "TopK",
    "resolve_metrics",
]

IGNORED_CLASS = -100
"""Torch's losses leave out targets with this class number, so the metrics do."""


@runtime_checkable
class Metric(Protocol):
    """What the trainer needs of a metric."""

    name: str
    width: int

    def update(self, output: Any, target: Any) -> Sequence[float]:
        """``width`` sums over the rows of a batch."""
        ...

    def result(self, sums: Sequence[float], count: int) -> float:
        """The value, from the sums over all batches and the number of rows in them."""
        ...


class _Mean:
    """A mean of something per element: the sums are its total and the number of elements."""

    name: str
    width = 2

    def result(self, sums: Sequence[float], count: int) -> float:
        return sums[0] / sums[1] if sums[1] else math.nan


class Accuracy(_Mean):
    """The share of right answers; classes in dimension 1, or one logit per row for two classes."""

    name = "accuracy"

    def update(self, output: Any, target: Any) -> Sequence[float]:
        predicted, actual = _predictions(_tensor(output, self.name), target)
        return _count_right(predicted == actual, actual)


class TokenAccuracy(_Mean):
    """The share of right answers where the classes are in the last dimension: (rows, tokens, classes)."""

    name = "token_accuracy"

    def update(self, output: Any, target: Any) -> Sequence[float]:
        return _count_right(_tensor(output, self.name).argmax(-1) == target, target)


class BinaryAccuracy(_Mean):
    """The share of right yes-or-no answers, element by element: logits against 0 and 1."""

    name = "binary_accuracy"

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def update(self, output: Any, target: Any) -> Sequence[float]:
        output = _tensor(output, self.name)
        right = (output > self.threshold) == (match_shape(output, target) > 0.5)
        return [float(torch.count_nonzero(right)), float(right.numel())]


class TopK(_Mean):
    """The share of rows whose class is among the ``k`` highest outputs."""

    def __init__(self, k: int = 5) -> None:
        self.k = k
        self.name = f"top{k}"

    def update(self, output: Any, target: Any) -> Sequence[float]:
        output = _tensor(output, self.name)
        if output.dim() < 2 or output.shape[1] < self.k:
            raise ModelError(f"{self.name} needs at least {self.k} classes; the output has shape {tuple(output.shape)}")
        best = output.topk(self.k, dim=1).indices
        return _count_right((best == target.unsqueeze(1)).any(dim=1), target)


class MeanSquaredError(_Mean):
    """The mean of squared differences."""

    name = "mse"

    def update(self, output: Any, target: Any) -> Sequence[float]:
        difference = _difference(output, target, self.name)
        return [float(difference.square().sum()), float(difference.numel())]


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of squared differences over all rows."""

    name = "rmse"

    def result(self, sums: Sequence[float], count: int) -> float:
        return math.sqrt(super().result(sums, count))


class MeanAbsoluteError(_Mean):
    """The mean of absolute differences."""

    name = "mae"

    def update(self, output: Any, target: Any) -> Sequence[float]:
        difference = _difference(output, target, self.name)
        return [float(difference.abs().sum()), float(difference.numel())]


class R2:
    """The share of the target's variance that is explained; over several outputs, the mean of their shares."""

    name = "r2"

    def __init__(self, outputs: int = 1) -> None:
        self.outputs = outputs
        self.width = 3 * outputs + 1

    def update(self, output: Any, target: Any) -> Sequence[float]:
        difference = _difference(output, target, self.name)
        rows = len(difference)
        difference = difference.reshape(rows, -1)
        if difference.shape[1] != self.outputs:
            raise ModelError(
                f"r2 was made for {self.outputs} outputs and received {difference.shape[1]}; "
                f"valid: R2(outputs={difference.shape[1]})"
            )
        actual = target.detach().double().reshape(rows, -1)
        sums = torch.cat([difference.square().sum(0), actual.sum(0), actual.square().sum(0)])
        return [*sums.tolist(), float(rows)]

    def result(self, sums: Sequence[float], count: int) -> float:
        rows, outputs = sums[-1], self.outputs
        by_output = zip(sums[:outputs], sums[outputs : 2 * outputs], sums[2 * outputs : -1], strict=True)
        shares = []
        for left, total, squares in by_output:
            variation = squares - total * total / rows if rows else 0.0
            shares.append(1 - left / variation if variation > 0 else math.nan)
        return sum(shares) / len(shares)


class _Confusion:
    """Counts per class: right answers, answers, and targets.

    Without ``classes`` there are two, and class 1 is the one looked for; with ``classes`` the value is the mean over
    the classes that occur (macro average).
    """

    name: str

    def __init__(self, classes: int | None = None) -> None:
        self.classes = classes
        self.width = 3 * (classes or 2)

    def update(self, output: Any, target: Any) -> Sequence[float]:
        predicted, actual = _predictions(_tensor(output, self.name), target)
        known = actual != IGNORED_CLASS
        predicted, actual = predicted[known], actual[known]
        number = self.width // 3
        highest = int(max(predicted.max(), actual.max())) if len(actual) else 0
        if highest >= number:
            raise ModelError(
                f"{self.name} was made for {number} classes and received class {highest}; valid: "
                f"{type(self).__name__}(classes=...) with the number of classes"
            )
        counted = (predicted[predicted == actual], predicted, actual)
        return [float(n) for values in counted for n in torch.bincount(values, minlength=number).tolist()]

    def result(self, sums: Sequence[float], count: int) -> float:
        number = self.width // 3
        by_class = list(zip(sums[:number], sums[number : 2 * number], sums[2 * number :], strict=True))
        if self.classes is None:
            return self.ratio(*by_class[1])
        values = [self.ratio(*counts) for counts in by_class if counts[1] or counts[2]]
        return sum(values) / len(values) if values else math.nan

    def ratio(self, right: float, answers: float, targets: float) -> float:
        raise NotImplementedError


class Precision(_Confusion):
    """Of the answers that name a class, the share that is right; 0 where no answer names it."""

    name = "precision"

    def ratio(self, right: float, answers: float, targets: float) -> float:
        return right / answers if answers else 0.0


class Recall(_Confusion):
    """Of the rows of a class, the share that was found; 0 where the class has no row."""

    name = "recall"

    def ratio(self, right: float, answers: float, targets: float) -> float:
        return right / targets if targets else 0.0


class F1(_Confusion):
    """The harmonic mean of precision and recall."""

    name = "f1"

    def ratio(self, right: float, answers: float, targets: float) -> float:
        return 2 * right / (answers + targets) if answers + targets else 0.0


class CallableMetric(_Mean):
    """A function of the user's, ``(output, target) -> mean over the batch``, weighted by rows."""

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        self.function = function
        self.name = name

    def update(self, output: Any, target: Any) -> Sequence[float]:
        value = self.function(output, target)
        try:
            mean = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"the metric {self.name!r} returned {type(value).__name__}; valid: one number") from error
        rows = _rows(target if output is None else output)
        return [mean * rows, float(rows)]


METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "binary_accuracy": BinaryAccuracy,
    "f1": F1,
    "mae": MeanAbsoluteError,
    "mse": MeanSquaredError,
    "precision": Precision,
    "r2": R2,
    "recall": Recall,
    "rmse": RootMeanSquaredError,
    "token_accuracy": TokenAccuracy,
    "top5": TopK,
}


def resolve_metrics(items: str | Metric | Callable[[Any, Any], Any] | Iterable[Any] | None) -> list[Metric]:
    """The metrics given by name (also ``top3``, ``top10``, ...), as objects, or as functions."""
    if items is None:
        return []
    if isinstance(items, str) or callable(items) or isinstance(items, Metric):
        items = [items]
    metrics = [_resolve(item) for item in items]
    names = [metric.name for metric in metrics]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two metrics are called {name!r}; valid: different names. Rename one of the functions")
        if name == "loss" or name.startswith("val_"):
            raise UsageError(f"a metric is called {name!r}, which the history uses itself; valid: any other name")
    return metrics


def _resolve(item: Any) -> Metric:
    if isinstance(item, str):
        if found := re.fullmatch(r"top([1-9]\d*)", item):
            return TopK(int(found[1]))
        if item not in METRICS:
            raise unknown_name("metric", item, METRICS)
        return METRICS[item]()
    if isinstance(item, type):
        raise UsageError(f"a metric is the class {item.__name__}; valid: an instance of it, {item.__name__}()")
    if isinstance(item, Metric):
        return item
    if not callable(item):
        raise UsageError(
            f"a metric is {item!r} of type {type(item).__name__}; valid: a callable (output, target) -> mean over the "
            f"batch, or one of {', '.join(METRICS)}"
        )
    name = getattr(item, "__name__", type(item).__name__)
    return CallableMetric(item, "metric" if name == "<lambda>" else name)


def _predictions(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted and actual class numbers, of one shape."""
    if output.dim() >= 2 and output.shape[1] > 1:
        if target.shape == output.shape:  # class probabilities, or one-hot
            return output.argmax(1), target.argmax(1)
        predicted: Tensor = output.argmax(1)
        if predicted.shape != target.shape:
            target = match_shape(predicted, target).to(torch.int64)
        return predicted, target
    actual = match_shape(output, target)
    return (output > 0).to(torch.int64).flatten(), actual.to(torch.int64).flatten()


def _count_right(right: Tensor, actual: Tensor) -> list[float]:
    # An ignored target needs no mask on the left: no prediction is a negative class.
    return [float(torch.count_nonzero(right)), float(torch.count_nonzero(actual != IGNORED_CLASS))]


def _difference(output: Any, target: Tensor, name: str) -> Tensor:
    """In double precision, so that sums over many rows do not drift."""
    received = _tensor(output, name)
    return received.double() - match_shape(received, target).detach().double()


def _tensor(output: Any, name: str) -> Tensor:
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the metric {name!r} needs a tensor; the model returned {type(output).__name__}. Give a function "
            "(output, target) -> mean over the batch instead"
        )
    return output.detach()


def _rows(tree: Any) -> int:
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)
