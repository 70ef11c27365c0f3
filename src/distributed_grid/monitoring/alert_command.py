"""Running the command that an alert is told to: no shell, a deadline, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

DEADLINE_SECONDS = 10.0
POLL_SECONDS = 0.02
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""What the command gets of the control plane's environment."""


class CommandFailed(Exception):
    """The command did not do its work; the text says how it ended."""


def run_command(
    argv: Sequence[str],
    body: bytes,
    variables: Mapping[str, str],
    *,
    leaving: threading.Event,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> None:
    """Run the command with `body` on its standard input, to its end or to the deadline; blocks.

    Its whole process group is ended afterwards in any case, at once when `leaving` is set. Raises CommandFailed.
    """
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(variables)
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
        told.write(body)
        told.seek(0)
        try:
            process = subprocess.Popen(
                argv, stdin=told, stdout=subprocess.DEVNULL, stderr=said, env=env, cwd="/", start_new_session=True
            )
        except (OSError, ValueError) as failure:
            raise CommandFailed(f"cannot be started: {failure}") from failure
        try:
            in_time = _is_over_by(process.pid, time.monotonic() + deadline_seconds, leaving)
        finally:
            # Nobody has waited for the leader yet, so its number still means this group and no other.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        if not in_time:
            raise CommandFailed(f"was ended after {deadline_seconds:g} s")
        if code:
            raise CommandFailed(f"ended with {code}{_last_words(said.fileno())}")


def _is_over_by(pid: int, deadline: float, leaving: threading.Event) -> bool:
    """Whether the process ends in time; it is left to be waited for."""
    while True:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        if time.monotonic() >= deadline or leaving.wait(POLL_SECONDS):
            return False


def _last_words(said: int) -> str:
    size = os.fstat(said).st_size
    words = os.pread(said, 300, max(size - 300, 0)).decode(errors="replace").strip()
    return f": {words.splitlines()[-1]!r}" if words else ""
