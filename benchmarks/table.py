"""Medians, spreads and tables, and their place between markers in docs/benchmarks.md."""

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, and their smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def show(self, form: str = ",.0f") -> str:
        return f"{self.median:{form}} [{self.low:{form}}–{self.high:{form}}]"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The ratio of the medians, with the spread of the ratios of measurements taken one after the other."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return Spread(statistics.median(ours) / statistics.median(theirs), min(ratios), max(ratios))


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (headers, ["---"] * len(headers), *rows)]
    return "\n".join(lines)


def machine() -> str:
    """The machine in words that name nobody: cores, memory, versions."""
    memory_gib = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{cores} cores, {memory_gib:.0f} GiB memory, {platform.system()}, {versions}"


def command(module: str) -> str:
    """The command line that is running, as a user would type it."""
    return shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def write_block(name: str, body: str, *, module: str, page: Path = PAGE) -> None:
    """Puts command, machine and body between the markers of `name`; a page without them gets them at its end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    block = f"{begin}\n```\n{command(module)}\n```\n{machine()}; median [smallest–largest].\n\n{body}\n{end}"
    text = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        text = before + block + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{block}\n"
    draft = page.with_suffix(".md.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(page)  # an interrupted benchmark leaves the old page whole
    print(f"\n{name}\n{body}", flush=True)
