"""Commands in a host, as the test holds them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'
START_S = 1.0


class Command(subprocess.Popen[Any]):
    """A command that runs in a host. Signals reach the command itself, not only its wrapper.

    The process we hold is `nsenter`, which waits for the command outside of the host and ends as the command ends. Were
    it killed alone, the command would be left to process 1 of the whole machine.
    """

    def send_signal(self, sig: int) -> None:
        """Pass a signal to the command, waiting a moment where it is only just being started."""
        until = time.monotonic() + START_S
        while self.poll() is None:
            if inner := self._inner():
                for pid in inner:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sig)
                if sig == signal.SIGCONT:  # it stopped when the command did
                    super().send_signal(sig)
                return
            if time.monotonic() > until:
                super().send_signal(sig)
                return
            time.sleep(0.002)

    def _inner(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []


def checked(done: subprocess.CompletedProcess[str], where: str, check: bool) -> subprocess.CompletedProcess[str]:
    """The same; one that failed raises with all it said, if that is asked."""
    if check and done.returncode:
        raise AssertionError(f"{where}: {shlex.join(done.args)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
