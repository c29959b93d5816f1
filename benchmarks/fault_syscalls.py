"""Faults 12 and 13: a save meets a crash, and an error, at every system call of its write path.

    python benchmarks/fault_syscalls.py

Needs strace. A child process makes one save; strace kills it (SIGKILL) as it enters the N-th call, or lets that call
fail, for every N. After a crash a verified checkpoint must load, the previous or the new one. After an error the save
must either have raised a CheckpointError that names path, needed and free bytes, with the previous checkpoint in place,
or have published the new one. In both cases the next save must work and clear up. A crash of a process says nothing
about a power cut, so the order of writes, fsyncs and renames is checked in the trace. Exits with 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("MANYHANDS_WARM", "0")  # the saving child is forked from this process, which stays small

import torch

from manyhands.errors import CheckpointError
from manyhands.train.checkpoint import CheckpointStore

# The question mark: not every architecture has every call.
CALLS = [
    *("?open", "openat", "?creat", "write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "close", "flock"),
    *("?rename", "renameat", "renameat2", "?mkdir", "mkdirat", "?unlink", "unlinkat", "?rmdir"),
]
DECISIVE = {"fsync", "fdatasync", "rename", "renameat", "renameat2"}
SET_PTRACER, ANY_PROCESS = 0x59616D61, -1
SAVED, REFUSED, WRONG_MESSAGE = 0, 3, 4
TIMEOUT_S = 60

# What is in the store before, and the step that is saved then: one more checkpoint (the oldest is pruned), or the only
# checkpoint once more (there is never a moment without it).
SCENARIOS = {"another step": ([1, 2], 3), "the same step": ([5], 5)}


def save(folder: Path, step: int, mark: str) -> None:
    # Two files, the first of them large enough for several writes.
    tensors = {"large": torch.full((400_000,), float(step)), "small": torch.full((300,), float(step))}
    CheckpointStore(folder, file_limit_bytes=1_600_000).save(step, tensors, {"mark": mark})


def saving_child(folder: Path, step: int, start: int) -> int:
    """The exit status of a process that makes one save as soon as something can be read from ``start``."""
    signal.alarm(TIMEOUT_S)  # a child that hangs ends as one that failed
    ctypes.CDLL(None).prctl(SET_PTRACER, ANY_PROCESS)  # where only a parent may trace by default
    os.read(start, 1)
    try:
        save(folder, step, "new")
    except CheckpointError as error:
        told = re.search(r"needed \d+ bytes, free \d+ bytes", str(error)) and str(folder) in str(error)
        return REFUSED if told else WRONG_MESSAGE
    return SAVED


def traced_save(folder: Path, step: int, injection: str | None, log: Path) -> int:
    """Save in a child under strace; its exit status, or minus the signal that killed it."""
    start, starter = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(saving_child(folder, step, start))
    os.close(start)
    inject = ["-e", f"inject={injection}"] if injection else []
    command = ["strace", "-f", "-y", "-o", str(log), "-e", f"trace={','.join(CALLS)}", *inject, "-p", str(child)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        if "attached" not in (said := strace.stderr.readline()):
            os.close(starter)
            os.waitpid(child, 0)
            sys.exit(f"strace cannot trace here: {said.strip()}")
        os.write(starter, b"!")
        os.close(starter)
        _, status = os.waitpid(child, 0)
        strace.wait(TIMEOUT_S)
    return os.waitstatus_to_exitcode(status)


def problem_after(folder: Path, steps: list[int], step: int, status: int, fault: str) -> str | None:
    """What is wrong with the store after the fault; None when all that was promised holds."""
    checkpoint, warnings = CheckpointStore(folder).load_latest()
    if checkpoint is None or warnings:
        return f"load_latest() returned {checkpoint and checkpoint.step} with {warnings}"
    is_new = checkpoint.meta["mark"] == "new"
    if checkpoint.step != (step if is_new else steps[-1]):
        return f"step {checkpoint.step} was loaded"
    if not all(bool((tensor == checkpoint.step).all()) for tensor in checkpoint.tensors.values()):
        return "the loaded bytes are not the saved ones"
    if fault == "error" and status not in (SAVED, REFUSED):
        return f"the save ended with status {status}"
    if fault == "error" and is_new != (status == SAVED):
        return f"the save {'returned' if status == SAVED else 'raised'}, but new is {is_new}"
    save(folder, step + 1, "next")
    hidden = [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]
    return f"left behind: {hidden}" if hidden else None


def durability_problem(log: Path) -> str | None:
    """What a power cut could tear although no crash of the process can: a name public before its bytes are safe."""
    unsynced: set[Path] = set()
    for line in log.read_text().splitlines():
        if not (match := re.match(r"\d+ +(\w+)\((.*)\) += 0|\d+ +(openat|open|write)\((.*)\) += ", line)):
            continue
        call, arguments = match[1] or match[3], match[2] or match[4]
        named = [Path(name) for name in re.findall(r'"(/[^"]*)"', arguments)]
        opened = [Path(name) for name in re.findall(r"\d<(/[^>]*)>", arguments)]
        if call in {"open", "openat"} and "O_CREAT" in arguments:
            unsynced |= {named[0], named[0].parent}
        elif call == "write":
            unsynced.add(opened[0])
        elif call == "fsync":
            unsynced.discard(opened[0])
        elif call.startswith("rename"):
            source, target = named
            torn = sorted(path for path in unsynced if path.is_relative_to(source))
            if torn and target.name.isdigit():
                return f"{target.name} was published before {torn[0].name or 'its folder'} was durable"
            if target.parent in unsynced and target.name.startswith(".removing-"):
                return f"{source.name} was removed before the new checkpoint was durable"
            unsynced.add(target.parent)
    return None


def call_names(log: Path) -> list[str]:
    found = (re.match(r"\d+ +(\w+)\(", line) for line in log.read_text().splitlines())
    return [match[1] for match in found if match]


def chosen(names: list[str], sample: int | None) -> Iterator[int]:
    """The numbers, from 1, of the calls to try: all, or those that decide and ``sample`` others evenly spread."""
    others = [number for number, name in enumerate(names, 1) if name not in DECISIVE]
    spread = set(others[:: max(1, len(others) // sample)]) if sample else set(others)
    return (number for number, name in enumerate(names, 1) if number in spread or name in DECISIVE)


def run_scenario(place: Path, scenario: str, sample: int | None) -> int:
    steps, step = SCENARIOS[scenario]
    template, folder, log = place / "template", place / "checkpoints", place / "strace.log"
    for before in steps:
        save(template, before, "old")
    shutil.copytree(template, folder)
    traced_save(folder, step, None, log)
    names, misses = call_names(log), 0
    if problem := durability_problem(log):
        misses += 1
        print(f"MISSED order of {scenario}: {problem}")
    for fault in ("crash", "error"):
        outcomes: collections.Counter[str] = collections.Counter()
        for number in chosen(names, sample):
            shutil.rmtree(folder)
            shutil.copytree(template, folder)
            status = traced_save(folder, step, injection(names, number, fault), log)
            assert status == -signal.SIGKILL if fault == "crash" else "(INJECTED)" in log.read_text(), "no fault fired"
            outcomes["killed" if status < 0 else "saved" if status == SAVED else "refused"] += 1
            if problem := problem_after(folder, steps, step, status, fault):
                misses += 1
                print(f"MISSED {fault} at call {number} ({names[number - 1]}) of {scenario}: {problem}")
        met = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"{scenario}, {fault}: {len(names)} calls · {outcomes.total()} tried · {met} · {misses} missed so far")
    shutil.rmtree(template)
    shutil.rmtree(folder)
    return misses


def injection(names: list[str], number: int, fault: str) -> str:
    """What strace must do to meet the ``number``-th call of all: it counts the calls of each name apart."""
    name = names[number - 1]
    error = "error=EIO" if name in {"fsync", "fdatasync", "close", "flock"} else "error=ENOSPC"
    effect = "signal=SIGKILL" if fault == "crash" else error
    return f"{name}:{effect}:when={names[:number].count(name)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="try every fsync and rename, but only this many of the other calls")
    options = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is not installed")
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        misses = sum(run_scenario(Path(place), scenario, options.sample) for scenario in SCENARIOS)
    print(f"missed {misses} · {time.perf_counter() - started:.1f} s")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
