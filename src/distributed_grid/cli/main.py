"""Root of the command line `grid`; errors become exit codes here and nowhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import click

from distributed_grid import __version__
from distributed_grid.cli.global_options import GLOBAL_OPTIONS, CliSession, LazyGroup
from distributed_grid.errors import GridError

HELP = """Lend out what is idle on your machines, and get it back first.

\b
Exit codes:
  0    done
  1    the grid refused or failed (one line says why)
  2    wrong usage
  3    no control plane reachable
  124  waited too long
run-shared exits with the command's own code (128+N after signal N, 130 when cancelled).
"""

COMMANDS = {
    "run-shared": ("run", "run_shared", "Borrow resources, run a command, give them back."),
    "status": ("status", "status", "Nodes, pressure, offers, leases and jobs at a glance."),
    "shared-status": ("status", "shared_status", "Offers and active allocations."),
    "jobs": ("jobs", "jobs", "List, show, follow, cancel and wait for jobs."),
    "events": ("events", "events", "The event stream, which is also the audit trail."),
    "explain": ("explain", "explain", "Why it waits, why it is there, why it was stopped, when it will start."),
    "ledger": ("ledger", "ledger", "Who lent whom how much."),
    "distribute": ("distribute", "distribute", "Workers as the scheduler sees them; spread probes over them."),
    "boost": ("boost", "boost", "Lend a node what others can spare, for a while."),
    "memory": ("memory", "memory", "Keep bytes in the memory of other nodes."),
    "resource-sharing": ("resource_sharing", "resource_sharing", "Offers and allocations; give an owner a node back."),
    "cluster": ("cluster", "cluster", "Install, start, stop and show the agents of other machines."),
    "simulate": ("simulate", "simulate", "What a policy would have done with the work of a log."),
    "daemon": ("daemon", "daemon", "Start, stop and show the control plane."),
    "agent": ("cluster", "agent", "Serve as a node: the process of a machine without SSH."),
    "init": ("config", "init", "Write a commented cluster file."),
    "config": ("config", "config", "Check and show the configuration."),
}


@click.command(
    cls=LazyGroup,
    lazy=COMMANDS,
    help=HELP,
    params=[option() for option in GLOBAL_OPTIONS],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="grid", message="%(prog)s %(version)s")
def grid() -> None:
    """Lend out what is idle on your machines, and get it back first."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its documented code; never with a traceback."""
    session = CliSession()
    try:
        code = grid.main(args=arguments, prog_name="grid", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except click.ClickException as problem:
        problem.show()
        code = 2
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except GridError as error:
        _print_error(str(error))
        code = error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    except Exception:  # the outermost place: a bug becomes one line and a report
        _print_error(_report(session))
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _print_error(message: str) -> None:
    lines = [line for line in message.splitlines() if line.strip()] or ["failed"]
    click.echo("grid: " + "\n".join(lines), err=True)


def _report(session: CliSession) -> str:
    """Write a bug report to a file; the message that names it."""
    import traceback

    reports = session.state_dir.reports
    path = reports / f"bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    command = " ".join(sys.argv[1:3])
    text = f"grid {__version__}, python {sys.version}\ncommand: grid {command} …\n\n{traceback.format_exc()}"
    try:
        reports.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:
        return f"this is a bug: {text.strip().splitlines()[-1]}"
    return f"this is a bug; the report is in {path}"
