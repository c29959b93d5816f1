"""Which workers are late with their shares of a round. Pure: what is seen and the time in, slots out.

Shares are late by those that are in: once a quorum of them is, nobody may need longer for one than the slowest of those
who have finished, and a grace on top. A late worker is given up, and its shares are computed again by others: the
account of samples stays what it is, and so does the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Lateness"]


@dataclass(slots=True)
class Lateness:
    """What was seen of the round in progress."""

    quorum: float
    """The part of a round's shares that must be in."""
    grace_s: float
    _round: int = -1
    _quorum_s: float | None = None
    _begun: dict[int, tuple[int, float]] = field(default_factory=dict)  # by slot: its share, and when we first saw it

    def late(
        self, number: int, done: float, at_work: Mapping[int, int], finished: Mapping[int, float], now: float
    ) -> list[int]:
        """The slots that are late in round ``number``, of whose shares ``done`` (a part of 1) are in.

        ``at_work``: the share that each slot is computing; ``finished``: those who have nothing left to do, and how
        many seconds a share takes them. Without them nobody is late: nobody could take over.
        """
        if number != self._round:
            self._round, self._quorum_s, self._begun = number, None, {}
        self._begun = {
            slot: self._begun[slot] if self._begun.get(slot, (-1, 0.0))[0] == share else (share, now)
            for slot, share in at_work.items()
        }
        if done < self.quorum:
            return []
        if self._quorum_s is None:
            self._quorum_s = now
        if not finished:
            return []
        usual_s = max(finished.values())
        return [
            slot
            for slot, (_, begun) in self._begun.items()
            if now - max(self._quorum_s, begun + usual_s) > self.grace_s
        ]
