"""A small byte-level GPT on a text file of the user's."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.errors import DataError, UsageError
from manyhands.recipes.registry import Recipe, RecipeData

__all__ = ["GPT", "bits_per_byte", "gpt", "load_text", "next_byte_loss"]

BYTES = 256


class Block(nn.Module):
    """Attention to earlier positions, then a feed-forward layer, each added to its normalised input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, width) to the same shape."""
        batch, positions, width = x.shape
        split = self.query_key_value(self.norm_attention(x)).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, positions, width)))
        fed: Tensor = x + self.dropout(self.feed(self.norm_feed(x)))
        return fed


class GPT(nn.Module):
    """Bytes in, a score for each possible next byte out; input and output embeddings are one tensor."""

    def __init__(self, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"width {width} does not divide into {heads} heads; choose a width that is a multiple.")
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.scores.weight = self.bytes.weight

    def forward(self, text: Tensor) -> Tensor:
        """(batch, positions) of byte values to (batch, positions, 256)."""
        text = text.long()
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        scores: Tensor = self.scores(self.norm(self.blocks(x)))
        return scores


def next_byte_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the next byte, mean over all positions."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten().long())


def bits_per_byte(output: Tensor, target: Tensor) -> Tensor:
    """How many bits the model needs for a byte of the text: 8 without any knowledge, lower is better."""
    return next_byte_loss(output, target) / math.log(2.0)


def load_text(text: str, context: int) -> RecipeData:
    """Windows of ``context`` bytes and the bytes that follow them: 90 % to train, then 5 % and 5 %, in file order."""
    if not text:
        raise DataError("the gpt recipe needs a text of yours: --set text=PATH (any file; it is read as bytes).")
    path = Path(text).expanduser()
    if not path.is_file():
        raise DataError(f"--set text={text!r}: no such file; valid: the path of a text file, read as bytes.")
    contents = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    windows = (len(contents) - 1) // context
    if windows < 20:
        raise DataError(
            f"{text!r} has {len(contents)} bytes; valid: at least {20 * context + 1} bytes "
            f"(20 windows of context={context}). Give a longer text or a smaller --set context."
        )
    inputs = contents[: windows * context].view(windows, context)
    following = contents[1 : windows * context + 1].view(windows, context)
    first, second = windows * 90 // 100, windows * 95 // 100
    return RecipeData(
        train=(inputs[:first], following[:first]),
        validation=(inputs[first:second], following[first:second]),
        test=(inputs[second:], following[second:]),
    )


def gpt(
    text: str = "",
    context: int = 128,
    layers: int = 4,
    width: int = 160,
    heads: int = 5,
    dropout: float = 0.1,
    lr: float = 0.001,
    weight_decay: float = 0.1,
) -> Recipe:
    """A GPT of about 1.3 million parameters."""
    return Recipe(
        name="gpt",
        description="a byte-level GPT of 1.3 million parameters on a text of yours: --set text=PATH",
        model=partial(GPT, context, layers, width, heads, dropout),
        data=partial(load_text, text, context),
        loss=next_byte_loss,
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay),
        metrics=(bits_per_byte,),
        epochs=1,
        batch_size=32,
    )
