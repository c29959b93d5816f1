"""Compresses what a lane sends, and keeps for later what that left out (error feedback).

The gradient of a lane, and what was left out of it before, becomes one frame for every parameter, and the lane's buffer
then holds what arrives: the values of the decoded frames. What they lack stays with the lane, in the arena. It is
read from the bank of the step and written into that of the next one: a lane whose worker died is sent again as it was.

Where everybody agrees in every step, the sum of the lanes travels back in the same way: whoever owns a unit encodes
what its lanes add up to, keeps what that leaves out, and the optimizer is given what arrives.

The frames are real; on one host they have nowhere to go. The counters say what would travel between hosts, with the
volume of a ring: frames to whoever owns the units, then frames of their sums from the owners.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from manyhands.comm.arena import LEFT_OUT, Arena
from manyhands.comm.codec import Codec
from manyhands.comm.control import SLOT_FIELDS
from manyhands.comm.frames import Frame
from manyhands.comm.segment import aligned

__all__ = ["Answer", "Compressor", "memory_of"]

_RESIDUAL = "residual"
_SENT, _RECEIVED = SLOT_FIELDS.index("sent_bytes"), SLOT_FIELDS.index("received_bytes")


def memory_of(codec: Codec | None) -> tuple[str, ...]:
    """What each lane keeps from step to step under ``codec``."""
    return () if codec is None or codec.exact else (_RESIDUAL,)


class Answer:
    """Replaces what the lanes of a unit add up to by what arrives of it. Used by whoever applies."""

    def __init__(self, arena: Arena, codec: Codec) -> None:
        self._codec = codec
        self._left = arena.plane(1 + arena.spec.planes.index(LEFT_OUT))
        self._units = {unit.start: unit for unit in arena.spec.units}

    def __call__(self, gradient: torch.Tensor, start: int, present: np.ndarray) -> None:
        """``gradient``: the sum over the lanes of the units from byte ``start`` of the plane on. ``present``: which
        parameters have one; of the others nothing travels."""
        if gradient.dtype != torch.float32:
            return
        end = start + gradient.nbytes
        at = start
        while at < end:  # unit by unit: which of them are applied together depends on the workers
            unit = self._units[at]
            if present[unit.parameter]:
                self._answer(
                    gradient[(at - start) // 4 : (unit.stop - start) // 4],
                    self._left[at : unit.stop].view(torch.float32),
                )
            at = unit.stop if unit.stop in self._units else aligned(unit.stop)

    def _answer(self, part: torch.Tensor, left: torch.Tensor) -> None:
        frame = self._codec.encode(left.add_(part))
        self._codec.decode(frame, part)
        if frame.codec == self._codec.name:
            left.sub_(part)
        else:
            left.zero_()


class Compressor:
    """Sends the lanes that one worker computes, and counts the bytes in its slot."""

    def __init__(self, arena: Arena, codec: Codec, slot: int) -> None:
        self._arena, self._codec, self._slot = arena, codec, slot
        self._words = arena.control.slot(slot)
        self._sizes = np.array([unit.stop - unit.start for unit in arena.spec.units], np.int64)
        self._answers = self._sizes
        if LEFT_OUT in arena.spec.planes:
            types = [arena.spec.parameters[unit.parameter].dtype for unit in arena.spec.units]
            sizes = [
                codec.payload_bytes(size // 4) if dtype == "float32" else size
                for size, dtype in zip(self._sizes.tolist(), types, strict=True)
            ]
            self._answers = np.array(sizes, np.int64)
        self._parameter_of = np.array([unit.parameter for unit in arena.spec.units], np.int64)
        self._due = np.ones(len(self._sizes), bool)
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._residuals: dict[tuple[int, int], list[torch.Tensor]] = {}

    def begin_step(self, due: Sequence[bool] | None = None) -> None:
        """The worker takes part in a step: it will get what others update. Counted now, because once the step is final
        the run may be over. ``due``: which parameters are agreed on in it, if not all."""
        if due is not None:
            self._due = np.array(due, bool)[self._parameter_of]
        self._words[_RECEIVED] += int(self._answers[self._away()].sum())

    @torch.no_grad()
    def run(self, step: int, lane: int) -> None:
        """The lane's gradient is complete in the arena: replace it by what arrives of it."""
        if lane not in self._gradients:
            self._gradients[lane] = [gradient.view(-1) for gradient in self._arena.gradients(lane)]
        present, size_bytes = self._arena.present[lane], 0
        for index, gradient in enumerate(self._gradients[lane]):
            if gradient.dtype != torch.float32:  # codecs know one type; others travel as they are
                size_bytes += gradient.nbytes * int(present[index])
            elif self._codec.exact:
                size_bytes += self._send(gradient, gradient).size_bytes if present[index] else 0
            else:
                before, after = self._residual(step, lane)[index], self._residual(step + 1, lane)[index]
                if present[index]:
                    torch.add(gradient, before, out=after)
                    frame = self._send(after, gradient)
                    size_bytes += frame.size_bytes
                    if frame.codec == self._codec.name:
                        after.sub_(gradient)
                    else:  # it had values that are not finite, and was sent as it is
                        after.zero_()
                else:
                    after.copy_(before)
        away = int(self._sizes[self._away()].sum())
        self._words[_SENT] += size_bytes * away // max(int(self._sizes[self._due].sum()), 1)

    def _send(self, values: torch.Tensor, into: torch.Tensor) -> Frame:
        frame = self._codec.encode(values)
        self._codec.decode(frame, into)
        return frame

    def _residual(self, step: int, lane: int) -> list[torch.Tensor]:
        key = (step % 2, lane)
        if key not in self._residuals:
            self._residuals[key] = [view.view(-1) for view in self._arena.memory(step, lane)[_RESIDUAL]]
        return self._residuals[key]

    def _away(self) -> np.ndarray:
        """Which of the units that are agreed on others own, under the plan in force."""
        control = self._arena.control
        away: np.ndarray = (control.unit_owner(control.committed[1]) != self._slot) & self._due
        return away
