"""Reduces the lanes and applies the optimizer, unit by unit, in place in the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from manyhands.comm.arena import LEFT_OUT, Arena, dtype_of
from manyhands.comm.heap import return_free_pages
from manyhands.sync.clip import Clip
from manyhands.sync.factors import Products
from manyhands.sync.fused import FusedAdam, fused_adam
from manyhands.sync.loose import Loose
from manyhands.sync.optimizer_state import Template, row_sparse
from manyhands.sync.undo import BATCH_BYTES, BATCH_UNITS, SMALL_BYTES, UndoLog

__all__ = ["Applier", "Mend"]

Mend = Callable[[torch.Tensor, int, np.ndarray], None]

_HOLES_BYTES = 16 << 20  # that state may leave in the heap


class _Piece:
    """Consecutive units of one parameter, seen as one tensor by the optimizer."""

    __slots__ = ("first", "parameter", "stop", "tensor")

    def __init__(self, parameter: int, first: int, stop: int, tensor: torch.Tensor) -> None:
        self.parameter, self.first, self.stop, self.tensor = parameter, first, stop, tensor


class _Lanes(dict[int, torch.Tensor]):
    """A range of each lane's gradient, looked up when it is needed: there may be many lanes."""

    def __init__(self, arena: Arena, start: int, stop: int, dtype: torch.dtype) -> None:
        self._arena, self._range, self._dtype = arena, slice(start, stop), dtype

    def __missing__(self, lane: int) -> torch.Tensor:
        self[lane] = self._arena.lane(lane)[self._range].view(self._dtype)
        return self[lane]


class _Batch:
    """Units [first, stop) that are reduced, saved and applied together."""

    __slots__ = (
        "factored", "first", "firsts", "fused", "given", "gradients", "homes", "lanes", "numbers",
        "optimizer", "piece_of", "pieces", "ready", "scratch", "start", "stop", "views",
    )  # fmt: skip

    first: int
    stop: int
    start: int
    pieces: list[_Piece]
    factored: int | None  # the parameter, if lanes may have left its gradient as factors
    lanes: _Lanes
    scratch: torch.Tensor
    optimizer: torch.optim.Optimizer
    numbers: np.ndarray  # (pieces, scalars): the optimizer's single numbers, which its state tensors are views of
    firsts: list[int]  # the first unit of each piece
    piece_of: np.ndarray  # the piece of each unit
    ready: bytes  # which units had optimizer state when we last looked
    homes: dict[int, dict[str, torch.Tensor]]  # where the state of a piece lies, by the number of the piece
    fused: FusedAdam | None
    given: tuple[int, bytes] | None  # which gradient tensor, and which of its pieces, the optimizer has
    gradients: list[torch.Tensor]  # of each piece, for the fused kernel
    views: dict[tuple[int, bytes], list[torch.Tensor]]  # the same for each gradient that it was given before


class Applier:
    """The apply phase of one worker."""

    def __init__(self, arena: Arena, template: Template, clips: Sequence[Clip], slot: int) -> None:
        self._arena = arena
        self._template = template
        self._step = template.step
        self._fusible = fused_adam(template)
        self._clips = tuple(clips)
        self._undo = None if arena.spec.keeps else UndoLog(arena, slot)
        self._loose: Loose | None = None
        self._batches: dict[tuple[int, int], _Batch] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self.products = Products(arena)
        self._made_bytes = 0  # of state that the optimizer made for itself before it was moved to the arena
        self._row: bytes = b""
        self._hyper: list[float] = []
        self._present = arena.present[0]
        self._present_key = b""

    @property
    def needs_norm(self) -> bool:
        """Whether the global norm must be known before anything is applied."""
        return any(clip.needs_norm for clip in self._clips)

    def forget(self) -> None:
        """Ownership changed: what others did to units must be read again."""
        self._batches.clear()

    def _set_hyper(self, row: np.ndarray) -> None:
        code = row.tobytes()
        if code != self._row:
            self._row, self._hyper = code, row.tolist()
            for batch in self._batches.values():
                self._template.set_hyper(batch.optimizer, self._hyper)

    def batches(self, units: Sequence[int]) -> list[tuple[int, int]]:
        """Cut unit numbers (ascending) into runs that are applied together."""
        spec, runs = self._arena.spec, list[tuple[int, int]]()
        factored = frozenset(spec.factored)  # each of their units is a product
        single, most = bool(spec.extras), BATCH_BYTES
        alone = sum(spec.units[unit].stop - spec.units[unit].start for unit in units) <= SMALL_BYTES
        if spec.keeps or (spec.exchange and alone):
            most = SMALL_BYTES
        for unit in units:
            if runs and not single:
                first, stop = runs[-1]
                head, new = spec.units[first], spec.units[unit]
                alike = spec.parameters[head.parameter].dtype == spec.parameters[new.parameter].dtype
                alike = alike and factored.isdisjoint((head.parameter, new.parameter))
                small = new.stop - head.start <= most and (stop - first < BATCH_UNITS or spec.keeps)
                if unit == stop and alike and (small or spec.whole):  # whose gradients are those of whole parameters
                    runs[-1] = (first, unit + 1)
                    continue
            runs.append((unit, unit + 1))
        return runs

    def let_go(self) -> None:
        """The step is over: nothing of the lane that we held ourselves is needed any more."""
        self._loose = None

    @torch.no_grad()
    def norms(self, run: tuple[int, int], lanes: Sequence[int]) -> None:
        """Write the squared norm of every unit of the run."""
        batch = self._batch(run)
        gradient = self._reduce(batch, lanes)
        units = self._arena.spec.units
        for unit in range(*run):
            size = gradient.element_size()
            part = gradient[(units[unit].start - batch.start) // size : (units[unit].stop - batch.start) // size]
            self._arena.norms[unit] = float(torch.linalg.vector_norm(part)) ** 2

    def total_norm(self) -> float:
        """The norm of the whole gradient: a sum in the order of the units, the same for everybody."""
        total = 0.0
        for value in self._arena.norms.tolist():
            total += value
        return float(total**0.5)

    def begin_step(self, row: np.ndarray, lanes: Sequence[int], loose: Loose | None = None) -> None:
        """The optimizer's numbers for this step, the lanes that take part in it, and the one that we hold ourselves."""
        self._set_hyper(row)
        self._loose = loose
        present = self._arena.present
        self._present = present[lanes[0]] if len(lanes) == 1 else present[list(lanes)].max(axis=0)
        self._present_key = self._present.tobytes()

    def saved(self, run: tuple[int, int]) -> torch.Tensor | None:
        """The bytes of the run's parameters before it was last applied, as long as no other run is; None where nothing
        is saved."""
        return None if self._undo is None else self._undo.parameters(*run)

    def save_ahead(self, run: tuple[int, int], step: int) -> None:
        """Save what ``apply`` will change, while others still compute."""
        assert self._undo is not None
        self._undo.begin(*run, step)

    def drop_saved(self) -> None:
        """The step changes nothing: what was saved ahead is not needed."""
        assert self._undo is not None
        self._undo.drop()

    @torch.no_grad()
    def apply(
        self, run: tuple[int, int], lanes: Sequence[int], step: int, norm: float, mend: Mend | None = None
    ) -> None:
        """Reduce, transform and apply the units of the run; stamp them.

        ``mend`` may change the sum first; it is told which bytes of the plane these are, and which parameters have one.
        """
        batch = self._batch(run)
        if not any(self._present[piece.parameter] for piece in batch.pieces):  # as plain PyTorch leaves them alone
            if self._undo is not None:
                self._undo.begin(*run, step)
                self._undo.end(*run, step)
            return
        if self._loose is not None and len(lanes) == 1 and not self._clips:
            self._give_loose(batch, self._loose.gradients)
        else:
            # An update lies in its place until it is answered: whoever only reads it needs no copy.
            reads = mend is None and (batch.fused is not None or not self._arena.spec.exchange)
            gradient = self._reduce(batch, lanes, reads=reads)
            if self._undo is not None:
                self._undo.begin(*run, step)
            if mend is not None:
                mend(gradient, batch.start, self._present)
            for clip in self._clips:
                clip(gradient, norm)
            self._give_gradients(batch, gradient)
        if batch.fused is not None:
            batch.fused(batch.gradients)
            if batch.given is None:  # autograd's own: let it have the memory back for the next step
                batch.gradients = []
            self._arena.scalars[batch.first : batch.stop] = batch.numbers[batch.piece_of]
        else:
            self._step(batch.optimizer)
            self._keep_state(batch)
            self._fuse(batch)
        if self._undo is not None:
            self._undo.end(*run, step)

    def _reduce(self, batch: _Batch, lanes: Sequence[int], *, reads: bool = True) -> torch.Tensor:
        """The sum over lanes in lane order. The lanes' own buffers stay as they are, so it can be done again.

        ``reads``: it is only read; a single lane is its own sum then."""
        if self._loose is not None:
            return self._reduce_with(self._loose, batch, lanes)
        if batch.factored is not None and self.products.wanted(batch.factored, lanes):
            return self.products.add_up(batch.scratch, batch.factored, batch.start, lanes)
        if len(lanes) == 1:
            if not self._clips and reads:
                return batch.lanes[lanes[0]]
            return batch.scratch.copy_(batch.lanes[lanes[0]])
        torch.add(batch.lanes[lanes[0]], batch.lanes[lanes[1]], out=batch.scratch)
        for lane in lanes[2:]:
            batch.scratch.add_(batch.lanes[lane])
        return batch.scratch

    def _reduce_with(self, loose: Loose, batch: _Batch, lanes: Sequence[int]) -> torch.Tensor:
        """The same sum, where one lane is not in the arena: its gradient is there piece by piece."""
        size, units = batch.scratch.element_size(), self._arena.spec.units
        for piece in batch.pieces:
            begin = (units[piece.first].start - batch.start) // size
            end = (units[piece.stop - 1].stop - batch.start) // size
            own = loose.gradients[piece.parameter]
            if own is None:
                batch.scratch[begin:end].zero_()
                continue
            parts = [own.view(-1) if lane == loose.lane else batch.lanes[lane][begin:end] for lane in lanes]
            total = batch.scratch[begin:end]
            if len(parts) == 1:
                total.copy_(parts[0])
                continue
            torch.add(parts[0], parts[1], out=total)
            for part in parts[2:]:
                total.add_(part)
        return batch.scratch

    def _give_loose(self, batch: _Batch, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let the optimizer have the gradients as autograd made them: the lane is the only one."""
        own = [gradients[piece.parameter] for piece in batch.pieces]
        present = [gradient for gradient in own if gradient is not None]
        batch.given, batch.gradients = None, present
        if len(present) < len(own):
            batch.fused = None
        if batch.fused is None:
            for piece, gradient in zip(batch.pieces, own, strict=True):
                piece.tensor.grad = (
                    gradient if gradient is None or not self._template.wants_sparse else row_sparse(gradient)
                )

    def _give_gradients(self, batch: _Batch, gradient: torch.Tensor) -> None:
        """Let the optimizer's tensors have their parts of ``gradient``; mostly they have them from the last step."""
        given = (gradient.data_ptr(), self._present_key)
        if batch.given == given and not self._template.wants_sparse:
            return
        if batch.fused is not None and given in batch.views:  # workers take turns
            batch.given, batch.gradients = given, batch.views[given]
            return
        batch.given, batch.fused = given, None
        size = gradient.element_size()
        units = self._arena.spec.units
        for piece in batch.pieces:
            if not self._present[piece.parameter]:  # no lane touched it: plain PyTorch would leave it alone as well
                piece.tensor.grad = None
                continue
            start = (units[piece.first].start - batch.start) // size
            view = gradient[start : start + piece.tensor.numel()].view(piece.tensor.shape)
            piece.tensor.grad = row_sparse(view) if self._template.wants_sparse else view

    def _fuse(self, batch: _Batch) -> None:
        """From the next step on, go straight to the kernel, if everything about the batch is as usual."""
        if self._fusible and all(piece.tensor.grad is not None for piece in batch.pieces):
            column = self._arena.spec.scalars.index("step")
            tensors = [piece.tensor for piece in batch.pieces]
            batch.gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
            if batch.given is not None:
                batch.views[batch.given] = batch.gradients
            batch.fused = FusedAdam(batch.optimizer, tensors, batch.numbers[:, column])

    def _keep_state(self, batch: _Batch) -> None:
        """Write the optimizer's numbers to the table; state that it has just created moves into the arena."""
        arena = self._arena
        if not self._template.keeps_state or not arena.control.unit_ready[batch.first : batch.stop].all():
            for number, piece in enumerate(batch.pieces):
                if batch.optimizer.state.get(piece.tensor):
                    self._adopt(batch, number, piece)
        arena.scalars[batch.first : batch.stop] = batch.numbers[batch.piece_of]

    def _adopt(self, batch: _Batch, number: int, piece: _Piece) -> None:
        state = batch.optimizer.state[piece.tensor]
        if number not in batch.homes:
            batch.homes[number] = {**self._homes(piece), **self._numbers(batch, number)}
        for name, home in batch.homes[number].items():
            if state.get(name) is not None and state[name] is not home:
                home.copy_(torch.as_tensor(state[name]))
                state[name] = home
                self._made_bytes += home.nbytes
        if self._made_bytes > _HOLES_BYTES:
            self._made_bytes = 0
            return_free_pages()
        self._arena.control.unit_ready[piece.first : piece.stop] = 1
        batch.ready = self._arena.control.unit_ready[batch.first : batch.stop].tobytes()

    def _batch(self, run: tuple[int, int]) -> _Batch:
        batch = self._batches.get(run)
        if batch is not None and self._arena.spec.keeps:  # somebody else may have applied the step before this one
            batch.numbers[:] = self._arena.scalars[batch.firsts]
            if batch.ready != self._arena.control.unit_ready[batch.first : batch.stop].tobytes():
                batch = None
        if batch is None:
            batch = self._batches[run] = self._make_batch(*run)
        return batch

    def _make_batch(self, first: int, stop: int) -> _Batch:
        spec = self._arena.spec
        batch = _Batch()
        batch.first, batch.stop = first, stop
        batch.start, end = spec.units[first].start, spec.units[stop - 1].stop
        dtype = dtype_of(spec.parameters[spec.units[first].parameter].dtype)
        batch.lanes = _Lanes(self._arena, batch.start, end, dtype)
        batch.factored = spec.units[first].parameter if spec.units[first].parameter in spec.factored else None
        batch.scratch = self._scratch_of((end - batch.start) // dtype.itemsize, dtype)
        batch.pieces = self._pieces(first, stop)
        batch.given, batch.fused, batch.homes, batch.gradients, batch.views = None, None, {}, [], {}
        batch.ready = self._arena.control.unit_ready[first:stop].tobytes()
        batch.firsts = [piece.first for piece in batch.pieces]
        batch.piece_of = np.repeat(np.arange(len(batch.pieces)), [piece.stop - piece.first for piece in batch.pieces])
        batch.numbers = self._arena.scalars[batch.firsts].astype(np.float32)
        batch.optimizer = self._template.build([(self._template.group_of[p.parameter], p.tensor) for p in batch.pieces])
        self._template.set_hyper(batch.optimizer, self._hyper)
        for number, piece in enumerate(batch.pieces):
            if self._arena.control.unit_ready[piece.first]:
                batch.homes[number] = {**self._homes(piece), **self._numbers(batch, number)}
                batch.optimizer.state[piece.tensor] = dict(batch.homes[number])
        return batch

    def _scratch_of(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Where a sum of lanes is made. Batches share it, as each is applied before the next is summed: so it stays
        in the cache, and does not grow with the model. What is never summed costs addresses and no memory."""
        if dtype not in self._scratch or len(self._scratch[dtype]) < count:
            self._scratch[dtype] = torch.empty(count, dtype=dtype)
        return self._scratch[dtype][:count]

    def _pieces(self, first: int, stop: int) -> list[_Piece]:
        spec, pieces, at = self._arena.spec, [], first
        while at < stop:
            parameter = spec.units[at].parameter
            end = at
            while end < stop and spec.units[end].parameter == parameter:
                end += 1
            pieces.append(_Piece(parameter, at, end, self._view(0, parameter, at, end)))
            at = end
        return pieces

    def _view(self, plane: int, parameter: int, first: int, stop: int) -> torch.Tensor:
        """Units [first, stop) of a parameter in a plane; in its real shape when they are all of it."""
        spec = self._arena.spec
        entry = spec.parameters[parameter]
        start, end = spec.units[first].start, spec.units[stop - 1].stop
        view = self._arena.plane(plane)[start:end].view(dtype_of(entry.dtype))
        return view.view(entry.shape) if end - start == entry.size_bytes else view

    def _homes(self, piece: _Piece) -> dict[str, torch.Tensor]:
        spec = self._arena.spec
        homes = {
            name: self._view(1 + index, piece.parameter, piece.first, piece.stop)
            for index, name in enumerate(spec.planes)
            if name != LEFT_OUT
        }
        homes |= {e.key: self._arena.extra(i) for i, e in enumerate(spec.extras) if e.parameter == piece.parameter}
        return homes

    def _numbers(self, batch: _Batch, number: int) -> dict[str, torch.Tensor]:
        """The single numbers of a piece, as 0-dimensional views of the batch's table."""
        table = torch.from_numpy(batch.numbers)
        return {name: table[number, column] for column, name in enumerate(self._arena.spec.scalars)}
