"""The log of servers that apply updates one by one, as a second witness of the ledger.

The ledger has which batches are done. How many had an effect, the servers count on their own: every entry of their log
has a number. Whenever the run rests, both must agree.
"""

from __future__ import annotations

import numpy as np

from manyhands.comm.arena import Arena
from manyhands.core.ledger import Ledger

__all__ = ["Witness"]


class Witness:
    """What the log says of the batches of one run; nothing where servers do not share the arena's log."""

    def __init__(self, arena: Arena, step: int, *, sockets: bool) -> None:
        """``step``: where the run begins."""
        self._exchange = arena.exchange() if arena.spec.exchange and not sockets else None
        self._ring = arena.spec.ring
        self._first, self._logged, self._left_out = step, 0, 0

    def passed(self, batches: np.ndarray) -> None:
        """These are done: see which of them were left out of the log on purpose."""
        if self._exchange is not None:
            self._left_out += int((self._exchange.entry[batches % self._ring] == -1).sum())

    def rested(self, ledger: Ledger, steps_per_epoch: int, stop: int) -> None:
        """Nothing is on its way: tell the ledger how many effects there were up to batch ``stop``."""
        if self._exchange is None or stop <= self._first:
            return
        logged = self._exchange.logged
        effects, left_out = logged - self._logged, self._left_out
        ledger.witness(self._first // steps_per_epoch, self._first, stop - 1, effects, left_out)
        self._first, self._logged, self._left_out = stop, logged, 0
