"""Entry point of `grid`. A command that `offload wrap` leaves on this machine is started before anything else is
loaded: that costs hardly more than an interpreter. Every other command line is `root_command.py`'s."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from collections.abc import Sequence

COMPLETION_VARIABLE = "_GRID_COMPLETE"  # set by the completion of a shell


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words[:2] == ["offload", "wrap"] and COMPLETION_VARIABLE not in os.environ:
            from distributed_grid.cli.local_start import start_if_local

            start_if_local(words[2:])
        from distributed_grid.cli.root_command import run_command_line

        run_command_line(words)
    except KeyboardInterrupt:  # while a module is imported, or a second one while the first is reported
        os._exit(130)
