"""The life of a worker process: take the job, train lanes, answer messages, leave."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import traceback
from typing import Any

import msgspec
import numpy as np
import torch

from manyhands.comm import ship
from manyhands.comm.arena import LEFT_OUT, Arena, ArenaSpec
from manyhands.core.policies import usual_ramp
from manyhands.data.source import Source
from manyhands.engine.channel import Channel, Message
from manyhands.engine.local import cores
from manyhands.errors import ChannelClosed
from manyhands.sync.allreduce import Role, Stepper
from manyhands.sync.apply import Applier
from manyhands.sync.client import Client, GivenUp
from manyhands.sync.compress import Answer
from manyhands.sync.optimizer_state import without_compiler
from manyhands.sync.pulse import Stopped
from manyhands.sync.server import Service
from manyhands.sync.socket_client import SocketClient
from manyhands.sync.socket_server import Codecs, Post, SocketServer
from manyhands.sync.whole import WholeStepper
from manyhands.train.evaluation import evaluate_batch, predict_batch
from manyhands.train.lane import Job
from manyhands.train.own_loop import Hand, LaunchJob
from manyhands.train.stack import answer_with_stack

__all__ = ["main", "worker_slot"]

_SETUP_TIMEOUT_S = 120.0
_SPIN_S = 200e-6
_MESSAGE_TIMEOUT_S = 60.0  # a message that was announced must come
_slot: int | None = None

Driver = Stepper | Client | Service | SocketClient | SocketServer


def worker_slot() -> int | None:
    """The number of this worker; None outside of one."""
    return _slot


def main(channel: Channel) -> None:
    """Entry of a worker process. Returns when the run ends or the caller is gone."""
    global _slot
    message = channel.receive(_SETUP_TIMEOUT_S)
    if message is None or message.kind != "setup":
        return
    _slot = message.body["slot"]
    where: dict[str, Any] = {"phase": "set-up"}
    try:
        arena, job = _unpack(message)
        if isinstance(job, LaunchJob):
            where["phase"] = "launch"
            _own_loop(channel, arena, job, message.body["slot"])
        else:
            post = message.body["post"]
            post = None if post is None else msgspec.convert(post, Post, strict=False)
            worker = Worker(channel, arena, job, message.body["slot"], message.body["role"], post)
            where["phase"] = "run"
            with contextlib.closing(worker):
                worker.work()
    except (Stopped, ChannelClosed):
        return
    except Exception as error:
        _fail(channel, error, where)


def _unpack(message: Message) -> tuple[Arena | None, Job | LaunchJob]:
    """The arena (None for the process that finds out what it must hold) and the job."""
    body, fds = message.body, message.fds
    answer_with_stack(fds[0])
    spec = body["arena"]
    arena = None if spec is None else Arena(msgspec.convert(spec, ArenaSpec, strict=False), fds[1])
    rest = fds[1:] if arena is None else fds[2:]
    job = ship.unpack(body["code"], [] if arena is None else [arena.segment], rest, body["sizes_bytes"])
    assert isinstance(job, (Job, LaunchJob))
    torch.set_num_threads(job.threads)
    return arena, job


def _own_loop(channel: Channel, arena: Arena | None, job: LaunchJob, slot: int) -> None:
    """Run the user's function; the caller gets what it returns."""
    hand = Hand(channel, arena, job, slot)
    with without_compiler():
        result = job.function(hand, *job.arguments)
    channel.send("result", {"value": ship.pack_value(result)})
    _park(channel)


def _fail(channel: Channel, error: BaseException, where: dict[str, Any]) -> None:
    """Tell the caller, and wait to be ended: a worker whose code failed must not look like one that died."""
    with contextlib.suppress(ChannelClosed):
        text = "".join(traceback.format_exception(error))
        channel.send("failed", {"error": ship.pack_exception(error), "text": text, **where})
        _park(channel)


def _park(channel: Channel) -> None:
    while True:
        if (message := channel.receive(3600)) is not None and message.kind == "leave":
            return


def _no_rows(step: int) -> list[int]:
    return []


def _driver(arena: Arena, job: Job, slot: int, role: Role, post: Post | None) -> Driver:
    """Who takes the process through the run: by steps in common, or by updates that are brought to servers."""
    if arena.spec.exchange and job.template is not None:
        if post is not None and role == "worker":
            return SocketClient(arena, slot, post, job.clips, Codecs(job.codec, job.pull_codec))
        if post is not None:
            assert job.policy is not None
            codecs = Codecs(job.codec, job.pull_codec)
            return SocketServer(arena, slot, post, job.template, job.policy, codecs, job.predict)
        if role == "worker":
            return Client(arena, slot, job.clips, counts=job.codec is None)
        assert job.policy is not None
        index = slot - arena.spec.slots + arena.spec.exchange
        assert job.course is not None
        ramp = usual_ramp(job.course.steps_per_epoch) if job.ramp is None else job.ramp
        return Service(arena, slot, index, job.template, job.policy, job.predict, job.rates, ramp)
    applies = job.template is not None and role != "worker"
    applier = Applier(arena, job.template, job.clips, slot) if applies and job.template is not None else None
    rows = _no_rows if job.course is None else functools.lru_cache(4)(job.course.lane_rows)
    answer = Answer(arena, job.codec) if applies and job.codec is not None and LEFT_OUT in arena.spec.planes else None
    stepper = WholeStepper if arena.spec.whole else Stepper
    return stepper(
        arena, slot, applier, rows, skip_bad=job.nan == "skip", spin_s=_SPIN_S, cores=cores(), role=role, mend=answer
    )


class Worker:
    """One worker of a Trainer."""

    def __init__(
        self,
        channel: Channel,
        arena: Arena | None,
        job: Job | LaunchJob,
        slot: int,
        role: Role = "both",
        post: Post | None = None,
    ) -> None:
        assert isinstance(job, Job)
        assert arena is not None
        self._channel, self._arena, self._job, self._slot = channel, arena, job, slot
        self._sources: dict[int, Source] = {}
        self._answered = arena.control.slot_value(slot, "inbox")
        job.model.train()
        self._stepper = _driver(arena, job, slot, role, post)
        self._runner = None
        if job.runner is not None and not isinstance(self._stepper, Service | SocketServer) and role != "server":
            self._runner = job.runner(arena, job, self._stepper)
        channel.send("ready")

    def close(self) -> None:
        """Close what the driver has opened."""
        if isinstance(self._stepper, SocketClient | SocketServer):
            self._stepper.close()

    def work(self) -> None:
        """Take part in steps and answer messages until told to leave."""
        while True:
            if self._stepper.turn() == "message":
                self._answer()
                continue
            try:
                self._step()
            except GivenUp:
                continue
            except Stopped:
                raise
            except Exception as error:
                _fail(self._channel, error, self._where())
                raise Stopped from error

    def _step(self) -> None:
        runner = self._runner
        assert not isinstance(self._stepper, Service | SocketServer)
        if runner is not None:
            runner.begin_step()
        while True:
            if runner is not None:
                for lane in self._stepper.lanes():
                    runner.run(lane)
            if self._stepper.finish(None if runner is None else runner.fetch_ahead):
                return

    def _where(self) -> dict[str, Any]:
        """What was being done, for the message about an error."""
        if self._runner is None:
            return {"phase": "apply"}
        course, lane, batch = self._job.course, self._arena.control.slot_value(self._slot, "lane"), self._runner.batch
        if course is None or lane < 0:
            return {"phase": "apply", "step": batch}
        samples = course.positions(self._arena.order, batch, lane).tolist()
        return {"phase": "step", "step": batch, "lane": lane, "samples": samples}

    def _answer(self) -> None:
        while self._answered != self._arena.control.slot_value(self._slot, "inbox"):
            message = self._channel.receive(_MESSAGE_TIMEOUT_S)
            if message is None:
                raise Stopped
            self._answered += 1
            if message.kind == "leave":
                raise Stopped
            if message.kind == "source":
                self._take_source(message)
            elif message.kind in ("evaluate", "predict"):
                try:
                    self._infer(message)
                except ChannelClosed:
                    raise
                except Exception as error:
                    first, stop = message.body["rows"]
                    _fail(self._channel, error, {"phase": message.kind, "samples": list(range(first, stop))})
                    raise Stopped from error

    def _take_source(self, message: Message) -> None:
        body = message.body
        self._sources.clear()
        source = ship.unpack(body["code"], [self._arena.segment], message.fds, body["sizes_bytes"])
        self._sources[body["source"]] = source
        for fd in message.fds:
            os.close(fd)

    def _infer(self, message: Message) -> None:
        """Evaluate or predict the rows of a chunk, in fixed batches."""
        body, job = message.body, self._job
        source = self._sources[body["source"]]
        model = job.model.eval()
        if self._runner is not None:
            self._runner.before_inference()
        holders = dict(model.named_buffers())
        for entry, agreed in zip(self._arena.spec.buffers, self._arena.buffers(), strict=True):
            holders[entry.name].copy_(agreed)
        run = evaluate_batch if message.kind == "evaluate" else predict_batch
        try:
            start, stop = body["rows"]
            for first in range(start, stop, body["batch"]):
                self._stepper.enter("message")
                rows = np.arange(first, min(first + body["batch"], stop), dtype=np.int64)
                begun = time.perf_counter()
                answer = run(job, source, rows)
                answer |= {
                    "task": body["task"],
                    "first": first,
                    "count": len(rows),
                    "seconds": time.perf_counter() - begun,
                }
                self._channel.send("result", answer)
        finally:
            model.train()
