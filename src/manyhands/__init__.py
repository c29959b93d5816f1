"""manyhands trains one PyTorch model on whatever machines there are, and the answer does not depend on them."""

from manyhands.config import environment as _environment
from manyhands.engine import local as _local

if _environment("WARM", "1") != "0":
    _local.warm()  # before torch is imported here, so that both processes load it at the same time

from manyhands.data.files import read_idx, read_table
from manyhands.data.prepare import Normalizer, clean, split
from manyhands.errors import ManyhandsError
from manyhands.sync.clip import ClipNorm, ClipValue
from manyhands.train.callbacks import (
    Callback,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    Lambda,
    ReduceOnPlateau,
    Schedule,
    State,
)
from manyhands.train.export import digest, load
from manyhands.train.history import History
from manyhands.train.launch import Launched, launch
from manyhands.train.optimizers import optimizer
from manyhands.train.schedule import PerEpoch
from manyhands.train.seats import Limits
from manyhands.train.strategy import AllReduce, Local, Server
from manyhands.train.trainer import Trainer
from manyhands.train.worker import worker_slot

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "ClipNorm",
    "ClipValue",
    "EarlyStopping",
    "History",
    "Lambda",
    "Launched",
    "Limits",
    "Local",
    "ManyhandsError",
    "Normalizer",
    "PerEpoch",
    "ReduceOnPlateau",
    "Schedule",
    "Server",
    "State",
    "Trainer",
    "clean",
    "digest",
    "launch",
    "load",
    "optimizer",
    "read_idx",
    "read_table",
    "split",
    "worker_slot",
]
