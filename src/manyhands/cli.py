"""The door of the command line: which verbs there are, and what becomes of an error.

Exit codes: 0 done, 1 the user's code failed, 2 usage, 3 infrastructure, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from manyhands.commands.demo import demo
from manyhands.commands.explain import explain
from manyhands.commands.output import print_error, print_json
from manyhands.commands.recipes import recipes
from manyhands.commands.resume import resume
from manyhands.commands.runs import runs
from manyhands.commands.scale import scale
from manyhands.commands.simulate import simulate
from manyhands.commands.train import train
from manyhands.errors import CheckpointError, ManyhandsError, NotFinite, RunError, UsageError

__all__ = ["build", "exit_code", "main"]

DONE, USER_CODE, USAGE, INFRASTRUCTURE, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


def build() -> App:
    """The application with all its verbs."""
    app = App(name="manyhands", help="Train one PyTorch model on whatever machines there are.")
    for verb in (demo, train, resume, runs, recipes, scale, explain, simulate):
        app.command(verb)
    return app


def exit_code(error: BaseException) -> int:
    """The exit code of a run that ended in ``error``."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, (UsageError, CycloptsError)):
        return USAGE
    if isinstance(error, (RunError, CheckpointError)) and not isinstance(error, NotFinite):
        return INFRASTRUCTURE
    return USER_CODE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb and exit; the entry point of the ``manyhands`` command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command, bound, _ = build().parse_args(words, exit_on_error=False, print_error=False)
        code = command(*bound.args, **bound.kwargs) or DONE
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        _tell(error)
        if "--json" in words:
            status = "interrupted" if code == INTERRUPTED else "failed"
            print_json({"status": status, "exit_code": code, "error": type(error).__name__, "message": str(error)})
    except SystemExit as error:  # after SIGTERM: saved, and the receipt is printed
        if "--json" in words and error.code == TERMINATED:
            print_json({"status": "interrupted", "exit_code": TERMINATED})
        raise
    sys.exit(code)


def _tell(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif isinstance(error, (ManyhandsError, CycloptsError)):
        print_error("\n".join([str(error), *getattr(error, "__notes__", [])]))
    else:
        traceback.print_exception(error)


if __name__ == "__main__":
    main()
