"""The ledger's file: durable at a flush, whole after a crash, honest about damage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.ledger import Ledger
from manyhands.errors import CheckpointDamaged
from manyhands.train.ledger_file import LedgerFile, read_ledger


def started(steps: int) -> Ledger:
    ledger = Ledger()
    ledger.begin_epoch(0, 1000, 10, "digest")
    ledger.commit(0, 0, steps - 1)
    return ledger


def test_flushes_append_and_a_resume_goes_on_in_the_same_file(tmp_path: Path) -> None:
    file, ledger = LedgerFile(tmp_path / "ledger"), started(50)
    file.flush(ledger)
    ledger.commit(0, 50, 69)
    file.flush(ledger)
    file.flush(ledger)
    assert len(file.path.read_text().splitlines()) == 3

    resumed_file = LedgerFile(tmp_path / "ledger")
    resumed = resumed_file.load()
    assert resumed.next_step == 70
    resumed.rollback(60)  # the newest checkpoint is older than the ledger
    resumed.begin_epoch(0, 1000, 10, "digest")
    resumed.commit(0, 60, 99)
    resumed_file.flush(resumed)
    proof = read_ledger(tmp_path / "ledger").verify()
    assert proof.exact
    assert proof.epochs[0].once == 1000


def test_a_missing_file_is_an_empty_ledger(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "ledger").verify().epochs == ()


def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_flush(tmp_path: Path) -> None:
    file, ledger = LedgerFile(tmp_path / "ledger"), started(50)
    file.flush(ledger)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + b'{"kind":"commit","epo')
    resumed = file.load()
    assert resumed.next_step == 50
    resumed.commit(0, 50, 99)
    file.flush(resumed)
    assert file.path.read_bytes().startswith(whole)
    assert read_ledger(file.path).verify().exact


def test_every_flipped_bit_before_the_end_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = started(50)
    ledger.skip(0, 7, "loss is NaN")
    LedgerFile(path).flush(ledger)
    good = path.read_bytes()
    for bit in range(0, (len(good) - 1) * 8, 7):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointDamaged, match=r"is damaged at line [123]"):
            read_ledger(path)


@pytest.mark.fault
def test_a_disk_that_refuses_loses_no_record(tmp_path: Path) -> None:
    """The limit on the size of a file, in a process of its own, plays the full disk."""
    script = """
import resource, sys
from pathlib import Path
from manyhands.core.ledger import Ledger
from manyhands.errors import CheckpointError
from manyhands.train.ledger_file import LedgerFile, read_ledger

file, ledger = LedgerFile(sys.argv[1]), Ledger()
ledger.begin_epoch(0, 1000, 10, "digest")
file.flush(ledger)
before = file.path.read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, resource.RLIM_INFINITY))
ledger.commit(0, 0, 49)
try:
    file.flush(ledger)
except CheckpointError as error:
    print(error)
assert file.path.read_bytes() == before, "half a line was left in the file"
ledger.commit(0, 50, 99)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.flush(ledger)
assert read_ledger(file.path).verify().exact
"""
    path = tmp_path / "ledger"
    command = [sys.executable, "-c", script, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert f"could not write the ledger {path}: File too large; needed " in result.stdout
    assert "bytes, free " in result.stdout
