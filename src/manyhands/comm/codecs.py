"""Codecs by the word that the user types: how an update travels.

Adding one takes a subclass of ``Codec`` and a line here. The same values give the same bytes on any machine: a codec
uses operations on single elements, the largest or a selected element, and sums in a fixed order, nothing else.
"""

from __future__ import annotations

from typing import Any

from manyhands.comm.codec import Bf16, Codec, Fp32
from manyhands.comm.scaled import Int4, Int8, Scaled, Sign
from manyhands.comm.topk import TopK
from manyhands.errors import UsageError, unknown_name

__all__ = ["CODECS", "Codec", "resolve_codec"]

CODECS: dict[str, type[Codec]] = {kind.word: kind for kind in (Fp32, Bf16, Int8, Int4, Sign, TopK)}


def resolve_codec(codec: object) -> Codec | None:
    """A word, a word with its setting (``"topk:0.05"``, ``"int8:128"``), a codec, or None."""
    if codec is None or isinstance(codec, Codec):
        return codec
    word, colon, setting = codec.partition(":") if isinstance(codec, str) else ("", "", "")
    if word not in CODECS:
        raise unknown_name("codec", codec, CODECS)
    kind = CODECS[word]
    if not colon:
        return kind()
    if issubclass(kind, Scaled | TopK):
        return kind(_number(setting))
    raise UsageError(f"codec received {codec!r}; {word} has no setting, valid is {word!r}")


def _number(text: str) -> Any:
    """The setting behind the colon. What is no number the codec refuses, as it does wrong numbers."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text
