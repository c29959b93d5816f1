"""``manyhands runs``: the run folders with their status, and the reading of one."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from manyhands.commands.options import DEFAULT_OUTPUT, Output
from manyhands.commands.output import format_time, print_json, print_table, say
from manyhands.commands.training import runs_root
from manyhands.errors import ManyhandsError
from manyhands.train.progress import format_metrics
from manyhands.train.run_folder import RunFolder, list_runs

__all__ = ["Overview", "read_overview", "runs"]
