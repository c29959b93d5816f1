"""The caller's parameters during a fit, if they are large: shown from the arena instead of lying in memory twice.

The mapping is private: the caller sees the parameters as they are now, and what it writes there changes nothing for the
workers. When the fit is over, however it ended, every parameter gets memory of its own again.
"""

from __future__ import annotations

import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.comm.heap import return_free_pages
from manyhands.comm.segment import Segment

__all__ = ["Loan"]

_LEAST_BYTES = 1 << 20  # of a parameter; below that there is nothing to gain


class Loan:
    """The parameters of ``model`` that the arena stands in for."""

    def __init__(self, model: nn.Module, arena: Arena) -> None:
        spec = arena.spec
        places = {entry.name: arena.parameter_offset(index) for index, entry in enumerate(spec.parameters)}
        places |= {entry.name: arena.fixed_offset(index) for index, entry in enumerate(spec.fixed)}
        self._arena = arena
        self._mapped = Segment(arena.segment.fd, arena.segment.size_bytes, private=True)
        self._lent: dict[str, tuple[nn.Parameter, int]] = {}
        for name, parameter in model.named_parameters():
            if name in places and parameter.nbytes >= _LEAST_BYTES and _is_alone(parameter):
                parameter.data = self._mapped.tensor(places[name], parameter.shape, parameter.dtype)
                self._lent[name] = (parameter, places[name])
        return_free_pages()

    @property
    def names(self) -> frozenset[str]:
        """Of the parameters that are read from the arena now."""
        return frozenset(self._lent)

    def refresh(self) -> None:
        """Forget what the caller wrote: it sees the arena again."""
        self._mapped.drop_changes()

    def end(self) -> None:
        """Give every parameter memory of its own, with the values of the arena."""
        for name, (parameter, offset) in list(self._lent.items()):
            values = self._arena.segment.tensor(offset, parameter.shape, parameter.dtype)
            parameter.data = values.clone()
            del self._lent[name]


def _is_alone(parameter: torch.Tensor) -> bool:
    """Whether nobody else holds the memory of ``parameter``: it would have to find the trained values there."""
    storage = parameter.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    plain = parameter.is_contiguous() and storage.nbytes() == parameter.nbytes
    return plain and count is not None and count(storage._cdata) == 2  # the parameter's, and ours
