"""What a run says about itself: its header, its run.json, its closing line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.train.history import History
from manyhands.train.schedule import Course

__all__ = ["closing_line", "format_traffic", "format_updates", "header", "interrupted_line", "plain_settings"]


def header(
    model: nn.Module, course: Course, settings: Mapping[str, Any], start_step: int, notes: list[str]
) -> list[str]:
    """The lines above the live view: the arithmetic of the run."""
    even = course.batch_size % course.lanes == 0
    size = str(course.batch_size // course.lanes) if even else f"{course.batch_size / course.lanes:.1f} on average"
    count = sum(p.numel() for p in model.parameters())
    workers, threads = settings["workers"][1], settings["threads"]
    lines = [
        f"{type(model).__name__} · {count:,} parameters · {course.samples:,} samples · "
        f"{workers} worker{'s' * (workers > 1)} × {threads} thread{'s' * (threads > 1)} · seed {settings['seed']}",
        f"batch {course.batch_size} global = {course.lanes} lane{'s' * (course.lanes > 1)} × {size} · "
        "each sample once per epoch",
        *notes,
    ]
    if start_step:
        lines.append(f"resumed at step {start_step} (epoch {start_step // course.steps_per_epoch + 1})")
    return lines


def plain_settings(model: nn.Module, optimizer: torch.optim.Optimizer, course: Course) -> dict[str, Any]:
    """What run.json tells about model, optimizer and data."""
    kept = (int, float, bool, tuple)
    return {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "optimizer": type(optimizer).__name__,
        "hyper": [
            {k: v for k, v in group.items() if k != "params" and isinstance(v, kept)}
            for group in optimizer.param_groups
        ],
        "samples": course.samples,
        "batch_size": course.batch_size,
        "lanes": course.lanes,
        "torch": torch.__version__,
    }


def closing_line(history: History, steps: int) -> str:
    """Steps, and where the workers' time went."""
    total = sum(history.bill.values()) or 1.0
    shares = " · ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in history.bill.items())
    told = [format_updates(history.updates)] if history.updates else []
    told += [format_traffic(history.bytes)] if history.bytes else []
    return " · ".join([f"{steps} steps", shares, *told])


def format_updates(updates: Mapping[str, int]) -> str:
    """How stale updates were, and what was not applied as it came."""
    odd = "".join(
        f" · {updates[name]:,} {name}" for name in ("scaled", "dropped", "held", "doubled") if updates.get(name)
    )
    return f"staleness p50 {updates['staleness_p50']}, p95 {updates['staleness_p95']}{odd}"


def format_traffic(counted: Mapping[str, int]) -> str:
    """What travelled, per sample: ``sent 501 · received 1,972 bytes per sample``."""
    samples = counted["samples"] or 1
    return f"sent {counted['sent'] / samples:,.0f} · received {counted['received'] / samples:,.0f} bytes per sample"


def interrupted_line(saved: int | None, stopped: int, left: int, run_dir: Path | None) -> str:
    """The receipt after Ctrl-C."""
    kept = f"saved step {saved}" if saved is not None else "nothing saved"
    resume = f" · resume: manyhands resume {run_dir}" if run_dir is not None and saved is not None else ""
    return f"{kept} · {stopped} processes stopped · {left} left{resume}"
