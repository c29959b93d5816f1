"""Decisions about local rounds: which fragments are agreed on when, and how much momentum the outer optimizer has.

A fragment is a part of the parameters that is agreed on at once. Each has its turn, and the last round of an epoch
agrees on all of them: an epoch leaves nothing behind. Pure: counts in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.errors import UsageError

__all__ = ["agreed_before", "cut_fragments", "due", "usual_momentum", "warm_momentum"]

_SLOWNESS = 4
_USUAL_MOMENTUM = 0.8
_SHORT = 4  # batches


def usual_momentum(every: int) -> float:
    """The outer momentum where none is asked for: less in short rounds.

    Momentum multiplies what a change does in the long run by 1 / (1 - momentum). After many local steps that makes up
    for what averaging takes away. After a few, the change still is what the optimizer of the share wanted, with a
    momentum of its own, and to multiply it is to raise the learning rate.
    """
    return min(every / (every + _SHORT), _USUAL_MOMENTUM)


def warm_momentum(agreements: int, most: float) -> float:
    """The momentum of an agreement, the first of which is number 1: it grows from 0 towards ``most``.

    Momentum m is a bet on the mean of the last 1 / (1 - m) changes, and after t agreements there are only t, the first
    of them the least typical. Nesterov's own sequence has the form (t - 1) / (t + r - 1) with r of at least 3; this is
    r = 5. The first agreement is plain averaging, scaled.
    """
    assert agreements >= 1, f"agreement {agreements}"
    return min((agreements - 1) / (agreements + _SLOWNESS), most)


def due(within: int, rounds: int, fragments: int) -> range:
    """The fragments that are agreed on after round ``within`` of the ``rounds`` of an epoch."""
    turn = within % fragments
    return range(fragments) if within == rounds - 1 else range(turn, turn + 1)


def agreed_before(within: int, fragment: int, fragments: int) -> int:
    """How many rounds of the epoch had ended when ``fragment`` was last agreed on, before round ``within`` ends."""
    return max(within - (within - 1 - fragment) % fragments, 0)


def cut_fragments(layers: Sequence[str], sizes: Sequence[int], fragments: int) -> list[int]:
    """The fragment of each parameter: neighbours, whole layers, the largest fragment as small as that allows.

    ``layers``: which layer each parameter belongs to.
    """
    weights, layer_of = list[int](), list[int]()
    for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        if index == 0 or layer != layers[index - 1]:
            weights.append(0)
        weights[-1] += size
        layer_of.append(len(weights) - 1)
    if len(weights) < fragments:
        raise UsageError(f"fragments received {fragments}; valid is 1 to {len(weights)}, the layers of the model")
    least, most = max(weights), sum(weights)
    while least < most:
        middle = (least + most) // 2
        if _pack(weights, middle)[-1] < fragments:
            most = middle
        else:
            least = middle + 1
    packed = _pack(weights, least, fragments)
    return [packed[layer] for layer in layer_of]


def _pack(weights: Sequence[int], room: int, least: int = 1) -> list[int]:
    """The fragment of each layer where none may weigh more than ``room``, and there are ``least`` at any rate."""
    packed, load = [0], weights[0]
    for index, weight in enumerate(weights[1:], 1):
        needed = least - 1 - packed[-1] == len(weights) - index  # as many fragments are left to begin as layers
        begins = needed or load + weight > room
        load = weight if begins else load + weight
        packed.append(packed[-1] + begins)
    return packed
