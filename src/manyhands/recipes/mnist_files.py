"""Where the four MNIST files are: in a folder the user names, in the usual places, or fetched from a public mirror."""

from __future__ import annotations

import gzip
import hashlib
import io
import time
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from manyhands.config import environment
from manyhands.errors import DataError

__all__ = ["CONTENTS", "download", "file_in", "find"]

CONTENTS: Mapping[str, str] = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""File to the SHA-256 of what is in it once unpacked, since mirrors compress the same bytes differently."""

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
LARGEST_BYTES = 64 * 1024 * 1024
"""More than any of the four files unpacks to: a wrong answer of a mirror must not fill memory."""


def find(path: str = "") -> Path:
    """The folder that holds the four files, from the setting, the variable, the usual places or a download."""
    for said, given in (("--set path", path), ("MANYHANDS_MNIST", environment("MNIST"))):
        if given:
            folder = _complete(Path(given).expanduser())
            if folder is None:
                raise DataError(
                    f"{said} is {given!r}, where MNIST was not found; valid: a folder with the files "
                    f"{', '.join(CONTENTS)} (plain or .gz)."
                )
            return folder
    cache = Path.home() / ".cache" / "manyhands" / "mnist"
    usual = (Path("data") / "mnist", cache)
    for candidate in usual:
        folder = _complete(candidate)
        if folder is not None:
            return folder
    tried = [f"folder {candidate}: no MNIST files" for candidate in usual]
    failures = download(cache)
    if failures:
        listed = "\n  ".join([*tried, *failures])
        raise DataError(
            f"MNIST was not found and could not be downloaded. Tried:\n  {listed}\n"
            "Put the four idx files into ./data/mnist, or name their folder with --set path=FOLDER or MANYHANDS_MNIST."
        )
    return cache


def file_in(folder: Path, name: str) -> Path | None:
    """The file of that name in ``folder``, compressed or not."""
    return next((file for file in (folder / f"{name}.gz", folder / name) if file.is_file()), None)


def _complete(folder: Path) -> Path | None:
    """The folder itself, or the place in it where torchvision puts the files, if all four are there."""
    for candidate in (folder, folder / "MNIST" / "raw"):
        if all(file_in(candidate, name) for name in CONTENTS):
            return candidate
    return None


def download(
    folder: Path,
    *,
    contents: Mapping[str, str] = CONTENTS,
    mirrors: Sequence[str] = MIRRORS,
    timeout_s: float = 60.0,
) -> list[str]:
    """Fetch the files into ``folder``, each whole and verified or not at all; returns why it failed, or nothing.

    ``timeout_s`` covers one file from one mirror, from connecting to the last byte.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            for name, digest in contents.items():
                failures: list[str] = []
                for mirror in mirrors:
                    url = f"{mirror}{name}.gz"
                    try:
                        packed = _fetch(url, timeout_s)
                        _verify(packed, digest)
                    except (OSError, EOFError, zlib.error, DataError) as error:
                        failures.append(f"{url}: {error}")
                        continue
                    partial_file = Path(temporary) / f"{name}.gz"
                    partial_file.write_bytes(packed)
                    partial_file.replace(folder / f"{name}.gz")
                    break
                else:
                    return failures
    except OSError as error:
        return [f"folder {folder} cannot be written: {error}"]
    return []


def _fetch(url: str, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    received = bytearray()
    with urllib.request.urlopen(url, timeout=min(timeout_s, 15.0)) as response:
        while piece := response.read(1 << 16):
            received += piece
            if len(received) > LARGEST_BYTES:
                raise DataError(f"more than {LARGEST_BYTES} bytes; this is not an MNIST file")
            if time.monotonic() > deadline:
                raise DataError(f"not complete after {timeout_s:g} s")
    return bytes(received)


def _verify(packed: bytes, digest: str) -> None:
    with gzip.open(io.BytesIO(packed)) as unpacked:
        contents = unpacked.read(LARGEST_BYTES)
    received = hashlib.sha256(contents).hexdigest()
    if received != digest:
        raise DataError(f"the contents have SHA-256 {received}, expected {digest}")
