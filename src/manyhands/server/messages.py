"""The messages of a run with parameter servers, as they travel: those of ``core/messages.py``, and five more.

Tensors travel beside a message, never in it: ``bare`` takes out what decisions carry along, ``filled`` puts it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhands.comm.envelope import Envelopes
from manyhands.core import messages as core
from manyhands.errors import FrameError
from manyhands.server.coder import Update
from manyhands.server.part import size_bytes

__all__ = [
    "COORDINATOR",
    "ENVELOPES",
    "Fetch",
    "Fetched",
    "PullRows",
    "PulledRows",
    "Stale",
    "bare",
    "filled",
    "payload_of",
]

COORDINATOR = 0
"""The number of the coordinator; all others are above."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A server wants a shard as it was at a checkpoint."""

    shard: int
    epoch: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Here it is, for ``epoch``."""

    epoch: int
    state: core.State


@dataclass(frozen=True, slots=True)
class Stale:
    """The update was computed with parameters that are too old: do the chunk again."""

    shard: int
    epoch: int
    chunk: int
    version: int


@dataclass(frozen=True, slots=True)
class PullRows:
    """A worker wants rows of a table while it computes ``chunk``; their numbers travel beside the message."""

    shard: int
    epoch: int
    term: int
    chunk: int
    table: int
    question: int


@dataclass(frozen=True, slots=True)
class PulledRows:
    """Here they are, in the order of the question."""

    shard: int
    epoch: int
    chunk: int
    question: int


ENVELOPES: Envelopes[Any] = Envelopes(
    [
        core.Ask, core.Views, core.Lease, core.Working, core.Pull, core.Pulled, core.Push, core.Pushed, core.Refused,
        core.State, core.Replicate, core.Replicated, core.Beat, core.Grant, core.Snapshot, core.Saved,
        Fetch, Fetched, PulledRows, PullRows, Stale,
    ]
)  # fmt: skip


def bare(message: Any) -> Any:
    """The message without tensors."""
    if isinstance(message, core.Push):
        return replace(message, update=None)
    if isinstance(message, core.Replicate):
        entries = [replace(entry, update=size_bytes(payload_of(entry.update))) for entry in message.entries]
        return replace(message, entries=tuple(entries))
    return message


def payload_of(update: Update | None) -> Sequence[memoryview]:
    """The bytes of an update; none where it was left out."""
    return () if update is None else update.payload


def filled(message: Any, payload: Sequence[memoryview]) -> Any:
    """The message with the bytes that came beside it; raises FrameError where they do not belong to it."""
    if isinstance(message, core.Push):
        return replace(message, update=payload)
    if isinstance(message, core.Replicate):
        return replace(message, entries=tuple(_share(message.entries, payload)))
    if isinstance(message, core.State):
        return replace(message, data=payload)
    return message


def _share(entries: Sequence[core.Entry], payload: Sequence[memoryview]) -> Iterator[core.Entry]:
    """Every entry with its own bytes: it says how many, and nothing is cut across."""
    parts = list(payload)[::-1]
    for entry in entries:
        mine, left = list[memoryview](), entry.update
        while isinstance(left, int) and left > 0 and parts:
            mine.append(parts.pop())
            left -= len(mine[-1])
        if left != 0:
            raise FrameError("the entries of an envelope are not of the sizes that they say")
        yield replace(entry, update=mine)
    if parts:
        raise FrameError("an envelope has more bytes than its entries say")
