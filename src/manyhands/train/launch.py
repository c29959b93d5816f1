"""``mh.launch``: a training loop of the user's own on supervised, elastic workers."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from manyhands.comm import ship
from manyhands.comm.arena import Arena, ArenaSpec
from manyhands.engine import local
from manyhands.errors import ChannelClosed, EngineError, UsageError, named_options
from manyhands.sync.clip import resolve_clip
from manyhands.train.own_loop import LaunchJob
from manyhands.train.seats import Limits, check_limits
from manyhands.train.session import Session, remote_error
from manyhands.train.stack import StackFile
from manyhands.train.strategy import AllReduce, Sync, resolve_sync
from manyhands.train.team import worker_range

__all__ = ["Launched", "launch"]

_ENDLESS = 1 << 40


@dataclass(slots=True)
class Launched:
    """What a launch gives back."""

    value: Any = None
    """What the function returned (in the worker that finished first: all of them hold the same weights)."""
    steps: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)


@named_options
def launch(
    function: Callable[..., Any],
    *arguments: Any,
    workers: int | str | tuple[int, int] = "auto",
    lanes: int | None = None,
    sync: str | Sync = "allreduce",
    seed: int = 0,
    threads: int = 1,
    clip: Any = None,
    limits: Limits | None = None,
) -> Launched:
    """Run ``function(me, *arguments)`` in every worker; see docs/own-loop.md and examples/own_loop.py.

    The function joins a model and an optimizer, loops over ``me.loader(...)`` and calls ``me.backward(loss)`` and
    ``me.step()``. Workers that die are replaced: their successor runs the function from its beginning and catches up.
    """
    if not callable(function):
        raise UsageError(f"launch received {function!r}; valid is a function of me")
    count = worker_range(workers)[1]
    if resolve_sync(sync) != AllReduce():
        raise UsageError(
            f"launch received sync={sync!r}; valid is allreduce without a codec: in a loop of your own, copies agree "
            "on the whole gradient of every step"
        )
    for name, value, least in (("lanes", lanes, 1), ("seed", seed, 0), ("threads", threads, 1)):
        given = name != "lanes" or value is not None
        if given and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UsageError(f"{name} received {value!r}; valid is an integer of at least {least}")
    job = LaunchJob(
        function=function,
        arguments=arguments,
        lanes=lanes or count,
        seed=seed,
        threads=threads,
        clips=resolve_clip(clip),
    )
    bounds = check_limits(limits)
    local.warm()
    arena = _find_arena(job)
    launched = Launched()

    def hear(event: str, fields: dict[str, Any]) -> None:
        launched.events.append({"event": event, "time": time.time(), **fields})

    with Session(arena, job, count, bounds) as session:
        session.on_event(hear)
        session.supervisor.plans.cores = count  # nobody stands by: a loop whose body never ran may lack what follows it
        session.start(0)
        session.allow(_ENDLESS)
        launched.value = _result(session)
        launched.steps = session.control.steps
    return launched


def _result(session: Session) -> Any:
    """Wait for the first worker whose function returns."""
    while True:
        session.check()
        try:
            _, message = session.heard.get(timeout=0.1)
        except queue.Empty:
            continue
        if message is not None and message.kind == "result":
            return ship.load_value(message.body["value"])


def _find_arena(job: LaunchJob, timeout_s: float = 600.0) -> Arena:
    """Start one process that runs the function up to its first loop: only then it is known what must be shared."""
    parcel = ship.pack(job, "the function, or an argument of it")
    stack = StackFile()
    process = local.spawn("manyhands.train.worker:main")
    try:
        body = {"slot": 0, "arena": None, "code": parcel.code, "sizes_bytes": parcel.sizes_bytes}
        process.channel.send("setup", body, [stack.fd, *parcel.fds])
        message = process.channel.receive(timeout_s)
    except ChannelClosed:
        message = None
    try:
        if message is None:
            late = f"did not come to its first loop within {timeout_s:.0f} s"
            how = process.ending().words if process.wait(1) else late
            raise EngineError(f"the worker that prepares the launch {how}")
        if message.kind == "failed":
            raise remote_error("worker 0", message)
        if message.kind == "result":
            raise UsageError("the function returned without a loop over me.loader(...); there is nothing to share")
        return Arena(msgspec.convert(message.body["spec"], ArenaSpec, strict=False), message.fds[0])
    finally:
        process.signal(9)
        process.wait(10)
        process.close()
        stack.close()
        parcel.close()
