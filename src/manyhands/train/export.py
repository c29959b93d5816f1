"""Models as folders: checksummed weights and, where it can be told, how to build the model again. No pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from manyhands.errors import CheckpointError
from manyhands.train import architecture
from manyhands.train.checkpoint import Checkpoint, CheckpointStore
from manyhands.train.compare import differences, mismatch

__all__ = ["digest", "load", "save_model"]


def digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of the state: equal for equal weights, and only for those."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            state.update(f"{name}={tensor!r};".encode())
            continue
        plain = tensor.detach().cpu().contiguous()
        state.update(f"{name}{tuple(plain.shape)}{plain.dtype};".encode())
        if plain.numel():
            state.update(plain.view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def save_model(model: nn.Module, path: str | Path) -> Path:
    """Write the weights of ``model`` to the folder ``path``; an older save stays until this one is safe."""
    store = CheckpointStore(path)
    number = max(store.steps(), default=0) + 1
    tensors = {f"model/{name}": tensor.detach() for name, tensor in _tensors(model).items()}
    store.save(number, tensors, {"architecture": architecture.describe(model)})
    return Path(path)


def load(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model that was saved to ``path``: a folder of ``trainer.save``, or the folder of a run.

    With ``model``, its weights are replaced. Without, it is built anew, which needs its class to be imported.
    """
    checkpoint = _read(Path(path))
    if model is None:
        description = checkpoint.meta.get("architecture")
        if description is None:
            raise CheckpointError(
                f"{path} does not tell how its model is built (its constructor's arguments are not attributes of it); "
                "give the model: mh.load(path, model=YourModel(...))"
            )
        model = architecture.build(description)
    theirs = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("model/")}
    ours = {f"model/{name}": tensor for name, tensor in _tensors(model).items()}
    if problems := differences(ours, theirs):
        raise mismatch(problems, f"load {path} into the model that was saved")
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])
    return model


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _read(path: Path) -> Checkpoint:
    inner = path / "checkpoints"
    checkpoint, warnings = CheckpointStore(inner if inner.is_dir() else path).load_latest()
    if checkpoint is None:
        detail = f": {warnings[0]}" if warnings else "; valid: a folder of trainer.save(path), or the folder of a run"
        raise CheckpointError(f"{path} holds no model that can be loaded{detail}")
    return checkpoint
