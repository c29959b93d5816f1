"""``mh.Local``: the words with which a user chooses local steps, in rounds or one worker at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands.comm.arena import MOST_SERVERS
from manyhands.comm.codecs import Codec, resolve_codec
from manyhands.core.lateness import Lateness
from manyhands.core.placement import FINE
from manyhands.core.policies import Plain
from manyhands.core.rounds import usual_momentum
from manyhands.errors import UsageError, named_fields, unknown_name
from manyhands.sync.clip import Clip
from manyhands.sync.compress import memory_of
from manyhands.sync.delayed import DelayedNesterov
from manyhands.sync.outer import WarmNesterov
from manyhands.train.async_local import SpanRunner, WorkerState
from manyhands.train.local import LocalState, ShareRunner
from manyhands.train.optimizers import optimizer as optimizer_named
from manyhands.train.state import ModelState

__all__ = ["Local"]

Outer = Callable[[Iterable[Any]], torch.optim.Optimizer]

# Not fused: torch's fused SGD fails on a parameter whose first change comes later than those of the others.
_IN_ROUNDS: dict[str, Callable[[Local], Outer]] = {
    "nesterov": lambda sync: partial(WarmNesterov, lr=sync.outer_numbers[0], momentum=sync.outer_numbers[1]),
    "average": lambda sync: optimizer_named("sgd", lr=1.0, fused=False),
}
_ONE_BY_ONE: dict[str, Callable[[Local, int], Outer]] = {
    "delayed": lambda sync, delay: partial(
        DelayedNesterov, lr=sync.outer_numbers[0], momentum=sync.outer_numbers[1], delay=delay
    ),
    "average": lambda sync, delay: optimizer_named("sgd", lr=1 / delay, fused=False),
}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Copies go their own way for ``every`` batches, with your optimizer, and then agree on how far they moved: all
    lanes together, or (``asynchronous``) each worker by itself, through servers."""

    every: int = 32
    outer: str | None = None
    """What makes the next parameters of the changes. In rounds: ``"nesterov"`` (DiLoCo), or ``"average"``, which takes
    their mean. Asynchronous: ``"delayed"`` (Delayed Nesterov), or ``"average"``."""
    outer_lr: float | None = None
    """Of nesterov (0.8 unless given) and delayed (0.7)."""
    outer_momentum: float | None = None
    """Of nesterov, at most: it begins at 0 and grows with the agreements (unless given, to 0.8, or less in short
    rounds). Of delayed (0.9)."""
    codec: str | Codec | None = None
    """How a change travels: a word such as ``"int8"``; what it leaves out is sent with a later one."""
    fragments: int = 1
    """In rounds: into how many parts the layers are cut, agreed on in turns, one after each ``every / fragments``
    batches."""
    pace: str = "even"
    """In rounds. ``"even"``: one share for each worker. ``"speed"``: several, of which fast workers compute more. Only
    where ``fit`` is not told the lanes."""
    quorum: float | None = None
    """In rounds: the part of a round's shares, such as 0.75, with which the others become late: others compute them
    again."""
    grace_s: float = 1.0
    """How much longer than the slowest of those who have finished a worker may take for a share, given a quorum."""
    asynchronous: bool | None = None
    """Nobody waits for anybody: a change is applied when it comes. ``outer="delayed"`` says so as well."""
    delay: int | None = None
    """Asynchronous: how many changes count as one step of the outer optimizer; as many as there are workers, unless
    given."""
    servers: int = 1
    """Asynchronous: into how many parts the parameters are cut, each held by a server."""

    sockets = False
    replicas = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec))
        if self.asynchronous not in (None, True, False):
            raise UsageError(f"Local: asynchronous received {self.asynchronous!r}; valid are True and False")
        if self.asynchronous is None:
            object.__setattr__(self, "asynchronous", self.outer == "delayed")
        outers = tuple(_ONE_BY_ONE if self.asynchronous else _IN_ROUNDS)
        if self.outer is None:
            object.__setattr__(self, "outer", outers[0])
        if self.outer in {*_IN_ROUNDS, *_ONE_BY_ONE} - {*outers}:
            raise UsageError(
                f"Local: outer={self.outer!r} and asynchronous={self.asynchronous}: valid are {', '.join(outers)}"
            )
        if self.outer not in outers:
            raise unknown_name("outer", self.outer, outers)
        self._check_number("every", most=math.inf)
        self._check_number("servers", most=MOST_SERVERS)
        if self.delay is not None:
            self._check_number("delay", most=math.inf)
        self._check_number("fragments", most=math.inf)
        if self.every % self.fragments:
            raise UsageError(
                f"Local: fragments received {self.fragments!r}; valid is a divisor of every={self.every}, "
                "as each fragment has its turn in every / fragments batches"
            )
        if self.pace not in ("even", "speed"):
            raise unknown_name("pace", self.pace, ("even", "speed"))
        self._check_mode()
        usual_lr, momentum = (0.7, 0.9) if self.asynchronous else (0.8, usual_momentum(self.every))
        for field, usual in (("outer_lr", usual_lr), ("outer_momentum", momentum)):
            if getattr(self, field) is None:
                object.__setattr__(self, field, usual)
        limits = {"outer_lr": math.inf, "outer_momentum": 1.0, "grace_s": math.inf, "quorum": 1.0}
        for field, most in limits.items():
            value = getattr(self, field)
            if field == "quorum" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < most:
                limit = f" and below {most:g}" if most < math.inf else ""
                raise UsageError(f"Local: {field} received {value!r}; valid is a number above 0{limit}")

    def _check_mode(self) -> None:
        """Refuse what has no meaning in rounds, or without them."""
        strange: dict[str, Any] = {"delay": None, "servers": 1}
        advice = "in rounds; take asynchronous=True with it"
        if self.asynchronous:
            strange = {"fragments": 1, "pace": "even", "quorum": None}
            advice = "where nobody waits for anybody; it goes with asynchronous=False"
        for field, usual in strange.items():
            if (value := getattr(self, field)) != usual:
                raise UsageError(f"Local: {field}={value!r} has no meaning {advice}")

    @property
    def outer_numbers(self) -> tuple[float, float]:
        """The rate and the momentum of the outer optimizer."""
        assert self.outer_lr is not None and self.outer_momentum is not None
        return self.outer_lr, self.outer_momentum

    def _check_number(self, field: str, most: float) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            valid = "of at least 1" if most == math.inf else f"from 1 to {most}"
            raise UsageError(f"Local: {field} received {value!r}; valid is an integer {valid}")

    @property
    def name(self) -> str:
        return "async-local" if self.asynchronous else "local"

    @property
    def processes(self) -> int:
        """How many processes serve."""
        return self.servers if self.asynchronous else 0

    @property
    def lanes(self) -> int | None:
        """One, where a batch is computed by one worker alone."""
        return 1 if self.asynchronous else None

    @property
    def lanes_per_worker(self) -> int:
        """Enough of them that shares can follow speeds, if they are to."""
        return FINE if self.pace == "speed" else 1

    @property
    def lateness(self) -> Lateness | None:
        """Of those without whom there is a quorum."""
        return None if self.quorum is None else Lateness(self.quorum, self.grace_s)

    @property
    def round_batches(self) -> int:
        return 1 if self.asynchronous else self.every // self.fragments

    @property
    def lease_batches(self) -> int:
        return self.every if self.asynchronous else 1

    def describe(self) -> str:
        lr, momentum = self.outer_numbers
        numbers = f"lr {lr:g}, momentum {'' if self.asynchronous else 'up to '}{momentum:g}"
        if not self.asynchronous:
            of = f" ({numbers})" if self.outer == "nesterov" else ""
            parts = f", in {self.fragments} fragments by turns" if self.fragments > 1 else ""
            text = f"each lane makes {self.every} steps of its own, then the changes are put together{parts}"
            return f"{text}: {self.outer}{of}"
        several = "as many changes as there are workers" if self.delay is None else f"{self.delay} changes"
        of = f" ({numbers})" if self.outer == "delayed" else ""
        return (
            f"the fastest worker makes {self.every} steps of its own at a time, slower ones fewer; "
            f"{several} are a step of the servers: {self.outer}{of}"
        )

    def lay_out(self, model: nn.Module, optimizer: torch.optim.Optimizer, workers: int, **shape: Any) -> ModelState:
        kept = memory_of(resolve_codec(self.codec))
        assert self.outer is not None
        if self.asynchronous:
            outer = _ONE_BY_ONE[self.outer](self, self.delay or workers)
            return WorkerState(
                model, optimizer, outer, kept, workers=workers, servers=self.servers, span=self.every, **shape
            )
        return LocalState(model, optimizer, _IN_ROUNDS[self.outer](self), kept, fragments=self.fragments, **shape)

    def job(self, state: ModelState, clips: tuple[Clip, ...]) -> dict[str, Any]:
        assert isinstance(state, LocalState)
        kind, policy = (SpanRunner, Plain()) if self.asynchronous else (ShareRunner, None)
        runner = partial(kind, inner=state.inner, scalars=state.scalars, clips=clips, fragment_of=state.fragment_of)
        told = {"codec": resolve_codec(self.codec), "policy": policy}
        return {"template": state.template, "clips": (), "runner": runner, **told}
