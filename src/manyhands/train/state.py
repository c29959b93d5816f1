"""The state of a model in an arena: laid out, filled, copied back, saved and loaded by name.

Names are those of ``state_dict``: a checkpoint knows nothing of planes, units, lanes or workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.comm.arena import LEFT_OUT, MOST_WORKERS, Arena, ArenaSpec, Entry, dtype_of, lay_out
from manyhands.comm.ship import Place
from manyhands.sync.factors import FACTORED_BYTES, rows_together
from manyhands.sync.optimizer_state import HyperKey, StateLayout, Template, layout_of, template_of
from manyhands.sync.undo import BATCH_UNITS, undo_capacity
from manyhands.sync.units import cut_units
from manyhands.train.compare import differences, mismatch
from manyhands.train.loan import Loan
from manyhands.train.row_tables import TableState, find_tables
from manyhands.train.straight import large_linears

KEPT_BYTES = 32 << 20  # parameters of a model of which a copy is kept, where steps may be taken again
SERVED_BYTES = 4 << 20  # of one that a server applies whole then, to whom gradients must be copied
WHOLE_BYTES = 1 << 18  # of one that is then applied whole, by one worker

Named = tuple[str, nn.Parameter]

__all__ = ["ModelState", "Needs", "dissect", "sort_parameters", "state_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a way of agreeing needs of the state, beside the model and the optimizer."""

    repeatable: bool = False
    """Steps may be taken again."""
    memory: Sequence[str] = ()
    """What each lane keeps from step to step, in the shapes of the parameters."""
    memory_numbers: int = 0
    """Single numbers that it keeps."""
    answers: bool = False
    """What a codec leaves out of sums is kept."""
    servers: int = 0
    """How many processes serve."""
    exchange: bool = False
    """Workers bring them updates one by one, each in a lane of its own."""
    parts: int | None = None
    """Into how many the parameters are cut then, if not one for each server."""
    ahead: bool = False
    """A worker has two lanes there, and computes into one while the other is applied."""
    span: int = 1
    """How many batches an update has, at most."""
    by_row: bool = True
    """Tables are held by row there."""
    factors: bool = False
    """Who applies a unit may make the product that its gradient is."""
    hyper: int = 1
    """Numbers that a schedule tells, at least."""


def _cut(
    model: nn.Module, entries: Sequence[Entry], template: Template | None, layout: StateLayout, needs: Needs, lanes: int
) -> dict[str, Any]:
    """How what is applied is cut, and how a death in apply is answered: by an undo log, or from a copy."""
    # What lanes keep has two banks, which is enough to compute a lane again, not to go back by many steps.
    size_bytes = sum(entry.size_bytes for entry in entries)
    most = min(KEPT_BYTES, SERVED_BYTES) if needs.servers else KEPT_BYTES
    keeps = needs.repeatable and not needs.memory and not needs.memory_numbers and size_bytes <= most
    shared = lanes > 1 and not needs.servers and size_bytes > WHOLE_BYTES
    whole = keeps and not shared
    elementwise = template is not None and template.elementwise and not layout.extras
    factored = _factored(model, entries) if needs.factors and elementwise and not whole else []
    units = cut_units(entries, elementwise, factored)
    planes = [*layout.planes, *([LEFT_OUT] if needs.answers else [])]
    unit_bytes = [unit.stop - unit.start for unit in units]
    undo_bytes = undo_capacity(len(planes), unit_bytes, _extra_bytes(layout), alone=needs.exchange)
    return {
        "planes": planes, "units": units, "factored": factored, "keeps": keeps, "whole": whole,
        "undo_bytes": 0 if keeps else undo_bytes, "undo_units": 0 if keeps else BATCH_UNITS,
    }  # fmt: skip


class ModelState:
    """One model (and optimizer) in one arena."""

    state_name = "optimizer"
    """What the state of the optimizer that is applied is called in a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        needs: Needs | None = None,
        *,
        lanes: int,
        samples: int,
        stats: int,
        ring: int,
    ) -> None:
        """``needs``: of the way of agreeing; the other numbers are those of the ArenaSpec."""
        needs = needs or Needs()
        exchange = needs.exchange
        tables = find_tables(model, optimizer) if exchange and needs.by_row and optimizer is not None else []
        of_tables = {id(p) for _, p in tables}
        ahead = needs.ahead and not tables  # rows are read in the middle of a batch, and have one place
        trained, fixed = sort_parameters(model, optimizer, of_tables)
        buffers = list(model.named_buffers())
        entries = lay_out(trained)
        self.template: Template | None = None
        layout = StateLayout()
        if optimizer is not None:
            self.template, layout = dissect(model, optimizer, of_tables)
        spec = ArenaSpec(
            parameters=entries,
            fixed=lay_out(fixed),
            buffers=lay_out(buffers),
            extras=layout.extras,
            scalars=layout.scalars,
            slots=MOST_WORKERS + needs.servers,
            **_cut(model, entries, self.template, layout, needs, lanes),
            memory=list(needs.memory),
            memory_numbers=needs.memory_numbers,
            exchange=(needs.parts or needs.servers) if exchange else 0,
            ahead=ahead,
            span=needs.span,
            tables=[table for table, _ in tables],
            hyper=max(len(self.template.hyper) if self.template else 0, needs.hyper),
            lanes=MOST_WORKERS * (1 + ahead) if exchange else lanes,
            samples=samples,
            stats=stats + (2 if tables else 0),  # of every chunk: rows pulled, rows pushed
            ring=ring,
        )
        self.arena = Arena(spec)
        self._state_keys = layout.keys
        self._loan: Loan | None = None
        self._by_row = TableState(self.arena) if tables else None
        self._units_of: dict[int, list[int]] = {}
        for number, unit in enumerate(spec.units):
            self._units_of.setdefault(unit.parameter, []).append(number)
        self.places = self._find_places(trained, fixed, [parameter for _, parameter in tables])
        self.copy_in(model)
        if optimizer is not None and optimizer.state:
            self._load_optimizer({n: optimizer.state.get(p) for n, p in model.named_parameters()})

    def _find_places(
        self, trained: Sequence[Named], fixed: Sequence[Named], tables: Sequence[torch.Tensor]
    ) -> dict[int, Place]:
        """Where each parameter lies, by its identity: workers are told the place instead of the values."""
        arena = self.arena
        places = {id(p): self._place(arena.parameter_offset(i), p) for i, (_, p) in enumerate(trained)}
        places |= {id(p): self._place(arena.fixed_offset(i), p) for i, (_, p) in enumerate(fixed)}
        if self._by_row is not None:
            offsets = zip(self._by_row.offsets(), tables, strict=True)
            places |= {id(p): self._place(offset, p) for offset, p in offsets}
        return places

    @staticmethod
    def _place(offset: int, tensor: torch.Tensor) -> Place:
        return Place(0, offset, tuple(tensor.shape), tensor.dtype)

    @property
    def hyper(self) -> list[HyperKey]:
        """The numbers of the user's optimizer that a schedule may change."""
        return [] if self.template is None else self.template.hyper

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        spec, arena = self.arena.spec, self.arena
        names = [e.name for e in (*spec.parameters, *spec.fixed, *spec.buffers)]
        found = dict(zip(names, [*arena.parameters(), *arena.fixed(), *arena.buffers()], strict=True))
        return found if self._by_row is None else found | self._by_row.values()

    @torch.no_grad()
    def copy_in(self, model: nn.Module) -> None:
        """Take the values of ``model``."""
        ours = self._model_tensors()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            ours[name].copy_(tensor)

    def lend(self, model: nn.Module) -> None:
        """Until ``take_back``, a large ``model`` reads its parameters from here."""
        if self.arena.plane_bytes > KEPT_BYTES:
            self._loan = Loan(model, self.arena)

    def take_back(self, model: nn.Module) -> None:
        """The model has its parameters for itself again; it is as it is here now."""
        if self._loan is not None:
            self.copy_out(model)
            self._loan.end()
            self._loan = None

    @torch.no_grad()
    def copy_out(self, model: nn.Module) -> None:
        """Give ``model`` the values as they are now."""
        ours, lent = self._model_tensors(), frozenset[str]()
        if self._loan is not None:
            self._loan.refresh()
            lent = self._loan.names
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in lent:
                tensor.copy_(ours[name])

    @torch.no_grad()
    def copy_out_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give ``optimizer`` its state, so that another fit goes on from it."""
        parameters = dict(model.named_parameters())
        for name, value in self._optimizer_tensors().items():
            parameter, _, key = name.rpartition("/")
            single = value.ndim == 0 and key in (*self.arena.spec.scalars, "step")
            kept = value.float() if single else value.clone()
            optimizer.state[parameters[parameter]][key] = kept

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """State by ``parameter/key``: views of the arena, and single numbers."""
        arena, spec = self.arena, self.arena.spec
        found: dict[str, torch.Tensor] = {}
        for index, key in enumerate(spec.planes):
            for number, view in enumerate(arena.parameters(1 + index)):
                if self._ready(number) and key != LEFT_OUT:
                    found[f"{spec.parameters[number].name}/{key}"] = view
        for number, extra in enumerate(spec.extras):
            if self._ready(extra.parameter):
                found[f"{spec.parameters[extra.parameter].name}/{extra.key}"] = arena.extra(number)
        for number, entry in enumerate(spec.parameters):
            if self._ready(number):
                for column, key in enumerate(spec.scalars):
                    value = arena.scalars[self._units_of[number][0], column]
                    found[f"{entry.name}/{key}"] = torch.tensor(value, dtype=torch.float64)
        return found if self._by_row is None else found | self._by_row.optimizer_tensors()

    # -- by name, for checkpoints ---------------------------------------------------------------------------
    def snapshot(self) -> dict[str, torch.Tensor]:
        """A private copy of everything. The state must not change meanwhile."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything by name, as it lies in the arena."""
        ours = {f"model/{name}": tensor for name, tensor in self._model_tensors().items()}
        ours |= {f"{self.state_name}/{name}": tensor for name, tensor in self._optimizer_tensors().items()}
        if self.arena.spec.exchange:
            return ours | self._workers_tensors()
        return ours | self._left_out() | self._lane_tensors(self.arena.control.steps)

    def _left_out(self) -> dict[str, torch.Tensor]:
        """What a codec has left out of the sums of lanes, by ``left_out/parameter``."""
        spec = self.arena.spec
        if LEFT_OUT not in spec.planes:
            return {}
        views = self.arena.parameters(1 + spec.planes.index(LEFT_OUT))
        return {f"{LEFT_OUT}/{entry.name}": view for entry, view in zip(spec.parameters, views, strict=True)}

    def _lane_tensors(self, step: int) -> dict[str, torch.Tensor]:
        """What the lanes keep from step to step, by ``lanes/number/name/parameter``."""
        lanes = range(1 if self.arena.spec.exchange else self.arena.spec.lanes)
        return {f"lanes/{lane}/{name}": view for lane in lanes for name, view in self._kept(step, lane).items()}

    def _kept(self, step: int, lane: int) -> dict[str, torch.Tensor]:
        arena, found = self.arena, dict[str, torch.Tensor]()
        for name, views in arena.memory(step, lane).items():
            for entry, view in zip(arena.spec.parameters, views, strict=True):
                found[f"{name}/{entry.name}"] = view
        if arena.spec.memory_numbers:
            found["numbers"] = torch.from_numpy(arena.memory_numbers(step, lane))
        return found

    def _workers_tensors(self) -> dict[str, torch.Tensor]:
        """The sum of what workers keep who bring updates of their own: they come and go, the first goes on with it."""
        exchange, found = self.arena.exchange(), dict[str, torch.Tensor]()
        for slot in sorted({0, *np.flatnonzero(exchange.asked).tolist()}):
            bank = int(exchange.asked[slot]) - int(exchange.refused[slot])
            for name, view in self._kept(bank, slot).items():
                full = f"lanes/0/{name}"
                found[full] = found[full].add_(view) if full in found else view.clone()
        return found

    def _ready(self, parameter: int) -> bool:
        units = self._units_of.get(parameter)
        return bool(units and self.arena.control.unit_ready[units[0]])

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Take the state of a checkpoint; refuses one of another model before anything is changed.

        What lanes kept is taken where both sides know of it: a run may go on under another way of agreeing.
        """
        ours = {f"model/{name}": tensor for name, tensor in self._model_tensors().items()}
        theirs = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
        if problems := differences(ours, theirs):
            raise mismatch(problems, "resume with the model that wrote it, or start a new run")
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])
        self._load_optimizer(state_in(tensors, self.state_name))
        bank = 0 if self.arena.spec.exchange else step
        for name, tensor in (self._left_out() | self._lane_tensors(bank)).items():
            if name in tensors and tensors[name].shape == tensor.shape:
                tensor.copy_(tensors[name])

    def _load_optimizer(self, state: Mapping[str, Mapping[str, Any] | None]) -> None:
        arena, spec = self.arena, self.arena.spec
        planes = {key: arena.parameters(1 + index) for index, key in enumerate(spec.planes)}
        for number, entry in enumerate(spec.parameters):
            values = {key: value for key, value in (state.get(entry.name) or {}).items() if value is not None}
            units = self._units_of.get(number)
            # Of another optimizer it may lack something, and zeros in its place are not what a first step begins with.
            if not values or not units or not self._state_keys[number] <= values.keys():
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
        if self._by_row is not None:
            self._by_row.load_optimizer(state)


def _factored(model: nn.Module, entries: Sequence[Entry]) -> list[int]:
    """The weights whose gradient may be left as factors."""
    linears = large_linears(model, [entry.name for entry in entries])
    large = [index for index in linears if entries[index].size_bytes >= FACTORED_BYTES]
    return sorted(index for index in large if rows_together(entries[index].shape))


def _extra_bytes(layout: StateLayout) -> list[int]:
    """Room for the state of each parameter that is shaped unlike it."""
    sizes: dict[int, int] = {}
    for extra in layout.extras:
        size = torch.empty(extra.shape, dtype=dtype_of(extra.dtype)).nbytes
        sizes[extra.parameter] = sizes.get(extra.parameter, 0) + size + 64
    return list(sizes.values())


def sort_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, by_row: Collection[int] = ()
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The parameters that are trained, and those that stay as they are, by name; without those held ``by_row``."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else set()
    trained: list[tuple[str, nn.Parameter]] = []
    fixed: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in by_row:
            (trained if id(parameter) in held and parameter.requires_grad else fixed).append((name, parameter))
    return trained, fixed


def dissect(
    model: nn.Module, optimizer: torch.optim.Optimizer, by_row: Collection[int] = ()
) -> tuple[Template, StateLayout]:
    """How ``optimizer`` updates the parameters that are trained, and which state it keeps of them."""
    trained, fixed = sort_parameters(model, optimizer, by_row)
    template = template_of(_without(optimizer, {id(p) for _, p in fixed} | {*by_row}), [p for _, p in trained])
    return template, layout_of(template, lay_out(trained))


def state_in(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer state that a checkpoint has under ``name``, by parameter and key."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for full, tensor in tensors.items():
        if full.startswith(f"{name}/"):
            parameter, _, key = full.removeprefix(f"{name}/").rpartition("/")
            state.setdefault(parameter, {})[key] = tensor
    return state


def _without(optimizer: torch.optim.Optimizer, excluded: set[int]) -> torch.optim.Optimizer:
    """The same optimizer without the parameters that are frozen."""
    slim = object.__new__(type(optimizer))
    slim.__dict__.update(vars(optimizer))
    slim.param_groups = [
        dict(group, params=[p for p in group["params"] if id(p) not in excluded]) for group in optimizer.param_groups
    ]
    return slim
