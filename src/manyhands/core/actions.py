"""What a replica of a shard wants done: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.core.messages import Entry, Send, State

__all__ = ["Action", "Discard", "Execute", "Install", "Load", "Save"]


@dataclass(frozen=True, slots=True)
class Execute:
    """Apply the entry to the parameters, as it says."""

    shard: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Install:
    """The parameters are those of this state from now on."""

    state: State


@dataclass(frozen=True, slots=True)
class Load:
    """Read the shard from a checkpoint, then call ``loaded``."""

    shard: int
    epoch: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write the shard, as it is at this moment, to a checkpoint, then call ``saved``."""

    checkpoint: int
    state: State


@dataclass(frozen=True, slots=True)
class Discard:
    """The parameters of the shard are not needed here any more."""

    shard: int


Action = Send | Execute | Install | Load | Save | Discard
