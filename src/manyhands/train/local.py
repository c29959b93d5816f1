"""Local steps in a Trainer: how a worker computes a share, and what the caller holds and saves of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.core.rounds import cut_fragments
from manyhands.errors import ModelError
from manyhands.sync.allreduce import Stepper
from manyhands.sync.client import Courier
from manyhands.sync.clip import Clip
from manyhands.sync.local import OWN, Inner, ShareMemory, memory_of
from manyhands.sync.optimizer_state import HyperKey, Template, without_compiler
from manyhands.train.lane import Job, LaneRunner
from manyhands.train.state import ModelState, Needs, dissect, sort_parameters, state_in

__all__ = ["LocalState", "ShareRunner"]


class ShareRunner(LaneRunner):
    """Computes shares: the lane's part of every batch of a round, each with a step of the user's optimizer."""

    def __init__(
        self,
        arena: Arena,
        job: Job,
        stepper: Stepper | Courier,
        *,
        inner: Template,
        scalars: Sequence[str],
        clips: Sequence[Clip],
        fragment_of: Sequence[int],
    ) -> None:
        """``fragment_of``: the fragment that each parameter belongs to."""
        super().__init__(arena, job, stepper)
        named = dict(job.model.named_parameters())
        self._parameters = [named[entry.name] for entry in arena.spec.parameters]
        self._agreed = arena.parameters()
        begun = self._agreed if stepper.home is None else arena.pulled(stepper.home)
        self._inner = Inner(arena, inner, scalars, clips, begun)
        self._fragment_of = fragment_of
        self._look_at(self._agreed)

    def before_inference(self) -> None:
        """Apart from its own steps, the model looks at the agreed parameters anyway."""

    def _due(self, number: int) -> list[bool]:
        """Which parameters are agreed on after a round."""
        due = self._course.due(number)
        return [fragment in due for fragment in self._fragment_of]

    def begin_step(self) -> None:
        """The worker takes part in the stepper's round, with or without shares."""
        if self._compressor is not None:
            self._compressor.begin_step(self._due(self._stepper.step))

    def run(self, lane: int) -> None:
        """Compute the share in the stepper's round and stamp it."""
        stepper, bank = self._stepper, self._stepper.bank
        home = lane if self._home is None else self._home
        stepper.begin_lane(lane)
        self._replica.begin(home)
        self._inner.begin(bank, home, self._due(stepper.step - 1))
        self._look_at(self._inner.parameters)
        rows = [self._step(batch, lane) for batch in self._batches()]
        self._look_at(self._agreed)
        self._inner.end(bank, home, *self._weight(rows))
        contributes = self._contribute(rows)
        self._replica.end(home)
        if contributes:
            self._send(home)
        stepper.end_lane(lane, bad=not contributes)

    def _batches(self) -> range:
        """The batches of the share."""
        return self._course.batches(self._stepper.step)

    def _weight(self, rows: Sequence[int]) -> tuple[int, int]:
        """The rows that the share counts for, and those that a change of full weight would have."""
        return sum(rows), sum(self._course.batch_rows(batch) for batch in self._batches())

    def _contribute(self, rows: Sequence[int]) -> bool:
        """Leave in the lane what the share contributes; ``rows``: those that took part in each step. Whether it does
        contribute something; a share without rows in its round contributes no change."""
        for index, due in enumerate(self._due(self._stepper.step)):
            if due and self._inner.touched[index] and (target := self._replica.place(index)) is not None:
                self._inner.change(index, target)
        return True

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the model work with these parameters."""
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor

    def _step(self, batch: int, lane: int) -> int:
        """One step of the share; returns the rows that took part in it."""
        rows = len(self._course.positions(self._arena.order, batch, lane))
        if not rows:
            return 0
        before = [buffer.clone() for buffer in self._replica.buffers()] if self._job.nan == "skip" else []
        finite = self._run_batch(batch, lane, rows)
        gradients = self._replica.take()
        place = batch % self._arena.spec.ring
        if finite:
            self._inner.step(self._arena.hyper[place], gradients)
            return rows
        self._stepper.report(batch, lane, [0.0] * self._arena.spec.stats)  # these rows do not count
        for buffer, kept in zip(self._replica.buffers(), before, strict=True):
            buffer.copy_(kept)
        return 0


class LocalState(ModelState):
    """One model in one arena, with the outer optimizer's state, and the user's optimizer's state of every share.

    In a checkpoint ``optimizer`` is the mean of the shares' state: what every other way of agreeing can go on with.
    """

    state_name = "outer"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        outer: Callable[[Iterable[Any]], torch.optim.Optimizer],
        memory: Sequence[str] = (),
        needs: Needs | None = None,
        *,
        fragments: int = 1,
        **shape: int,
    ) -> None:
        """``memory``: what a codec keeps of each share, and of their sum unless ``needs`` says otherwise;
        ``fragments``: into how many the parameters are cut that are agreed on in turns."""
        self.inner, layout = dissect(model, optimizer)
        if layout.extras:
            raise ModelError(
                f"the optimizer {type(optimizer).__name__} keeps state shaped unlike its parameters "
                f"({layout.extras[0].key}), which nobody keeps between steps of their own; valid for local steps and "
                "mixing: optimizers whose state is numbers or shaped like the parameters, such as SGD, Adam, AdamW"
            )
        self.scalars = layout.scalars
        trained, _ = sort_parameters(model, optimizer)
        layers = [name.rpartition(".")[0] or name for name, _ in trained]
        self.fragment_of = cut_fragments(layers, [parameter.nbytes for _, parameter in trained], fragments)
        planes, numbers = memory_of(layout, len(trained), own=fragments > 1)
        with without_compiler():
            applied = outer([parameter for _, parameter in trained])
        needs = replace(
            Needs(answers=bool(memory)) if needs is None else needs,
            memory=[*planes, *memory],
            memory_numbers=numbers,
            hyper=max(len(self.inner.hyper), 1),
        )
        super().__init__(model, applied, needs, **shape)
        assert self.template is not None
        self.template.hyper = []  # a schedule is about the user's optimizer; these numbers stay as they are
        self._shares = ShareMemory(self.arena, self.scalars)
        if optimizer.state:
            self._give(0, {name: optimizer.state.get(parameter) or {} for name, parameter in trained})

    @property
    def hyper(self) -> list[HyperKey]:
        return self.inner.hyper

    def _banks(self) -> list[tuple[int, int]]:
        """Where the state of each share is now: a step, for the bank, and a lane."""
        return [(self.arena.control.steps, lane) for lane in range(self.arena.spec.lanes)]

    def _give(self, step: int, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Let every share begin with the same state."""
        states = [state.get(entry.name, {}) for entry in self.arena.spec.parameters]
        for lane in range(self.arena.spec.lanes):
            self._shares.write(step, lane, states)

    def _mean(self) -> dict[str, dict[str, torch.Tensor]]:
        """The mean over the shares that have a state, by parameter and key; single numbers are those of the first."""
        found = {}
        shares = [self._shares.read(step, lane) for step, lane in self._banks()]
        columns = zip(self.arena.spec.parameters, *shares, strict=True)
        for entry, *states in columns:
            ready = [state for state in states if state]
            if ready:
                found[entry.name] = {
                    key: value if key in self.scalars else _mean([state[key] for state in ready])
                    for key, value in ready[0].items()
                }
        return found

    def copy_out_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give ``optimizer`` the mean of what the shares hold, so that another fit goes on from it."""
        parameters = dict(model.named_parameters())
        for name, state in self._mean().items():
            optimizer.state[parameters[name]].update(state)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything by name."""
        mean = {
            f"optimizer/{name}/{key}": value for name, state in self._mean().items() for key, value in state.items()
        }
        return super().tensors() | mean

    def _lane_tensors(self, step: int) -> dict[str, torch.Tensor]:
        # What a codec left out of a change is no gradient: all-reduce must not take it for one, nor we one of its.
        found = super()._lane_tensors(step)
        return {name.replace("/residual/", "/change_residual/", 1): tensor for name, tensor in found.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Take the state of a checkpoint. One that has no shares of ours gives every share the same state, and the
        agreed parameters."""
        super().load(tensors, step)
        if not any(name.split("/")[2] == OWN for name in tensors if name.startswith("lanes/")):
            for lane in range(self.arena.spec.lanes):
                self._shares.counts(step, lane)[:] = 0
                for own, agreed in zip(self._shares.own(step, lane) or (), self.arena.parameters(), strict=False):
                    own.copy_(agreed)
        for name, ours in self._lane_tensors(step).items():
            of_inner = name.split("/")[2] in ("inner", "numbers")
            if of_inner and (name not in tensors or tensors[name].shape != ours.shape):
                self._give(step, state_in(tensors, "optimizer"))
                return


@torch.no_grad()
def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total.div_(len(values))
