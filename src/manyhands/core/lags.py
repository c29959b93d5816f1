"""How far behind the updates of each worker usually are: what the parameters it is given are predicted for."""

from __future__ import annotations

__all__ = ["Lags"]

_SMOOTH = 16  # updates that the mean remembers, about
_LEAST = 0.5  # steps; below, a worker is as good as never behind


class Lags:
    """A running mean of the staleness, for each worker."""

    def __init__(self, most: float) -> None:
        """``most``: steps that can be predicted at all."""
        self._most = most
        self._usual: dict[int, float] = {}

    def saw(self, worker: int, staleness: int) -> None:
        """An update of ``worker`` came so many steps behind."""
        usual = self._usual.get(worker, 0.0)
        self._usual[worker] = usual + (staleness - usual) / _SMOOTH if usual else float(staleness)

    def of(self, worker: int) -> float:
        """Steps that the next update of ``worker`` will probably be behind; 0 for one who never is."""
        usual = self._usual.get(worker, 0.0)
        return min(usual, self._most) if usual >= _LEAST else 0.0
