"""One worker's copy of the model: parameters in the arena, gradients and buffers moved to the lane's own place.

Gradients go into the lane's buffer as autograd produces them, parameter by parameter, so that no second copy of
all of them ever exists. Those of a small model stay where they are until it is known who needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from manyhands.comm.arena import Arena
from manyhands.sync.factors import factors_in, pay, put_factors
from manyhands.sync.loose import Loose
from manyhands.train.losses import check_scalar
from manyhands.train.row_embedding import FetchRows, RowEmbeddings
from manyhands.train.straight import straighten

__all__ = ["Replica"]


class Replica:
    """A model whose trained parameters are views of the arena."""

    def __init__(
        self,
        arena: Arena,
        model: nn.Module,
        *,
        ours: bool,
        home: int | None = None,
        places: Sequence[int] | None = None,
        fetch: FetchRows | None = None,
        factors: bool = False,
    ) -> None:
        """``ours``: nobody else sees this copy, so its layers may be changed. ``home``: where a worker has its
        parameters that computes with its own. ``places``: where its gradients go, if not there. ``fetch``: how it gets
        rows of tables. ``factors``: gradients may be left as their factors, where the arena allows it."""
        self._arena = arena
        lanes = range(arena.spec.lanes) if home is None else places or [home]
        self._agreed = arena.buffers() if home is None else arena.pulled_buffers(home)
        self._lane_buffers = {lane: arena.buffers(lane) for lane in lanes}
        self._gradients = {lane: arena.gradients(lane) for lane in lanes}
        named = dict(model.named_parameters())
        self._parameters = [named[entry.name] for entry in arena.spec.parameters]
        self._windows: dict[int, list[torch.Tensor]] = {}
        self._window: int | None = None
        if home is not None:
            self._read(arena.pulled(home))
        self._targets: list[torch.Tensor] = []
        self._written = bytearray(len(arena.spec.parameters))
        self._factored = frozenset(arena.spec.factored) if factors else frozenset()
        self._factor_rows: dict[int, int] = {}
        self._loose: list[torch.Tensor | None] = [None] * len(arena.spec.parameters)
        self._holders = _buffer_holders(model, [entry.name for entry in arena.spec.buffers])
        self.collecting = False
        if ours and not arena.spec.whole:
            straighten(model, [entry.name for entry in arena.spec.parameters], self)
        self.rows = None
        if home is not None and fetch is not None and arena.spec.tables:
            self.rows = RowEmbeddings(arena, model, home, fetch)
        by_row = {table.name for table in arena.spec.tables}
        position = {entry.name: index for index, entry in enumerate(arena.spec.parameters)}
        for name, parameter in model.named_parameters():
            if name in position:
                parameter.register_post_accumulate_grad_hook(self._collector(position[name]))  # type: ignore[no-untyped-call]
            elif parameter.requires_grad and name not in by_row:
                # The optimizer does not hold it: nobody will use the gradient.
                parameter.requires_grad_(False)

    def _collector(self, index: int) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:  # it was written to its place by the layer itself
                return
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if self._written[index]:
                self._multiply(index)
                self._targets[index].add_(gradient)
            else:
                self._targets[index].copy_(gradient)
                self._written[index] = 1
            parameter.grad = None

        def keep(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            before = self._loose[index]
            self._loose[index] = gradient if before is None else before.add_(gradient)
            self._written[index] = 1
            parameter.grad = None

        return keep if self._arena.spec.whole else collect

    def _read(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    def read_window(self, window: int) -> None:
        """Compute with the parameters that lie there from now on."""
        if window not in self._windows:
            self._windows[window] = self._arena.shown_parameters(window)
        if window != self._window:
            self._window = window
            self._read(self._windows[window])

    def read_agreed(self) -> None:
        """Compute with the agreed parameters; nobody changes them now."""
        self._window = None
        self._read(self._arena.parameters())

    def begin(self, lane: int) -> None:
        """Gradients go to ``lane`` from now on; buffers start from the agreed ones."""
        self._targets = self._gradients[lane]
        self._written[:] = bytes(len(self._written))
        self._factor_rows.clear()
        self._loose = [None] * len(self._written)
        for buffer, agreed in zip(self.buffers(), self._agreed, strict=True):
            buffer.copy_(agreed)
        if self.rows is not None:
            self.rows.begin()

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        """Backward of a loss that is the mean over ``weight`` of the global batch.

        Weighted here, the lanes need only be added up: their sum is the gradient of the mean over the whole batch.
        """
        check_scalar(loss)
        self.collecting = True
        # Not backward(gradient=...): torch imports its symbolic shapes to check that, a third of a second per worker.
        (loss if weight == 1 else loss * weight).backward()  # type: ignore[no-untyped-call]
        self.collecting = False

    def place(self, index: int) -> torch.Tensor | None:
        """Where the gradient of parameter ``index`` may be written; None when there is one already."""
        if self._written[index]:
            return None
        self._written[index] = 1
        return self._targets[index]

    def take_product(self, index: int, of_outputs: torch.Tensor, inputs: torch.Tensor) -> bool:
        """Take the gradient of a weight, as factors over the same samples; False when there is one already."""
        target = self.place(index)
        if target is None:
            return False
        if index in self._factored and pay(target.shape, len(inputs)):
            put_factors(target, of_outputs, inputs)
            self._factor_rows[index] = len(inputs)
        else:
            torch.mm(of_outputs.t(), inputs, out=target)
        return True

    def _multiply(self, index: int) -> None:
        """There is more to come: let the gradient lie where its factors are, if they do."""
        if rows := self._factor_rows.pop(index, 0):
            of_outputs, inputs = (factor.clone() for factor in factors_in(self._targets[index], rows))
            torch.mm(of_outputs.t(), inputs, out=self._targets[index])

    def take(self) -> list[torch.Tensor | None]:
        """The gradients so far, None where there is none. They stay where they are until the next backward pass."""
        taken = [target if written else None for target, written in zip(self._targets, self._written, strict=True)]
        self._written[:] = bytes(len(self._written))
        return taken

    def end(self, lane: int) -> Loose | None:
        """The lane's gradient is complete: say which parameters have one, and keep the buffers.

        Returns the gradient if it is not in the arena yet.
        """
        present = self._arena.present[lane]
        for index in self._factored:
            self._arena.factor_rows[lane, index] = self._factor_rows.get(index, 0)
        whole = self._arena.spec.whole
        if 0 not in self._written:
            present[:] = 1
        else:
            for index, written in enumerate(self._written):
                present[index] = written
                if not written and not whole:
                    self._targets[index].zero_()
        for buffer, kept in zip(self.buffers(), self._lane_buffers[lane], strict=True):
            kept.copy_(buffer)
        if self.rows is not None:
            self.rows.end()
        if not whole:
            return None
        gradients, self._loose = self._loose, []
        return Loose(lane, gradients, self._targets)

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of this copy, as they are now."""
        return [holder._buffers[name] for holder, name in self._holders]  # type: ignore[misc]


def _buffer_holders(model: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """Module and attribute of each buffer: looked up anew each time, because a module may replace its buffer."""
    holders = []
    for name in names:
        path, _, attribute = name.rpartition(".")
        holders.append((model.get_submodule(path), attribute))
    return holders
