"""The ledger: which samples each epoch of a run has counted, as a log that can be replayed and checked.

Steps are the run's own, counted from 0 across epochs; a run (or a checkpoint) *at* step ``n`` has committed the
steps 0 … n-1. An epoch that begins at step ``f`` takes, at step ``s``, the positions from ``(s - f) * batch_size``
of its order, up to ``batch_size`` of them. So ranges of steps are ranges of positions, and the account stays small.

Where servers apply updates one by one, their log is a second witness: between two rests of the run it has as many
batches as the ledger, or the account is wrong.

The ledger does not prevent a double or a missing commit: it would be no proof if it could not show one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from manyhands.errors import CheckpointMismatch, RunError

__all__ = ["EpochProof", "Ledger", "Proof"]

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochProof:
    """One epoch, counted: ``once + never + more_than_once + sum(skipped.values()) == samples``."""

    epoch: int
    samples: int
    once: int
    never: int
    more_than_once: int
    skipped: dict[str, int]
    """Samples that were left out on purpose, by reason."""
    order_digest: str
    witnessed: int = 0
    """Steps whose effects the servers' log has confirmed."""
    contradicted: int = 0
    """By how many effects their log has more, or fewer, than it should."""

    @property
    def exact(self) -> bool:
        return self.never == 0 and self.more_than_once == 0 and self.contradicted == 0

    def __str__(self) -> str:
        skips = "".join(f" · {count} skipped ({reason})" for reason, count in self.skipped.items())
        wrong = "" if self.exact else f" · {self.never} never · {self.more_than_once} more than once"
        wrong += f" · {self.contradicted} effects more or fewer in the servers' log" if self.contradicted else ""
        return f"epoch {self.epoch}: {self.once} of {self.samples} samples counted once{skips}{wrong}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the ledger shows; ``exact`` means that no sample of any epoch was lost or counted twice."""

    epochs: tuple[EpochProof, ...]

    @property
    def exact(self) -> bool:
        return all(epoch.exact for epoch in self.epochs)

    def to_dict(self) -> dict[str, Any]:
        return {"exact": self.exact, "epochs": [asdict(epoch) for epoch in self.epochs]}

    def __str__(self) -> str:
        return "\n".join(str(epoch) for epoch in self.epochs)


@dataclass(slots=True, kw_only=True)
class _Epoch:
    epoch: int
    samples: int
    batch_size: int
    order_digest: str
    first_step: int
    drop_last: bool
    commits: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of steps, both ends included, in the order of their commits."""
    skips: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Step -> why, and how many samples of it."""
    witnesses: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Ranges of steps, both ends included; how many of them the servers' log has, and how many it left out."""

    @property
    def steps(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def end_step(self) -> int:
        return self.first_step + self.steps

    def size_of(self, step: int) -> int:
        return min(self.batch_size, self.samples - (step - self.first_step) * self.batch_size)

    def same_data(self, other: _Epoch) -> bool:
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("samples", "batch_size", "order_digest", "first_step", "drop_last")
        )

    def commit(self, first: int, last: int) -> None:
        if self.commits and self.commits[-1][1] + 1 == first:
            first = self.commits.pop()[0]
        self.commits.append((first, last))

    def undo_from(self, step: int) -> None:
        self.commits = [(first, min(last, step - 1)) for first, last in self.commits if first < step]
        self.skips = {at: skip for at, skip in self.skips.items() if at < step}
        self.witnesses = [witness for witness in self.witnesses if witness[1] < step]

    def prove(self) -> EpochProof:
        skipped: Counter[str] = Counter()
        once = more_than_once = 0
        for first, last, count in self._counted_ranges():
            samples = self._samples_in(first, last)
            if count > 1:
                more_than_once += samples
                continue
            for step, (reason, left_out) in self.skips.items():
                if first <= step <= last:
                    skipped[reason] += left_out
                    samples -= left_out
            once += samples * count
        witnessed = contradicted = 0
        for first, last, effects, left_out in self.witnesses:
            reasons = sum(first <= step <= last for step in self.skips)
            witnessed += last - first + 1
            contradicted += abs(last - first + 1 - left_out - effects) + max(left_out - reasons, 0)
        if tail := self.samples - self._samples_in(self.first_step, self.end_step - 1):
            skipped["drop_last"] += tail
        return EpochProof(
            epoch=self.epoch,
            samples=self.samples,
            once=once,
            never=self.samples - once - more_than_once - skipped.total(),
            more_than_once=more_than_once,
            skipped=dict(skipped),
            order_digest=self.order_digest,
            witnessed=witnessed,
            contradicted=contradicted,
        )

    def _counted_ranges(self) -> list[tuple[int, int, int]]:
        """The epoch's steps cut into ranges with the number of commits of each: (first, last, count)."""
        changes: Counter[int] = Counter({self.first_step: 0, self.end_step: 0})
        for first, last in self.commits:
            changes[first] += 1
            changes[last + 1] -= 1
        ranges, count = [], 0
        cuts = sorted(changes)
        for first, after in pairwise(cuts):
            count += changes[first]
            ranges.append((first, after - 1, count))
        return ranges

    def _samples_in(self, first: int, last: int) -> int:
        if last < first:
            return 0
        return (last - first) * self.batch_size + self.size_of(last)


class Ledger:
    """The account of a synchronous run: epochs begun, steps committed, skipped and taken back."""

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}
        self._records: list[Record] = []
        self._drained = 0

    @property
    def next_step(self) -> int:
        """The first step after everything committed or skipped so far."""
        lasts = [last for epoch in self._epochs.values() for _, last in epoch.commits]
        lasts += [step for epoch in self._epochs.values() for step in epoch.skips]
        return max(lasts, default=-1) + 1

    def begin_epoch(
        self,
        epoch: int,
        samples: int,
        batch_size: int,
        order_digest: str,
        *,
        first_step: int | None = None,
        drop_last: bool = False,
    ) -> None:
        """Open an epoch; beginning it again (a resume) must agree with the first time.

        ``first_step`` is the run's step at which it begins; by default the end of the epochs before it.
        """
        known = self._epochs.get(epoch)
        if first_step is None:
            before = [other.end_step for number, other in self._epochs.items() if number != epoch]
            first_step = known.first_step if known else max(before, default=0)
        opened = _Epoch(
            epoch=epoch,
            samples=samples,
            batch_size=batch_size,
            order_digest=order_digest,
            first_step=first_step,
            drop_last=drop_last,
        )
        if known and known.same_data(opened):
            return
        if known and (known.commits or known.skips):
            raise CheckpointMismatch(
                f"epoch {epoch} was begun at step {known.first_step} with {known.samples} samples in batches of "
                f"{known.batch_size} (order {known.order_digest}); received: step {first_step}, {samples} samples "
                f"in batches of {batch_size} (order {order_digest}). Resume with the same data, batch "
                f"size and seed, or start a new run."
            )
        self._epochs[epoch] = opened
        self._records.append(
            {
                "kind": "epoch",
                "epoch": epoch,
                "samples": samples,
                "batch_size": batch_size,
                "order_digest": order_digest,
                "first_step": first_step,
                "drop_last": drop_last,
            }
        )

    def commit(self, epoch: int, first_step: int, last_step: int) -> None:
        """Count the samples of the steps ``first_step`` … ``last_step``, both included."""
        self._checked(epoch, first_step, last_step).commit(first_step, last_step)
        previous = self._records[-1] if len(self._records) > self._drained else {}
        if previous.get("kind") == "commit" and (previous["epoch"], previous["last"] + 1) == (epoch, first_step):
            previous["last"] = last_step
        else:
            self._records.append({"kind": "commit", "epoch": epoch, "first": first_step, "last": last_step})

    def skip(self, epoch: int, step: int, reason: str, samples: int | None = None) -> None:
        """Say that a step, or ``samples`` of its samples, changed nothing, and why; whether it is committed as well
        makes no difference."""
        known = self._checked(epoch, step, step)
        known.skips[step] = (reason, known.size_of(step) if samples is None else samples)
        part = {} if samples is None else {"samples": samples}
        self._records.append({"kind": "skip", "epoch": epoch, "step": step, "reason": reason, **part})

    def witness(self, epoch: int, first_step: int, last_step: int, effects: int, left_out: int) -> None:
        """Of the steps ``first_step`` … ``last_step``, both included, the servers' log has ``effects``; it left out as
        many as it says on purpose, for which there is a skip."""
        self._checked(epoch, first_step, last_step).witnesses.append((first_step, last_step, effects, left_out))
        seen = {"first": first_step, "last": last_step, "effects": effects, "left_out": left_out}
        self._records.append({"kind": "witness", "epoch": epoch, **seen})

    def rollback(self, step: int) -> None:
        """Go back to the account of a run at ``step``: that step and all later ones are not committed."""
        for epoch in self._epochs.values():
            epoch.undo_from(step)
        # An epoch that begins exactly here stays: the run may go on without beginning it again.
        self._epochs = {number: epoch for number, epoch in self._epochs.items() if epoch.first_step <= step}
        self._records.append({"kind": "rollback", "step": step})

    def verify(self) -> Proof:
        """Count every sample of every epoch that was begun."""
        return Proof(epochs=tuple(self._epochs[number].prove() for number in sorted(self._epochs)))

    def to_records(self) -> list[Record]:
        """Everything that happened, in order, as plain data."""
        return [dict(record) for record in self._records]

    def drain(self) -> list[Record]:
        """The records that no earlier ``drain`` returned; they will not change any more."""
        fresh = [dict(record) for record in self._records[self._drained :]]
        self._drained = len(self._records)
        return fresh

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> Ledger:
        """Replay a log. The records count as drained: they come from where ``drain`` put them."""
        ledger = cls()
        for record in records:
            _replay(ledger, record)
            ledger._drained = len(ledger._records)
        return ledger

    def _checked(self, epoch: int, first_step: int, last_step: int) -> _Epoch:
        known = self._epochs.get(epoch)
        if known is None:
            raise RunError(f"the ledger has no epoch {epoch}; begun are: {sorted(self._epochs) or 'none'}.")
        if not known.first_step <= first_step <= last_step < known.end_step:
            raise RunError(
                f"steps {first_step} to {last_step} are not in epoch {epoch}, "
                f"which has the steps {known.first_step} to {known.end_step - 1} of the run."
            )
        return known


def _replay(ledger: Ledger, record: Mapping[str, Any]) -> None:
    match record:
        case {"kind": "epoch"}:
            ledger.begin_epoch(**{name: value for name, value in record.items() if name != "kind"})
        case {"kind": "commit", "epoch": epoch, "first": first, "last": last}:
            ledger.commit(epoch, first, last)
        case {"kind": "skip", "epoch": epoch, "step": step, "reason": reason}:
            ledger.skip(epoch, step, reason, record.get("samples"))
        case {"kind": "witness", "epoch": epoch, "first": first, "last": last, "effects": effects, "left_out": left}:
            ledger.witness(epoch, first, last, effects, left)
        case {"kind": "rollback", "step": step}:
            ledger.rollback(step)
        case _:
            raise RunError(f"the ledger has a record of an unknown kind: {dict(record)!r}.")
