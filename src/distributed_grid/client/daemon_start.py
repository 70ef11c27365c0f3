"""Start of the control plane where none runs: once, detached, with its start-up errors reported to the caller.

The daemon reports on a pipe: one line, either "ready" or why it could not start. Two commands at once start two
candidates; the lock lets one run, the other exits ("taken") and its starter uses the winner's socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import NamedTuple

from distributed_grid.errors import BadInput, GridError, Unreachable
from distributed_grid.posix.environment import pack_variables, variables_for
from distributed_grid.state_dir import NO_CONFIG, StateDir

MAX_CONFIG_CHARS = 1024 * 1024
LAST_CONFIG = "config.last"
"""Copy of the config that was used last, in the directory of this host."""
MAX_LOG_BYTES = 10 * 1024 * 1024
INHERITED_VARIABLES = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables that the daemon inherits; others, such as LD_PRELOAD, only where a test sets GRID_KEEP_ENV."""


class StartedDaemon(NamedTuple):
    """A control plane that was just started, and the config it uses."""

    config: str | None
    notes: list[str]  # for the user
    simulated: int = 0  # number of simulated nodes of the config


def start_daemon(
    state_dir: StateDir, *, config: str | None, explicit: bool, stay: bool, idle_seconds: float
) -> StartedDaemon | None:
    """Start a control plane and wait until it serves; None where another one was quicker."""
    state_dir.create()
    with contextlib.suppress(OSError):
        if state_dir.log.stat().st_size > MAX_LOG_BYTES:
            state_dir.log.replace(state_dir.log.with_suffix(".log.old"))
    reader, writer = os.pipe()
    variables = pack_variables(_config_variables(config, state_dir))
    kept = INHERITED_VARIABLES + tuple(filter(None, os.environ.get("GRID_KEEP_ENV", "").split(",")))
    # The caller's secrets do not belong in a process that serves everybody.
    environment = {name: os.environ[name] for name in (*kept, "PYTHONPATH") if name in os.environ}
    try:
        with open(state_dir.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            command = [sys.executable, "-m", "distributed_grid.server", "--state-dir", str(state_dir.root)]
            command += ["--report", str(writer), "--idle-seconds", str(idle_seconds)]
            command += ["--stay"] if stay else []
            command += ["--config", config] if config else []
            command += ["--explicit"] if explicit else []
            command += ["--variables", str(variables)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**environment, "GRID_ROLE": "daemon"},
                pass_fds=(writer, variables),
                start_new_session=True,
                umask=0o077,
            )
    except OSError as failure:
        os.close(reader)
        subject = failure.filename or sys.executable
        raise GridError(f"the control plane could not be started: {subject}: {failure.strerror}") from failure
    finally:
        os.close(writer)
        os.close(variables)
    return _await_report(reader, process, state_dir)


def _config_variables(config: str | None, state_dir: StateDir) -> dict[str, str]:
    """The variables of this environment that the config needs; the daemon may choose the one that was used last."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = config or json.loads((state_dir.host_dir / "config.json").read_text()).get("config")
    if not config or config == NO_CONFIG:
        return {}
    for path in (config, state_dir.host_dir / LAST_CONFIG):
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            return variables_for(file.read(MAX_CONFIG_CHARS), os.environ)
    return {}


def _await_report(reader: int, process: subprocess.Popen[bytes], state_dir: StateDir) -> StartedDaemon | None:
    """Wait for the daemon's report; for one that ends without any, raise the last line of its log."""
    with os.fdopen(reader, "rb") as pipe:
        line = pipe.readline()
    if not line:
        code, lines = process.wait(), []
        with contextlib.suppress(OSError):
            lines = state_dir.log.read_text(errors="replace").strip().splitlines()
        last = f": {lines[-1][:200]}" if lines else ""
        raise Unreachable(f"the control plane ended while starting (exit {code}); see {state_dir.log}{last}")
    report = json.loads(line)
    if report["state"] == "failed":
        raise BadInput(report["message"]) if report.get("bad_input") else GridError(report["message"])
    process.returncode = 0  # it outlives this process, which does not wait for it
    return StartedDaemon(report["config"], report["notes"], report["simulated"]) if report["state"] == "ready" else None
