"""A learning rate for each worker: a factor by which the steps with its updates are longer or shorter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from manyhands.errors import UsageError

__all__ = ["Rates", "Shares", "check_rates", "factor_of"]

Rates = Sequence[float] | Callable[[int, float], float]
"""A factor for each worker, by its number; or a function of (worker, its share of the updates of late)."""

_REMEMBERED = 64  # updates, about


class Shares:
    """Which part of the updates of late is whose: how fast each worker is, against all of them."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}

    def came(self, worker: int) -> None:
        """An update of ``worker`` has come."""
        for other in self._counts:
            self._counts[other] *= 1 - 1 / _REMEMBERED
        self._counts[worker] = self._counts.get(worker, 0.0) + 1

    def of(self, worker: int) -> float:
        """The share of ``worker``; those of all workers are 1 together."""
        return self._counts.get(worker, 0.0) / (sum(self._counts.values()) or 1.0)


def factor_of(rates: Rates, worker: int, share: float) -> float:
    """The factor for a worker; 1 for those beyond the end of a list."""
    if callable(rates):
        return _checked(rates(worker, share), f"rates({worker}, {share:.3g}) returned")
    return rates[worker] if worker < len(rates) else 1.0


def check_rates(rates: object) -> None:
    """Refuse what cannot be rates. What a function returns is checked whenever it is called."""
    if callable(rates):
        return
    if isinstance(rates, str) or not isinstance(rates, Sequence) or not rates:
        raise UsageError(
            f"rates received {rates!r}; valid: a list with a factor for each worker, or a function of "
            "(worker, share of the updates) that returns one"
        )
    for worker, factor in enumerate(rates):
        _checked(factor, f"rates[{worker}] received")


def _checked(factor: object, what: str) -> float:
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if not is_number or not 0 < factor < math.inf:  # type: ignore[operator]
        raise UsageError(f"{what} {factor!r}; valid is a number above 0")
    return float(factor)  # type: ignore[arg-type]
