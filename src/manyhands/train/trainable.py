"""What a model and its optimizer must be like to be trained: looked at before anything is started."""

from __future__ import annotations

import torch
from torch import nn

from manyhands.errors import ModelError

__all__ = ["check_model"]


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model that cannot be trained, before anything is started."""
    names = {id(p): n for n, p in model.named_parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if strangers := held - names.keys():
        raise ModelError(
            f"the optimizer holds {len(strangers)} parameters that the model does not have; "
            "build it on model.parameters() of the model that the Trainer gets"
        )
    if not any(p.requires_grad and id(p) in held for p in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has no trainable parameters in the optimizer ({len(names)} parameters in all); "
            "set requires_grad on some, or use evaluate and predict, which need none"
        )
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{name} has a hook that runs when its gradient is complete, which here is a sum over lanes; valid: "
                "parameter.register_hook(...), which is given the part of each lane"
            )
    if any(vars(optimizer).get(name) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")):
        raise ModelError(
            f"{type(optimizer).__name__} has hooks around its step, which workers make with pieces of parameters; "
            "valid: none. A class of your own that overrides step() is given whole parameters"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise ModelError(f"{name} is on {tensor.device}; valid is cpu: move the model with model.cpu() first")
        if nn.parameter.is_lazy(tensor):
            raise ModelError(f"{name} has no shape yet; call the model once on a batch before training it")
