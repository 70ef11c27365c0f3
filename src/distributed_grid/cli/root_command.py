"""Root of the command line `grid`; errors become exit codes here and nowhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from distributed_grid import __version__
from distributed_grid.cli.command_line import HelpRequest, LazyGroup, UsageError, VersionRequest, parse
from distributed_grid.cli.main import COMPLETION_VARIABLE
from distributed_grid.cli.output import echo
from distributed_grid.cli.session import CliSession
from distributed_grid.cli.standard_streams import (
    HANGUP_EXIT_CODE,
    HungUp,
    flush_standard_streams,
    guard_standard_streams,
)
from distributed_grid.errors import GridError

COMMANDS = {
    "run-shared": ("run", "run_shared", "Borrow resources, run a command, give them back."),
    "status": ("status", "status", "Nodes, pressure, offers, leases and jobs at a glance."),
    "shared-status": ("status", "shared_status", "Offers and active allocations."),
    "jobs": ("jobs", "jobs", "List, show, follow, cancel and wait for jobs."),
    "events": ("ledger", "events", "The event stream, which is also the audit trail."),
    "explain": ("explain", "explain", "Why it waits, why it is there, why it was stopped, when it will start."),
    "ledger": ("ledger", "ledger", "Lent amounts, by lender and borrower."),
    "distribute": ("distribute", "distribute", "Workers as the scheduler sees them; spread probes over them."),
    "boost": ("boost", "boost", "Lend a node what others can spare, for a while."),
    "offload": ("offload", "offload", "Find work that had better run elsewhere, and move it."),
    "memory": ("memory", "memory", "Keep bytes in the memory of other nodes."),
    "resource-sharing": ("resource_sharing", "resource_sharing", "Offers and allocations; give an owner a node back."),
    "cluster": ("cluster", "cluster", "Install, start, stop and show the agents of other machines."),
    "workers": ("workers", "workers", "Start, list and end the machines of a provider."),
    "scale": ("workers", "scale", "Start and give back workers as the queue calls for."),
    "predict": ("predict", "predict", "Needs of work, learned from earlier runs."),
    "simulate": ("simulate", "simulate", "Replay the work of a log under other policies."),
    "daemon": ("daemon", "daemon", "Start, stop and show the control plane."),
    "agent": ("cluster", "agent", "Serve as a node: the process of a machine without SSH."),
    "init": ("config", "init", "Write a commented cluster file."),
    "config": ("config", "config", "Check and show the configuration."),
}


def _grid() -> None:
    """Lend out what is idle on your machines, and get it back first.

    \b
    Exit codes:
      0    done
      1    the grid refused or failed (one line says why)
      2    wrong usage
      3    no control plane reachable
      124  waited too long
    run-shared and offload wrap exit with the command's own code (128+N after signal N, 130 when cancelled).
    """


GRID = LazyGroup("grid", _grid, COMMANDS)


def run_command_line(words: Sequence[str]) -> NoReturn:
    """Run a command and exit with its documented code; never with a traceback.

    A signal, a terminal that has closed and output that cannot be written are not bugs: they leave no report.
    """
    session = CliSession()
    guard_standard_streams()
    try:
        code = _run(words, session)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except HungUp:
        code = HANGUP_EXIT_CODE
    except SystemExit as stop:  # of a clean-up after a signal
        code = stop.code
    except GridError as error:
        _print_error(str(error))
        code = error.exit_code
    except BrokenPipeError:
        code = 141
    except Exception:  # the outermost place: a bug becomes one line and a report
        _print_error(_report(session))
        code = 1
    _exit(code if isinstance(code, int) else 0)


def _exit(code: int) -> NoReturn:
    """End the process: at once where there is no thread and no exit handler, which saves a tenth of a warm command."""
    flush_standard_streams()
    if sys.modules.keys().isdisjoint(("atexit", "threading")):
        os._exit(code)
    sys.exit(code)


def _run(words: Sequence[str], session: CliSession) -> object:
    """Run a command line; returns the result of the command, which may be an exit code."""
    if COMPLETION_VARIABLE in os.environ:
        from distributed_grid.cli.help_pages import completion

        echo(completion(GRID, os.environ[COMPLETION_VARIABLE]))
        return 0
    try:
        command, options, global_options = parse(GRID, words)
    except VersionRequest:
        echo(f"grid {__version__}")
        return 0
    except HelpRequest as request:
        from distributed_grid.cli.help_pages import help_page

        echo(help_page(request.path), err=request.is_mistake)
        return 2 if request.is_mistake else 0
    except UsageError as mistake:
        from distributed_grid.cli.help_pages import usage_message

        echo(usage_message(mistake.path, str(mistake)), err=True)
        return 2
    for name, value in global_options.items():
        setattr(session, name, value)
    return command.function(session, **options)


def _print_error(message: str) -> None:
    lines = [line for line in message.splitlines() if line.strip()] or ["failed"]
    echo("grid: " + "\n".join(lines), err=True)


def _report(session: CliSession) -> str:
    import traceback

    from distributed_grid.masking.command_line import mask_secrets

    reports = session.state_dir.reports
    path = reports / f"bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    command = " ".join(mask_secrets(sys.argv[1:3])[0])
    text = f"grid {__version__}, python {sys.version}\ncommand: grid {command} …\n\n{traceback.format_exc()}"
    try:
        reports.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:
        return f"this is a bug: {text.strip().splitlines()[-1]}"
    return f"this is a bug; the report is in {path}"
