"""Tensor files are safetensors files, and no wrong byte of one is ever returned."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyhands.errors import CheckpointDamaged, CheckpointError
from manyhands.train.tensor_file import FileEntry, plan_files, read_tensors, verify_file, write_file

ODD: dict[str, Tensor] = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0),
    "empty.wide": torch.empty(3, 0, 2, dtype=torch.int64),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(20)[::3],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "bf16": torch.randn(7).bfloat16(),
    "half": torch.randn(5).half(),
    "double": torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "byte": torch.arange(5, dtype=torch.uint8),
    "short": torch.arange(-3, 3, dtype=torch.int16),
    "long": torch.tensor([2**62, -(2**62)]),
    "unsigned": torch.tensor([1, 2**16 - 1], dtype=torch.uint16),
    "complex": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "float8": torch.tensor([0.5, 1.0]).to(torch.float8_e4m3fn),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    'name "with" ü and \n': torch.ones(1),
}


def entry_of(path: Path) -> FileEntry:
    content = path.read_bytes()
    return FileEntry(name=path.name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def same_bits(left: Tensor, right: Tensor) -> bool:
    as_bytes = [tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    (planned,) = plan_files(ODD, 1_000_000)
    entry = write_file(tmp_path / planned.name, planned.parts())
    assert entry == entry_of(tmp_path / planned.name)
    assert entry.size_bytes == planned.size_bytes
    loaded = read_tensors(tmp_path / planned.name, entry)
    assert loaded.keys() == ODD.keys()
    assert [name for name, tensor in ODD.items() if not same_bits(tensor, loaded[name])] == []


def test_the_library_reads_our_files_and_we_read_its_files(tmp_path: Path) -> None:
    plain = {name: tensor.detach().resolve_conj().contiguous() for name, tensor in ODD.items()}
    (planned,) = plan_files(plain, 1_000_000)
    write_file(tmp_path / "ours", planned.parts())
    theirs = load_file(tmp_path / "ours")
    assert [name for name, tensor in plain.items() if not same_bits(tensor, theirs[name])] == []
    save_file(plain, tmp_path / "theirs")
    ours = read_tensors(tmp_path / "theirs", entry_of(tmp_path / "theirs"))
    assert [name for name, tensor in plain.items() if not same_bits(tensor, ours[name])] == []


def test_tensors_are_divided_over_files_of_limited_size() -> None:
    tensors = {f"layer{index}": torch.ones(100) for index in range(5)} | {"large": torch.ones(1000)}
    files = plan_files(tensors, 1000)
    assert [len(file.tensors) for file in files] == [1, 2, 2, 1]
    assert len({file.name for file in files}) == len(files)


@pytest.mark.parametrize(
    "tensor, received",
    [
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128"),
        (torch.ones(2, device="meta"), "meta"),
    ],
    ids=["sparse", "complex128", "meta"],
)
def test_a_tensor_without_a_place_in_the_format_is_named(tensor: Tensor, received: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'layer\.weight' cannot be saved: .*{received}.* valid are dense"):
        plan_files({"layer.weight": tensor}, 1000)


def test_damage_is_noticed_by_reading_and_by_verifying(tmp_path: Path) -> None:
    (planned,) = plan_files({"weight": torch.arange(1000.0)}, 1_000_000)
    path = tmp_path / planned.name
    entry = write_file(path, planned.parts())
    good = path.read_bytes()
    damaged = {
        "SHA-256": good[:-1] + bytes([good[-1] ^ 1]),
        f"it has {len(good) - 1} bytes": good[:-1],
        f"it has {len(good) + 1} bytes": good + b"\0",
    }
    for message, content in damaged.items():
        path.write_bytes(content)
        for read in (verify_file, read_tensors):
            with pytest.raises(CheckpointDamaged, match=message):
                read(path, entry)
    path.unlink()
    with pytest.raises(CheckpointDamaged, match="No such file"):
        verify_file(path, entry)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x05" + b"\0" * 20,
        (2**60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64),
        (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-8,-4]}}'.ljust(64),
        (64).to_bytes(8, "little") + b'{"a":{"dtype":"F99","shape":[0],"data_offsets":[0,0]}}'.ljust(64),
    ],
    ids=["empty", "pickle", "endless", "list", "beyond", "before", "unknown"],
)
def test_a_file_whose_checksum_fits_but_whose_content_does_not_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tensors-000.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="is not a safetensors file"):
        read_tensors(path, entry_of(path))
