"""The words a user chooses a strategy with, checked at the border."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from manyhands.comm.arena import MOST_SERVERS
from manyhands.comm.codecs import Codec, resolve_codec
from manyhands.core.lateness import Lateness
from manyhands.core.policies import POLICIES, Async, Mixing, Plain, Policy, compensates, make_policy
from manyhands.core.rates import Rates, check_rates
from manyhands.engine.local import cores
from manyhands.errors import UsageError, named_fields, unknown_name
from manyhands.sync.clip import Clip
from manyhands.sync.compress import memory_of
from manyhands.train.lane import LaneRunner
from manyhands.train.local_steps import Local
from manyhands.train.mixing import job_of_mixing, lay_out_mixing
from manyhands.train.state import ModelState, Needs

__all__ = [
    "AllReduce",
    "Local",
    "Server",
    "Sync",
    "check_choice",
    "plain_sync",
    "resolve_sync",
]

_PREDICTED = _EASED = ("async", "bounded")  # where it was measured


class Sync(Protocol):
    """How copies of the model agree: what a Trainer asks of the object that the user chose."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """The user's word for it."""

    @property
    def processes(self) -> int:
        """Those that hold the parameters, beside the workers."""

    @property
    def sockets(self) -> bool:
        """Whether they are reached by sockets."""

    @property
    def replicas(self) -> int:
        """How many of them have a copy of each part of the parameters."""

    @property
    def lanes(self) -> int | None:
        """Lanes of a batch, where they are not for the user to choose."""

    @property
    def round_batches(self) -> int:
        """Batches of a round, where copies agree in rounds."""

    @property
    def lease_batches(self) -> int:
        """Batches that a worker takes at once, where it works on its own."""

    @property
    def lanes_per_worker(self) -> int:
        """How many lanes there are where the user says nothing."""

    @property
    def fragments(self) -> int:
        """How many parts of the parameters are agreed on in turns."""

    @property
    def lateness(self) -> Lateness | None:
        """Who counts as late with a lane, if somebody may."""

    def describe(self) -> str | None:
        """A line for the header of a run."""

    def lay_out(self, model: nn.Module, optimizer: torch.optim.Optimizer, workers: int, **shape: Any) -> ModelState:
        """The state of a run with that many workers, in an arena of that shape."""

    def job(self, state: ModelState, clips: tuple[Clip, ...]) -> dict[str, Any]:
        """What workers are told: who computes a lane, and what is applied to the sum of the lanes."""


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Copies agree on the gradient of every global batch: an ordered sum over the lanes.

    ``codec``: how the gradient of a lane travels, a word such as ``"int8"``, ``"topk"`` or ``"topk:0.05"``; what it
    leaves out is sent with a later step.
    """

    name = "allreduce"
    codec: str | Codec | None = None
    round_batches = lease_batches = 1
    fragments = 1
    processes = 0
    sockets = False
    replicas = 0
    lanes = None
    lanes_per_worker = 1
    lateness = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec))

    def describe(self) -> None:
        """Nothing to add."""

    def lay_out(self, model: nn.Module, optimizer: torch.optim.Optimizer, workers: int, **shape: Any) -> ModelState:
        codec = resolve_codec(self.codec)
        # Whoever encodes a gradient needs it in the arena.
        kept = memory_of(codec)
        needs = Needs(repeatable=codec is None, memory=kept, answers=bool(kept), factors=codec is None)
        return ModelState(model, optimizer, needs, **shape)

    def job(self, state: ModelState, clips: tuple[Clip, ...]) -> dict[str, Any]:
        codec = resolve_codec(self.codec)
        return {"template": state.template, "clips": clips, "runner": LaneRunner, "codec": codec}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Servers hold the parameters, each a part; workers bring them gradients and fetch what came of them."""

    policy: str | Policy = "sync"
    """When an update is applied, and how: a name, or one of the objects in ``manyhands.core.policies``."""
    staleness: int | None = None
    """Of ``bounded``: the most that an update may be behind. Of ``async``: what is further behind is dropped."""
    servers: int = 1
    """Into how many parts the parameters are cut."""
    replicas: int = 0
    """1: every part is held by a second server as well, which takes over when the first one is lost."""
    transport: str = "auto"
    """``arena``: servers and workers share memory. ``socket``: servers hold their parts in their own memory.
    ``auto``: sockets where there are replicas."""
    codec: str | Codec | None = None
    """How an update travels to the servers; what it leaves out is sent with a later one."""
    pull_codec: str | Codec | None = None
    """Over sockets: how parameters travel to a worker, as the difference to those that it has."""
    beta: float | None = None
    """Of ``mixing``: how far parameters of a worker and of the servers move towards each other; 0.9 / workers unless
    given."""
    every: int | None = None
    """Of ``mixing``: batches that a worker makes on its own parameters in between; 8 unless given."""
    predict: bool | None = None
    """Whether a worker is given the parameters as they will probably be when its update arrives, where the optimizer
    has momentum to tell it by. None: with ``async`` and ``bounded``."""
    ahead: bool | None = None
    """Whether a worker begins its next batch while its last update is still being applied: it never waits, and its
    updates come one step later. None: with ``async`` and ``plain``, where there is a core for every one of several
    workers."""
    rates: Rates | None = None
    """What the learning rate is multiplied by in a step with a worker's update: a list by the number of the worker, or
    a function of (worker, its share of the updates of late)."""
    ramp: int | None = None
    """A run begins with one worker, and after so many updates each time another one joins in; 0: all at once. None:
    three tenths of an epoch but at most 150, with ``async`` and ``bounded`` in shared memory; else 0."""

    round_batches = 1
    fragments = 1
    lanes_per_worker = 1
    lateness = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec))
        object.__setattr__(self, "pull_codec", resolve_codec(self.pull_codec))
        if isinstance(self.policy, str):
            check_choice("policy", self.policy, ("sync", *POLICIES))
        elif isinstance(self.policy, type) or not callable(getattr(self.policy, "judge", None)):
            raise UsageError(
                f"policy received {self.policy!r}; valid: {', '.join(('sync', *POLICIES))}, or an object with "
                "judge(staleness, moment), such as those in manyhands.core.policies"
            )
        if self.staleness is not None and (isinstance(self.staleness, bool) or not isinstance(self.staleness, int)):
            raise UsageError(f"staleness received {self.staleness!r}; valid is an integer of at least 0, or None")
        _ = self.rule
        if isinstance(self.servers, bool) or not isinstance(self.servers, int) or not 1 <= self.servers <= MOST_SERVERS:
            raise UsageError(f"servers received {self.servers!r}; valid is an integer from 1 to {MOST_SERVERS}")
        if isinstance(self.replicas, bool) or self.replicas not in (0, 1):
            raise UsageError(f"replicas received {self.replicas!r}; valid are 0 and 1")
        for word in ("predict", "ahead"):
            if getattr(self, word) not in (None, False, True):
                raise UsageError(f"{word} received {getattr(self, word)!r}; valid are True, False and None")
        if self.ahead and not self._may_go_ahead:
            raise UsageError(
                'ahead=True: valid with policy="async" or "plain", one server, transport="arena" and no codec'
            )
        if self.predict and not self.exchange:
            raise UsageError('predict=True and policy "sync": nothing is ever behind; take policy="async"')
        if self.ramp is not None and (isinstance(self.ramp, bool) or not isinstance(self.ramp, int) or self.ramp < 0):
            raise UsageError(f"ramp received {self.ramp!r}; valid is an integer of at least 0")
        if self.rates is not None:
            check_rates(self.rates)
        for word in ("rates", "ramp"):
            if getattr(self, word) and (not self.exchange or self.sockets or self.name == "mixing"):
                what = "sockets" if self.sockets else f'policy "{self.policy}"'
                valid = 'valid with policies that make steps of updates, and transport="arena"'
                raise UsageError(f"{word} and {what}: {valid}")
        check_choice("transport", self.transport, ("arena", "auto", "socket"))
        if self.replicas and self.transport == "arena":
            raise UsageError('replicas=1 and transport="arena": replicas are reached by sockets; take transport="auto"')
        if self.sockets and not self.exchange:
            what = "replicas=1" if self.replicas else 'transport="socket"'
            valid = ", ".join(name for name in POLICIES if name != "mixing")
            raise UsageError(
                f'policy "sync" and {what}: its steps are sums over lanes, bit-equal for any number of workers, which '
                f"the servers take together in shared memory. Valid over sockets are {valid}; with "
                '"bounded" and staleness=0 everybody waits for everybody.'
            )
        if self.pull_codec is not None and not self.sockets:
            raise UsageError(
                f"pull_codec={self.pull_codec!r} without sockets: in shared memory parameters do not travel; take "
                'transport="socket", or leave it out'
            )
        if isinstance(self.rule, Mixing) and self.codec is not None:
            raise UsageError(f"codec={self.codec!r} and policy 'mixing': valid is None; what travels are parameters")
        if isinstance(self.rule, Mixing) and self.sockets:
            raise UsageError(
                "policy 'mixing' over sockets: a worker's own parameters are moved by the servers, which reach them in "
                'shared memory; take transport="arena" and replicas=0'
            )

    @property
    def name(self) -> str:
        if not isinstance(self.policy, str):
            return type(self.policy).__name__.lower()
        return "server" if self.policy == "sync" else self.policy

    @property
    def sockets(self) -> bool:
        """Whether servers are reached by sockets."""
        return self.transport == "socket" or self.replicas > 0

    @property
    def processes(self) -> int:
        """How many processes serve."""
        return self.servers * (1 + self.replicas)

    @property
    def exchange(self) -> bool:
        """Whether workers bring updates one by one."""
        return self.policy != "sync"

    @property
    def rule(self) -> Policy | None:
        """The policy by which the lead server judges updates."""
        given = {name: value for name in ("beta", "every") if (value := getattr(self, name)) is not None}
        if given and self.policy != "mixing":
            name, value = next(iter(given.items()))
            raise UsageError(f"{name}={value!r} and policy={self.policy!r}: {name} goes with policy='mixing'")
        if not isinstance(self.policy, str):
            return self.policy
        setting = {"bounded": "staleness", "async": "oldest"}.get(self.policy)
        if self.staleness is not None and setting is None:
            raise UsageError(
                f'staleness={self.staleness} and policy={self.policy!r}: staleness goes with "async" and "bounded"'
            )
        if self.policy == "sync":
            return None
        if self.staleness is not None and setting is not None:
            given[setting] = self.staleness
        return make_policy(self.policy, **given)

    @property
    def lease_batches(self) -> int:
        rule = self.rule
        return rule.every if isinstance(rule, Mixing) else 1

    @property
    def _may_go_ahead(self) -> bool:
        """Whether nothing is held back, and nobody needs to know what a worker has read."""
        alone = self.servers == 1 and not self.sockets and self.codec is None
        return alone and isinstance(self.rule, (Async, Plain))

    def _goes_ahead(self, workers: int) -> bool:
        """Where there are fewer cores than workers, none is idle because its worker waits; where nothing may be old,
        or there is only one worker, going ahead would make old what is not."""
        tolerant = self._may_go_ahead and getattr(self.rule, "oldest", None) is None
        return tolerant and 2 <= workers <= cores()

    @property
    def _by_row(self) -> bool:
        """Whether tables are held by row. To compensate, a server over sockets would have to know the rows as each
        worker has read them; there tables are held whole."""
        return not (self.sockets and self.rule is not None and compensates(self.rule))

    @property
    def lanes(self) -> int | None:
        """One, where an update is a batch that one worker computes alone."""
        return 1 if self.exchange else None

    def describe(self) -> str | None:
        held = f"{self.servers} server{'s' * (self.servers > 1)} hold{'s' * (self.servers == 1)} the parameters"
        held += ", each with a backup" * self.replicas
        if isinstance(self.rule, Mixing):
            return f"{held}; workers have their own, which are mixed with them every {self.rule.every} batches"
        return f"{held}; every batch is an update of its own, judged by {self.rule}" if self.exchange else held

    def lay_out(self, model: nn.Module, optimizer: torch.optim.Optimizer, workers: int, **shape: Any) -> ModelState:
        if isinstance(self.rule, Mixing):
            return lay_out_mixing(self.rule, model, optimizer, workers, self.servers, **shape)
        codec = resolve_codec(self.codec)
        needs = Needs(
            repeatable=self.servers == 1 and not self.exchange and codec is None,
            memory=() if self.sockets else memory_of(codec),
            answers=bool(memory_of(codec)) and not self.exchange,
            servers=self.processes,
            exchange=self.exchange,
            parts=self.servers,
            by_row=self._by_row,
            ahead=self._goes_ahead(workers) if self.ahead is None else self.ahead,
        )
        return ModelState(model, optimizer, needs, **shape)

    def job(self, state: ModelState, clips: tuple[Clip, ...]) -> dict[str, Any]:
        if isinstance(self.rule, Mixing):
            return job_of_mixing(self.rule, state, clips)
        return {
            "template": state.template,
            "clips": clips,
            "runner": LaneRunner,
            "codec": resolve_codec(self.codec),
            "pull_codec": resolve_codec(self.pull_codec),
            "policy": self.rule,
            "predict": self.name in _PREDICTED if self.predict is None else self.predict,
            "rates": self.rates,
            "ramp": 0 if self.ramp is None and self.name not in _EASED else self.ramp,
        }


_SYNCS: dict[str, Callable[..., Sync]] = {
    "allreduce": AllReduce,
    "auto": AllReduce,
    "server": Server,
    "async": partial(Server, policy="async"),
    "bounded": partial(Server, policy="bounded"),
    "local": Local,
    "async-local": partial(Local, asynchronous=True),
    "mixing": partial(Server, policy="mixing"),
}


def resolve_sync(sync: object) -> Sync:
    """A name, a name with its codec such as ``"allreduce:int8"``, or an object such as ``mh.AllReduce()``."""
    if isinstance(sync, (AllReduce, Local, Server)):
        return sync
    name, colon, codec = sync.partition(":") if isinstance(sync, str) else ("", "", "")
    if name not in _SYNCS:
        raise unknown_name("sync", sync, _SYNCS)
    return _SYNCS[name](codec=codec) if colon else _SYNCS[name]()


_PLAIN = (str, int, float, type(None))


def plain_sync(sync: Sync) -> dict[str, Any]:
    """The settings of a sync, for run.json."""
    values = {name: getattr(sync, name) for name in sync.__dataclass_fields__}
    return {n: v.name if isinstance(v, Codec) else v if isinstance(v, _PLAIN) else str(v) for n, v in values.items()}


def check_choice(kind: str, received: object, valid: Sequence[str]) -> None:
    """Refuse a word that is not one of the valid ones."""
    if received not in valid:
        raise unknown_name(kind, received, valid)
