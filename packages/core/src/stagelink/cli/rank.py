"""Program of each process of ``stagelink run``: the user's script, and a note if it fails.

The note is torch's own kind of error file, from which the launcher learns what went wrong here.
Run by its path, with nothing imported that the script might want to come before.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType

_OWN_FILES = (__file__, "<frozen runpy>")


def main() -> None:
    """Run ``SCRIPT ARGS...`` or ``-m MODULE ARGS...``, as Python itself would."""
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:  # the launcher has it too, and says so once for all ranks
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        _tell(error)
        sys.exit(1)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        _search_first(os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        script = Path(sys.argv[0]).absolute()  # it may change the directory and ask for __file__
        _search_first(str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")


def _search_first(folder: str) -> None:
    """Put the folder where Python put this file's own; with ``-P`` it puts none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _tell(error: Exception) -> None:
    """Leave the error to the launcher, and print it in one piece: other ranks print as well."""
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415 - see above
        get_error_handler,
    )

    from stagelink.cli.failures import CONSEQUENCES  # noqa: PLC0415 - see above

    error.__traceback__ = _from_script(error.__traceback__)
    get_error_handler().record_exception(error)
    if isinstance(error, CONSEQUENCES):
        # The rank that failed prints its traceback, and theirs who were told of it add nothing.
        text = f"{type(error).__name__}: {error}\n"
    else:
        text = "".join(traceback.format_exception(error))
    sys.stderr.write(f"rank {os.environ.get('RANK')}: {text}")
    sys.stderr.flush()


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not of starting the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
