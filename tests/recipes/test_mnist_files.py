"""The MNIST files are found where they should be, fetched whole or not at all, and never taken unverified."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from manyhands.errors import DataError
from manyhands.recipes import get, with_settings
from manyhands.recipes.mnist_files import CONTENTS, download, find


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_small_mnist(folder: Path, suffix: str = ".gz", train: int = 5_040, test: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", random.integers(0, 256, (count, 28, 28)))
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", random.integers(0, 10, count))
    return folder


@pytest.fixture
def quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder and a home in which nothing lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MANYHANDS_MNIST", raising=False)
    return tmp_path


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on loopback and the folder that it serves."""

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    served = tmp_path / "served"
    served.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(served)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", served
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_files_are_found_by_setting_variable_and_working_folder(
    quiet_place: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    usual = write_small_mnist(quiet_place / "data" / "mnist", suffix)
    assert find().resolve() == usual
    variable = write_small_mnist(quiet_place / "variable" / "MNIST" / "raw", suffix)
    monkeypatch.setenv("MANYHANDS_MNIST", str(quiet_place / "variable"))
    assert find() == variable
    setting = write_small_mnist(quiet_place / "setting", suffix)
    assert find(str(setting)) == setting


def test_the_recipe_reads_what_was_found(quiet_place: Path) -> None:
    folder = write_small_mnist(quiet_place / "here")
    recipe = with_settings(get("mnist-cnn"), {"path": str(folder)})
    data = recipe.data()
    assert [len(part[0]) for part in (data.train, data.validation, data.test)] == [40, 5_000, 20]
    assert recipe.model()(data.train[0][:3]).shape == (3, 10)
    assert with_settings(get("mnist-mlp"), {"hidden": "8"}).model()(data.test[0]).shape == (20, 10)


def test_a_named_folder_without_the_files_is_an_error_and_not_a_download(
    quiet_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_mnist(quiet_place / "data" / "mnist")
    with pytest.raises(DataError, match=r"--set path is 'nowhere'.*train-images-idx3-ubyte"):
        find("nowhere")
    monkeypatch.setenv("MANYHANDS_MNIST", str(quiet_place / "empty"))
    with pytest.raises(DataError, match=r"MANYHANDS_MNIST is .*empty"):
        find()


def test_images_and_labels_that_do_not_fit_are_refused(quiet_place: Path) -> None:
    folder = write_small_mnist(quiet_place / "here")
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.zeros(7))
    with pytest.raises(DataError, match=r"t10k images of shape \(20, 28, 28\) and 7 labels"):
        with_settings(get("mnist-mlp"), {"path": str(folder)}).data()


def test_a_download_is_verified_and_kept(mirror: tuple[str, Path], tmp_path: Path) -> None:
    address, served = mirror
    contents = {"a": b"first file", "b": b"second file"}
    for name, content in contents.items():
        (served / f"{name}.gz").write_bytes(gzip.compress(content))
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    missing = address + "not-here/"
    assert download(tmp_path / "cache", contents=digests, mirrors=(missing, address)) == []
    assert gzip.decompress((tmp_path / "cache" / "b.gz").read_bytes()) == b"second file"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["a.gz", "b.gz"]


@pytest.mark.parametrize(
    "served_bytes, reason",
    [
        (gzip.compress(b"other bytes"), "the contents have SHA-256"),
        (b"<html>not found</html>", "Not a gzipped file"),
        (gzip.compress(b"the right bytes")[:-6], "ended before"),
    ],
)
def test_wrong_bytes_are_never_kept(mirror: tuple[str, Path], tmp_path: Path, served_bytes: bytes, reason: str) -> None:
    address, served = mirror
    (served / "a.gz").write_bytes(served_bytes)
    digest = hashlib.sha256(b"the right bytes").hexdigest()
    failures = download(tmp_path / "cache", contents={"a": digest}, mirrors=(address,))
    assert len(failures) == 1
    assert failures[0].startswith(f"{address}a.gz: ")
    assert reason in failures[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_mirror_that_refuses_is_named(tmp_path: Path) -> None:
    failures = download(tmp_path / "cache", contents={"a": "0" * 64}, mirrors=("http://127.0.0.1:9/",), timeout_s=5.0)
    assert "http://127.0.0.1:9/a.gz" in failures[0]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    failures = download(tmp_path / "file" / "cache", contents={"a": "0" * 64}, mirrors=())
    assert str(tmp_path / "file" / "cache") in failures[0]


def test_there_are_four_files_each_with_a_checksum() -> None:
    assert len(CONTENTS) == 4
    assert all(len(digest) == 64 for digest in CONTENTS.values())
