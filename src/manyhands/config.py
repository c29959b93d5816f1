"""The environment variables that manyhands reads, and the one place that reads them.

Everything else is set by arguments; a variable is for what belongs to the machine and not to the run.
``os.environ`` appears in no other file but where ``engine/`` starts processes.

=================  ==========================================================  ==========
variable           meaning                                                     default
=================  ==========================================================  ==========
MANYHANDS_WARM     ``0`` turns off the background start of the zygote, the     ``1``
                   process with torch preloaded that workers are forked from
MANYHANDS_RUNS     root folder for run folders                                 ``runs``
MANYHANDS_MNIST    folder with the four MNIST idx files                        (not set)
=================  ==========================================================  ==========
"""

from __future__ import annotations

import os
from typing import overload

PREFIX = "MANYHANDS_"
VARIABLES = ("MNIST", "RUNS", "WARM")


@overload
def environment(name: str, default: str) -> str: ...
@overload
def environment(name: str, default: None = None) -> str | None: ...
def environment(name: str, default: str | None = None) -> str | None:
    """The value of ``MANYHANDS_<name>``; ``default`` where it is not set or empty."""
    assert name in VARIABLES, f"{PREFIX}{name} is not in the table at the top of config.py"
    return os.environ.get(PREFIX + name) or default
