"""Takes a torch optimizer apart, so that its work can be cut into units and its state can lie in the arena.

What state an optimizer keeps is found out by letting it make one step on tiny stand-ins of the parameters. State
shaped like its parameter goes into a plane, single numbers into a table, anything else beside them. An optimizer
whose step works element by element may be cut anywhere; any other one gets whole tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.comm.arena import Entry, Extra
from manyhands.comm.segment import aligned
from manyhands.errors import ModelError
from manyhands.sync.delayed import DelayedNesterov
from manyhands.sync.outer import WarmNesterov

__all__ = [
    "NO_LBFGS", "HyperKey", "StateLayout", "Template", "hyper_row", "layout_of", "row_sparse", "template_of",
    "without_compiler",
]  # fmt: skip

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
    DelayedNesterov,
    WarmNesterov,
)
NO_LBFGS = (
    "LBFGS evaluates the loss several times within a step, which a synchronous step over workers cannot do; "
    "valid: every other optimizer of torch.optim"
)
_LENGTHS = (23, 19, 17, 13, 11, 7, 5, 3)  # of the stand-ins: unlike each other and unlike what state is made of


@dataclass(frozen=True, slots=True)
class HyperKey:
    """A number in a parameter group that a schedule may change."""

    group: int
    key: str
    index: int | None  # position in a tuple such as betas


@dataclass(slots=True)
class Template:
    """How to build the user's optimizer over any tensors."""

    kind: type[torch.optim.Optimizer]
    attributes: dict[str, Any]
    groups: list[dict[str, Any]]
    group_of: list[int]
    hyper: list[HyperKey]

    @property
    def elementwise(self) -> bool:
        """Whether a parameter may be cut."""
        return self.kind in _ELEMENTWISE

    @property
    def keeps_state(self) -> bool:
        """Whether state tensors are changed in place, as torch's own optimizers do, and never replaced."""
        return self.kind.__module__.startswith("torch.optim") or self.kind in (DelayedNesterov, WarmNesterov)

    @property
    def step(self) -> Callable[[torch.optim.Optimizer], Any]:
        """The step itself. Torch wraps the steps of its own optimizers for its compiler, and the wrapper imports
        it: a second of start-up that buys nothing here. Call it without gradients."""
        return inspect.unwrap(self.kind.step) if self.keeps_state else self.kind.step

    @property
    def wants_sparse(self) -> bool:
        """Whether gradients must be row-sparse."""
        return self.kind is torch.optim.SparseAdam

    def build(self, members: Sequence[tuple[int, torch.Tensor]]) -> torch.optim.Optimizer:
        """An optimizer over ``(group, tensor)`` members, with no state."""
        optimizer = object.__new__(self.kind)
        optimizer.__dict__.update(self.attributes)
        optimizer.param_groups = [
            dict(group, params=[t for g, t in members if g == i]) for i, group in enumerate(self.groups)
        ]
        optimizer.state = defaultdict(dict)
        return optimizer

    def set_hyper(self, optimizer: torch.optim.Optimizer, row: Sequence[float]) -> None:
        """Give the parameter groups the numbers of a step."""
        for key, value in zip(self.hyper, row, strict=False):
            group = optimizer.param_groups[key.group]
            if key.index is None:
                group[key.key] = value
            else:
                values = list(group[key.key])
                values[key.index] = value
                group[key.key] = tuple(values)


@dataclass(slots=True)
class StateLayout:
    """Which state an optimizer keeps, and where it goes."""

    planes: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    keys: list[frozenset[str]] = field(default_factory=list)
    """Of each parameter, what its first step makes."""


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Build an optimizer without the import of torch's compiler, if the process has not imported it already.

    Torch marks ``add_param_group`` as not to be compiled the first time it is called, and imports the compiler to
    do so. Here the mark is set beforehand, and taken away again.
    """
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules:
        yield
        return
    setattr(function, "__dynamo_disable", function)
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):  # another thread may have been here
            delattr(function, "__dynamo_disable")


def _number(value: object) -> bool:
    return isinstance(value, float) or (
        isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()
    )


def _hyper_keys(groups: Sequence[Mapping[str, Any]]) -> list[HyperKey]:
    keys = []
    for index, group in enumerate(groups):
        for name, value in group.items():
            if name == "params":
                continue
            if _number(value) or (name == "lr" and isinstance(value, int)):
                keys.append(HyperKey(index, name, None))
            elif isinstance(value, tuple) and value and all(isinstance(v, float) for v in value):
                keys.extend(HyperKey(index, name, i) for i in range(len(value)))
    return keys


def hyper_row(optimizer: torch.optim.Optimizer, keys: Sequence[HyperKey]) -> list[float]:
    """The numbers of the optimizer's groups as they are now."""
    row = []
    for key in keys:
        value = optimizer.param_groups[key.group][key.key]
        row.append(float(value if key.index is None else value[key.index]))
    return row


def template_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Template:
    """The template of ``optimizer``; ``parameters`` are the tensors it updates, in arena order."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(NO_LBFGS)
    position = {id(p): i for i, p in enumerate(parameters)}
    group_of = [-1] * len(parameters)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            group_of[position[id(parameter)]] = number
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    attributes = {
        k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "step") and "hook" not in k
    }
    attributes["_warned_capturable_if_run_uncaptured"] = True
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        attributes[name] = type(vars(optimizer).get(name, {}))()
    for group in groups:
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                group[name] = float(value)
    return Template(type(optimizer), attributes, groups, group_of, _hyper_keys(groups))


def layout_of(template: Template, entries: Sequence[Entry]) -> StateLayout:
    """Find the state of every parameter by one step on stand-ins."""
    layout, seen, offset = StateLayout(), {}, 0
    for index, entry in enumerate(entries):
        if template.wants_sparse and not entry.shape:  # torch's step would leave it as it is, and say nothing
            raise ModelError(
                f"SparseAdam received {entry.name!r}, which has no dimensions; valid are parameters with rows: make it "
                "a vector, such as torch.zeros(1), or give it to another optimizer"
            )
        # A parameter without dimensions is tried as a vector: its state would look like single numbers.
        key = (template.group_of[index], max(len(entry.shape), 1), entry.dtype)
        if key not in seen:
            seen[key] = _probe(template, *key)
        layout.keys.append(frozenset(seen[key]))
        for name, value in seen[key].items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                shape = _translate(tuple(value.shape), entry.shape)
                dtype = str(value.dtype).removeprefix("torch.")
                if shape == entry.shape and dtype == entry.dtype:
                    if name not in layout.planes:
                        layout.planes.append(name)
                else:
                    layout.extras.append(Extra(index, name, shape, dtype, offset))
                    offset = aligned(offset + torch.empty(shape, dtype=value.dtype).nbytes)
            elif name not in layout.scalars:
                layout.scalars.append(name)
    return layout


def _probe(template: Template, group: int, dimensions: int, dtype: str) -> dict[str, Any]:
    shape = _LENGTHS[:dimensions]
    stand_in = torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
    stand_in.grad = torch.ones_like(stand_in).to_sparse(1) if template.wants_sparse else torch.ones_like(stand_in)
    try:
        with torch.no_grad(), without_compiler():
            build: Callable[..., torch.optim.Optimizer] = template.kind  # a constructor may make state already
            optimizer = build([dict(template.groups[group], params=[stand_in])])
            template.step(optimizer)
    except Exception:
        optimizer = template.build([(group, stand_in)])
        try:
            with torch.no_grad():
                template.step(optimizer)
        except Exception as error:
            raise ModelError(
                f"the optimizer {template.kind.__name__} failed a trial step on a tensor of shape {shape}: {error}. "
                "Valid: every optimizer of torch.optim but LBFGS, or one of your own whose step() takes no closure."
            ) from error
    return {k: v for k, v in optimizer.state[stand_in].items() if v is not None}


def _translate(shape: tuple[int, ...], real: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that stand-in state has for the real parameter: each length stands for one dimension."""
    if not real and shape == _LENGTHS[:1]:
        return real
    size = dict(zip(_LENGTHS, real, strict=False))
    return tuple(size.get(length, length) for length in shape)


def row_sparse(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as the optimizers take it that want only the rows which have one; numbers of a vector are rows."""
    if gradient.ndim == 1:
        return gradient.to_sparse()
    rows = gradient.abs().sum(dim=tuple(range(1, gradient.ndim))).nonzero().view(1, -1)
    return torch.sparse_coo_tensor(rows, gradient[rows[0]], gradient.shape, is_coalesced=True, check_invariants=False)
