"""From the user's data to batches: what is accepted, how rows are fetched, and preparing data before training."""

from __future__ import annotations

from manyhands.data.adapt import Adapted, adapt
from manyhands.data.files import read_idx, read_table
from manyhands.data.prepare import Normalizer, clean, split
from manyhands.data.source import Batch, ColumnSource, DatasetSource, Source, call_model

__all__ = [
    "Adapted",
    "Batch",
    "ColumnSource",
    "DatasetSource",
    "Normalizer",
    "Source",
    "adapt",
    "call_model",
    "clean",
    "read_idx",
    "read_table",
    "split",
]
