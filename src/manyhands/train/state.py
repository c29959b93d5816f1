"""The state of a model in an arena: laid out, filled, copied back, saved and loaded by name.

Names are those of ``state_dict``: a checkpoint knows nothing of planes, units, lanes or workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from manyhands.comm.arena import Arena, ArenaSpec, dtype_of, lay_out
from manyhands.comm.ship import Place
from manyhands.errors import CheckpointMismatch, ModelError
from manyhands.sync.apply import cut_units
from manyhands.sync.optimizer_state import StateLayout, Template, layout_of, template_of
from manyhands.sync.undo import BATCH_UNITS, undo_capacity
from manyhands.train.strategy import MOST_WORKERS

WHOLE_BYTES = 4 << 20  # parameters of a model that is applied whole, by one worker, where steps may be taken again

__all__ = ["ModelState", "check_model", "differences", "mismatch"]


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model that cannot be trained, before anything is started."""
    names = {id(p): n for n, p in model.named_parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if strangers := held - names.keys():
        raise ModelError(
            f"the optimizer holds {len(strangers)} parameters that the model does not have; "
            "build it on model.parameters() of the model that the Trainer gets"
        )
    if not any(p.requires_grad and id(p) in held for p in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has no trainable parameters in the optimizer ({len(names)} parameters in all); "
            "set requires_grad on some, or use evaluate and predict, which need none"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise ModelError(f"{name} is on {tensor.device}; valid is cpu: move the model with model.cpu() first")
        if nn.parameter.is_lazy(tensor):
            raise ModelError(f"{name} has no shape yet; call the model once on a batch before training it")


class ModelState:
    """One model (and optimizer) in one arena."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, repeatable: bool = False, **shape: int
    ) -> None:
        """``shape``: lanes, samples, stats and ring of the ArenaSpec; ``repeatable``: steps may be taken again."""
        named = list(model.named_parameters())
        held = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else set()
        trained = [(n, p) for n, p in named if id(p) in held and p.requires_grad]
        fixed = [(n, p) for n, p in named if not (id(p) in held and p.requires_grad)]
        buffers = list(model.named_buffers())
        entries = lay_out(trained)
        self.template: Template | None = None
        layout = StateLayout()
        if optimizer is not None:
            frozen = {id(p) for _, p in fixed}
            self.template = template_of(_without(optimizer, frozen), [p for _, p in trained])
            layout = layout_of(self.template, entries)
        units = cut_units(entries, self.template is not None and self.template.elementwise and not layout.extras)
        extra_bytes: dict[int, int] = {}
        for extra in layout.extras:
            size = torch.empty(extra.shape, dtype=dtype_of(extra.dtype)).nbytes
            extra_bytes[extra.parameter] = extra_bytes.get(extra.parameter, 0) + size + 64
        keeps = repeatable and sum(entry.size_bytes for entry in entries) <= WHOLE_BYTES
        unit_bytes = [unit.stop - unit.start for unit in units]
        undo_bytes = undo_capacity(len(layout.planes), unit_bytes, list(extra_bytes.values()))
        spec = ArenaSpec(
            parameters=entries,
            fixed=lay_out(fixed),
            buffers=lay_out(buffers),
            planes=layout.planes,
            extras=layout.extras,
            scalars=layout.scalars,
            units=units,
            slots=MOST_WORKERS,
            undo_bytes=0 if keeps else undo_bytes,
            undo_units=0 if keeps else BATCH_UNITS,
            keeps=keeps,
            hyper=max(len(self.template.hyper) if self.template else 0, 1),
            **shape,
        )
        self.arena = Arena(spec)
        self._units_of: dict[int, list[int]] = {}
        for number, unit in enumerate(units):
            self._units_of.setdefault(unit.parameter, []).append(number)
        self.places = {id(p): self._place(self.arena.parameter_offset(i), p) for i, (_, p) in enumerate(trained)}
        self.places |= {id(p): self._place(self.arena.fixed_offset(i), p) for i, (_, p) in enumerate(fixed)}
        self.copy_in(model)
        if optimizer is not None and optimizer.state:
            self._load_optimizer({n: optimizer.state.get(p) for n, p in trained})

    @staticmethod
    def _place(offset: int, tensor: torch.Tensor) -> Place:
        return Place(0, offset, tuple(tensor.shape), tensor.dtype)

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        spec, arena = self.arena.spec, self.arena
        names = [e.name for e in (*spec.parameters, *spec.fixed, *spec.buffers)]
        return dict(zip(names, [*arena.parameters(), *arena.fixed(), *arena.buffers()], strict=True))

    @torch.no_grad()
    def copy_in(self, model: nn.Module) -> None:
        """Take the values of ``model``."""
        ours = self._model_tensors()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            ours[name].copy_(tensor)

    @torch.no_grad()
    def copy_out(self, model: nn.Module) -> None:
        """Give ``model`` the values as they are now."""
        ours = self._model_tensors()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(ours[name])

    @torch.no_grad()
    def copy_out_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give ``optimizer`` its state, so that another fit goes on from it."""
        parameters = dict(model.named_parameters())
        for name, value in self._optimizer_tensors().items():
            parameter, _, key = name.rpartition("/")
            kept = value.float() if value.ndim == 0 and key in self.arena.spec.scalars else value.clone()
            optimizer.state[parameters[parameter]][key] = kept

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """State by ``parameter/key``: views of the arena, and single numbers."""
        arena, spec = self.arena, self.arena.spec
        found: dict[str, torch.Tensor] = {}
        for index, key in enumerate(spec.planes):
            for number, view in enumerate(arena.parameters(1 + index)):
                if self._ready(number):
                    found[f"{spec.parameters[number].name}/{key}"] = view
        for number, extra in enumerate(spec.extras):
            if self._ready(extra.parameter):
                found[f"{spec.parameters[extra.parameter].name}/{extra.key}"] = arena.extra(number)
        for number, entry in enumerate(spec.parameters):
            if self._ready(number):
                for column, key in enumerate(spec.scalars):
                    value = arena.scalars[self._units_of[number][0], column]
                    found[f"{entry.name}/{key}"] = torch.tensor(value, dtype=torch.float64)
        return found

    # -- by name, for checkpoints ---------------------------------------------------------------------------
    def snapshot(self) -> dict[str, torch.Tensor]:
        """A private copy of everything. The state must not change meanwhile."""
        copies = {f"model/{name}": tensor.clone() for name, tensor in self._model_tensors().items()}
        return copies | {f"optimizer/{name}": tensor.clone() for name, tensor in self._optimizer_tensors().items()}

    def _ready(self, parameter: int) -> bool:
        units = self._units_of.get(parameter)
        return bool(units and self.arena.control.unit_ready[units[0]])

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the state of a checkpoint; refuses one of another model before anything is changed."""
        ours = {f"model/{name}": tensor for name, tensor in self._model_tensors().items()}
        theirs = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
        if problems := differences(ours, theirs):
            raise mismatch(problems, "resume with the model that wrote it, or start a new run")
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])
        state: dict[str, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
                state.setdefault(parameter, {})[key] = tensor
        self._load_optimizer(state)

    def _load_optimizer(self, state: Mapping[str, Mapping[str, Any] | None]) -> None:
        arena, spec = self.arena, self.arena.spec
        planes = {key: arena.parameters(1 + index) for index, key in enumerate(spec.planes)}
        for number, entry in enumerate(spec.parameters):
            values = state.get(entry.name)
            units = self._units_of.get(number)
            if not values or not units:
                continue
            first, stop = units[0], units[-1] + 1
            for key, value in values.items():
                if key in planes:
                    planes[key][number].copy_(value)
                elif key in spec.scalars:
                    arena.scalars[first:stop, spec.scalars.index(key)] = float(value)
            for index, extra in enumerate(spec.extras):
                if extra.parameter == number and extra.key in values:
                    arena.extra(index).copy_(values[extra.key])
            arena.control.unit_ready[first:stop] = 1


def _without(optimizer: torch.optim.Optimizer, excluded: set[int]) -> torch.optim.Optimizer:
    """The same optimizer without the parameters that are frozen."""
    slim = object.__new__(type(optimizer))
    slim.__dict__.update(vars(optimizer))
    slim.param_groups = [
        dict(group, params=[p for p in group["params"] if id(p) not in excluded]) for group in optimizer.param_groups
    ]
    return slim


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """Which tensors of two models have other names, shapes or types."""
    problems = [f"{n.removeprefix('model/')} is missing" for n in ours if n not in theirs]
    problems += [f"{n.removeprefix('model/')} is not in this model" for n in theirs if n not in ours]
    for name, tensor in ours.items():
        other = theirs.get(name)
        if other is not None and (other.shape != tensor.shape or other.dtype != tensor.dtype):
            problems.append(
                f"{name.removeprefix('model/')} is {tuple(other.shape)} {other.dtype} there, "
                f"{tuple(tensor.shape)} {tensor.dtype} here"
            )
    return problems


def mismatch(problems: list[str], advice: str) -> CheckpointMismatch:
    """The error that lists which tensors differ."""
    shown = "; ".join(problems[:8]) + (" …" if len(problems) > 8 else "")
    return CheckpointMismatch(f"the checkpoint is of another model: {shown}. What to do: {advice}.")
