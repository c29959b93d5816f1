"""Sets of chunks that fill up from below: all chunks under a prefix, and some beyond it. They stay small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["ChunkSet", "Chunks"]


@dataclass(frozen=True, slots=True)
class Chunks:
    """A set of chunks as it travels: all below ``prefix``, and those in ``beyond`` (sorted, above ``prefix``)."""

    prefix: int = 0
    beyond: tuple[int, ...] = ()

    def __contains__(self, chunk: int) -> bool:
        return chunk < self.prefix or chunk in self.beyond

    def __len__(self) -> int:
        return self.prefix + len(self.beyond)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.prefix)
        yield from self.beyond


class ChunkSet:
    """The same set while it grows."""

    __slots__ = ("beyond", "prefix")

    def __init__(self, chunks: Chunks = Chunks()) -> None:  # noqa: B008 - it is frozen
        self.prefix = chunks.prefix
        self.beyond = set(chunks.beyond)

    def __contains__(self, chunk: int) -> bool:
        return chunk < self.prefix or chunk in self.beyond

    def __len__(self) -> int:
        return self.prefix + len(self.beyond)

    def __repr__(self) -> str:
        return f"ChunkSet({self.frozen()})"

    def add(self, chunk: int) -> bool:
        """Whether ``chunk`` was not in the set before."""
        if chunk in self:
            return False
        self.beyond.add(chunk)
        while self.prefix in self.beyond:
            self.beyond.remove(self.prefix)
            self.prefix += 1
        return True

    def update(self, chunks: Iterable[int]) -> None:
        """Add all of ``chunks``."""
        for chunk in chunks:
            self.add(chunk)

    def frozen(self) -> Chunks:
        """The set as it is now."""
        return Chunks(self.prefix, tuple(sorted(self.beyond)))
