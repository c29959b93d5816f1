"""Which sample belongs to which step, lane and random stream: pure functions, no state.

The order of an epoch depends on (seed, epoch) alone and the slice of a lane on (step, lane) alone, so any worker
can compute any lane of any step, and a step that is computed again takes the same samples under the same stream.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from manyhands.errors import UsageError

__all__ = ["epoch_order", "lane_seed", "lane_slice", "order_digest", "steps_per_epoch", "stream_seed"]


def epoch_order(seed: int, epoch: int, samples: int, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """The positions of the data set in the order in which ``epoch`` visits them, each exactly once."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    if seed < 0:
        raise UsageError(f"seed is {seed}; valid: 0 or a positive integer")
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(samples).astype(np.int64, copy=False)


def order_digest(order: npt.NDArray[np.int64]) -> str:
    """The SHA-256 of an order, the same on every machine."""
    return hashlib.sha256(np.ascontiguousarray(order, dtype="<i8").tobytes()).hexdigest()


def steps_per_epoch(samples: int, batch_size: int, drop_last: bool) -> int:
    """How many global batches an epoch has."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def lane_slice(step_in_epoch: int, lane: int, *, samples: int, batch_size: int, lanes: int) -> tuple[int, int]:
    """The positions [start, stop) in the epoch's order that ``lane`` takes in this step.

    The batch is cut into contiguous slices whose sizes differ by at most one, the bigger ones first. A short last
    batch is cut in the same way, so there a lane may be empty.
    """
    assert 0 <= lane < lanes, f"lane {lane} of {lanes}"
    first = step_in_epoch * batch_size
    rows = min(batch_size, samples - first)
    assert rows > 0, f"step {step_in_epoch} is behind the end of an epoch of {samples} samples"
    size, bigger = divmod(rows, lanes)
    start = first + lane * size + min(lane, bigger)
    return start, start + size + (lane < bigger)


def stream_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed that is a pure hash of its parts, for a random stream bound to e.g. (seed, epoch, step, lane)."""
    state = hashlib.blake2b(digest_size=8, person=b"mh-stream")
    for part in (seed, *parts):
        # The type and the length keep ("ab", "c") apart from ("a", "bc"), and 1 from "1".
        text = str(part).encode()
        state.update(b"%s%d:" % (type(part).__name__[0].encode(), len(text)) + text)
    return int.from_bytes(state.digest(), "little") >> 1


def lane_seed(stream: int, step: int, lane: int, piece: int = 0) -> int:
    """The 63-bit seed of one lane of one step in ``stream`` (a ``stream_seed``): the same idea, cheap enough
    for every lane. The constants are those of SplitMix64."""
    mixed = stream + step * 0x9E3779B97F4A7C15 + lane * 0xD1B54A32D192ED03 + piece * 0x8CB92BA72F3D8DD7
    mixed &= 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 31) >> 1
