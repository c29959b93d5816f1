"""What a server remembers of the parameters that workers have: for the difference to them, and for compensation."""

from __future__ import annotations

from collections.abc import Container

import torch

from manyhands.server.coder import Coder

__all__ = ["Copies"]


class Copies:
    """By shard and worker: the number of the last answer, and the parameters that it left the worker with."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self._last = 0

    def answer(
        self, shard: int, worker: int, has: int, live: torch.Tensor, coder: Coder
    ) -> tuple[int, int, list[bytes]]:
        """The number of the answer to a pull, the one that it is the difference to, and its frames.

        0 and no frames where the worker gets the parameters themselves: it has nothing from us, or an answer was lost.
        """
        self._last += 1
        number, copy = self._copies.get((shard, worker), (0, live))
        if coder.codec is None or coder.codec.exact or has == 0 or has != number:
            self._copies[shard, worker] = (self._last, live.clone())
            return self._last, 0, []
        frames = coder.difference(live, copy)
        self._copies[shard, worker] = (self._last, copy)
        return self._last, number, frames

    def read(self, shard: int, worker: int) -> torch.Tensor | None:
        """What the worker computes with, where it has that from us."""
        found = self._copies.get((shard, worker))
        return None if found is None else found[1]

    def keep(self, workers: Container[int]) -> None:
        """Forget the others."""
        self._copies = {key: copy for key, copy in self._copies.items() if key[1] in workers}

    def forget(self, shard: int) -> None:
        """The shard is not ours any more, or begins anew."""
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] != shard}
