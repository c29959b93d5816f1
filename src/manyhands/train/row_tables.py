"""Which parameters of a model servers hold by row, and their state by name.

It is the weight of every ``nn.Embedding(sparse=True)`` that is trained and used by that layer alone. Names are those of
``state_dict`` and of torch's optimizers: a checkpoint does not know which way a parameter was held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.comm.tables import Table
from manyhands.errors import ModelError
from manyhands.sync.rows import RULES

__all__ = ["TableState", "describe_tables", "find_tables"]

_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.SparseAdam: "adam",
}
_VALID = "valid for rows: SGD without momentum, Adagrad, Adam, AdamW, SparseAdam"


def find_tables(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[Table, torch.Tensor]]:
    """The tables of a model with their weights; refuses what cannot be done row by row."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    found = []
    for path, module in model.named_modules():
        if type(module) is not nn.Embedding or not module.sparse or "forward" in vars(module):
            continue
        weight = module.weight
        trained = weight.requires_grad and id(weight) in group_of
        if not trained or users[id(weight)] > 1 or weight.dtype != torch.float32 or not weight.numel():
            continue
        name = f"{path}.weight" if path else "weight"
        _check_layer(name, module)
        group = group_of[id(weight)]
        rule = _rule_of(name, type(optimizer), optimizer.param_groups[group])
        table = Table(name, module.num_embeddings, module.embedding_dim, group, rule, list(RULES[rule].planes))
        found.append((table, weight))
    return found


def _check_layer(name: str, module: nn.Embedding) -> None:
    for setting, why in (
        ("max_norm", "it changes rows in the forward pass, which only a server may do"),
        ("scale_grad_by_freq", "torch has it for dense gradients only"),
    ):
        if value := getattr(module, setting):
            raise ModelError(
                f"{name} is held by row, and its layer has {setting}={value}: {why}. "
                f"Leave {setting} out, or take nn.Embedding(sparse=False)."
            )


def _rule_of(name: str, kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str:
    rule = _KINDS.get(kind)
    problem = None
    if rule is None:
        problem = f"the optimizer is {kind.__name__}"
    elif group.get("momentum"):
        problem = f"SGD has momentum={group['momentum']}, which moves every row in every step"
    elif group.get("amsgrad"):
        problem = f"{kind.__name__} has amsgrad=True"
    elif group.get("weight_decay") and kind is not torch.optim.AdamW and not group.get("decoupled_weight_decay"):
        problem = (
            f"{kind.__name__} has weight_decay={group['weight_decay']}, which belongs to the gradient of every row in "
            "every step; only a decay that is decoupled (AdamW) can be applied to a row when it is touched"
        )
    if rule is None or problem:
        raise ModelError(
            f"{name} is held by row (nn.Embedding with sparse=True), and {problem}; {_VALID}. Take one of these, "
            "another parameter group for the layer, or nn.Embedding(sparse=False)."
        )
    return rule


def describe_tables(tables: Sequence[Table], servers: int) -> list[str]:
    """A line for the header of a run that has tables."""
    shown = ", ".join(f"{table.name} {table.rows:,} × {table.width}" for table in tables)
    return [f"held by row, over {servers} server{'s' * (servers > 1)}: {shown}"] if tables else []


class TableState:
    """The tables of an arena by name, in the caller."""

    def __init__(self, arena: Arena) -> None:
        self._exchange, self._tables = arena.exchange(), arena.tables()

    def offsets(self) -> list[int]:
        """Where the values of each table lie in the arena's segment."""
        return self._tables.offsets

    def values(self) -> dict[str, torch.Tensor]:
        """The tables themselves."""
        tables = self._tables
        return {table.name: planes[0] for table, planes in zip(tables.specs, tables.planes, strict=True)}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """State by ``parameter/key``, of the tables that have seen a step. Nothing may be on its way."""
        found, tables = dict[str, torch.Tensor](), self._tables
        steps = tables.steps[int(self._exchange.applied[0]) % 2, 0]
        for table, planes, step in zip(tables.specs, tables.planes, steps.tolist(), strict=True):
            if step and table.planes:
                found |= {f"{table.name}/{key}": plane for key, plane in zip(table.planes, planes[1:], strict=True)}
                found[f"{table.name}/step"] = torch.tensor(step, dtype=torch.float64)
        return found

    @torch.no_grad()
    def load_optimizer(self, state: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Take the state of each parameter, where there is some."""
        for index, table in enumerate(self._tables.specs):
            values = state.get(table.name) or {}
            for key, plane in zip(table.planes, self._tables.planes[index][1:], strict=True):
                if key in values:
                    plane.copy_(values[key])
            self._tables.steps[:, :, index] = int(values.get("step", 0))
