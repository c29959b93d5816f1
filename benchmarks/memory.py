"""Peak memory over all processes of a run: a 100-million-parameter model, and a 2 GiB array.

    python -m benchmarks.memory --cases model,array,shared,file

Memory is counted as proportional set size, in which a page that several processes share counts once. Of a side that
shares memory through files without a name, what these hold is taken instead of its shared pages: processes are looked
at one after the other, and a page that another one maps meanwhile would count twice.
"""

import argparse
import contextlib
from pathlib import Path

import psutil

from benchmarks.measure import Side, bare, ours, run_side
from benchmarks.table import markdown, write_block

GIB = 2**30
WORKERS = 4
ARRAY_ROWS = 2 * GIB // (784 * 4)


class Peak:
    """Watches a side's processes and keeps the largest total; its parts are those of that moment."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.shared_bytes = 0
        self.processes = 0

    def __call__(self, processes: list[psutil.Process]) -> None:
        private = shared = 0
        files: dict[tuple[int, int], int] = {}
        for process in processes:
            with contextlib.suppress(OSError):  # it may end at any moment
                sizes = _rollup_bytes(process.pid)
                private += sizes["Pss_Anon"] + sizes["Pss_File"]
                shared += sizes["Pss_Shmem"]
                files |= _memory_files(process.pid)
        shared = sum(files.values()) or shared
        if private + shared > self.total_bytes:
            self.total_bytes, self.shared_bytes, self.processes = private + shared, shared, len(processes)


def _rollup_bytes(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}


def _memory_files(pid: int) -> dict[tuple[int, int], int]:
    """Bytes held by each memory file the process has open, by device and inode."""
    sizes = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(("/memfd:", "/dev/shm/torch_")):
                facts = entry.stat()
                sizes[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sizes


def over_two_gib(storage: str) -> list[Side]:
    """One epoch of a small model over a large array."""
    job = [f"--rows={ARRAY_ROWS}", f"--steps={ARRAY_ROWS // 128}", f"--storage={storage}"]
    return [bare("bare loop, one process", *job), ours(f"manyhands, {WORKERS} workers", *job, f"--workers={WORKERS}")]


CASES: dict[str, tuple[str, list[Side]]] = {
    "model": (
        "100 M parameters, Adam, batch 16",
        [
            bare(
                "bare loop, one process", "--model=hundred", "--rows=96", "--batch-size=16", "--steps=6", "--threads=2"
            ),
            ours(
                f"manyhands, {WORKERS} workers",
                "--model=hundred",
                "--rows=96",
                "--batch-size=16",
                "--steps=6",
                f"--workers={WORKERS}",
            ),
        ],
    ),
    "array": ("mlp on an array of 2 GiB in memory, one epoch", over_two_gib("memory")),
    "shared": ("mlp on a tensor of 2 GiB in shared memory, one epoch", over_two_gib("shared")),
    "file": ("mlp on a memory-mapped file of 2 GiB, one epoch", over_two_gib("file")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    for name in parser.parse_args().cases.split(","):
        title, sides = CASES[name]
        rows = []
        first_bytes = 0
        for side in sides:
            peak = Peak()
            run_side(side, peak)
            first_bytes = first_bytes or peak.total_bytes
            sizes = (peak.total_bytes, peak.shared_bytes, peak.total_bytes - first_bytes)
            rows.append([title, side.name, str(peak.processes), *(f"{size / GIB:.2f}" for size in sizes)])
        headers = ["job", "side", "processes", "peak, GiB", "of it shared memory, GiB", "over the bare loop, GiB"]
        write_block(f"memory {name}", markdown(headers, rows), module="memory")


if __name__ == "__main__":
    main()
