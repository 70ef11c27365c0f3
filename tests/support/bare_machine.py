"""A machine as a cloud makes it: nothing on it but a shell and Python, and a boot script that is run there.

It is a folder of this machine with a PATH and a home of its own. `shutdown` is a stand-in that writes down that it was
called, since nobody wants the tests to power anything off.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed_grid.adapters.clouds.boot_script import EXIT_MARGIN_SECONDS, boot_script
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.ports import JOIN_VARIABLE, WorkerOffer, WorkerOrder
from tests.support.processes import is_running, processes_naming
from tests.support.shell import wait_until

TOOLS = ("sh", "cat", "chmod", "env", "hostname", "id", "mkdir", "setsid", "sleep", "stat", "tail", "true")
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def order_for(name: str, token: str, **environ: str) -> WorkerOrder:
    """An order for a machine of this name."""
    has = WorkerResources(1000, 1 << 30)
    values = {JOIN_VARIABLE: token, "GRID_WORKER_EXIT_SECONDS": "30", **environ}
    return WorkerOrder(name, "grid-1", WorkerOffer("small", "cpu", has), has, values)


class BareMachine:
    """A machine in a folder; `close` leaves nothing of it."""

    def __init__(self, folder: Path, *, tools: Sequence[str] = TOOLS, python: str | None = PYTHON) -> None:
        self.folder = folder
        self.home = folder / "var"
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        for tool in tools:
            (self.programs / tool).symlink_to(str(shutil.which(tool)))
        if python is not None:
            (self.programs / "python3").symlink_to(python)
        planned = f'-c | "-P +"*) echo "$@" >> {folder}/planned.txt ;;'
        self.add_program("shutdown", f'case "$*" in {planned} *) echo "$@" >> {folder}/shutdown.txt ;; esac')
        self.console = folder / "console.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def add_program(self, name: str, script: str) -> None:
        """Have a program on the PATH."""
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def boot(
        self, order: WorkerOrder, *, private_etc: bool = False, margin_seconds: int = EXIT_MARGIN_SECONDS
    ) -> BareMachine:
        """Run the boot script, as a cloud does; users that it makes are its own with `private_etc`."""
        script = self.folder / "user-data"
        script.write_text(boot_script(order, str(self.home), margin_seconds=margin_seconds))
        script.chmod(0o700)
        with self.console.open("ab") as console:
            self.process = subprocess.Popen(
                [*self._with_private_etc(private_etc), "/bin/sh", str(script)],
                env={"PATH": str(self.programs), "LANG": "C.UTF-8"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        return self

    def _with_private_etc(self, is_wanted: bool) -> list[str]:
        """The words before a command with which what it changes in /etc stays its own."""
        if not is_wanted:
            return []
        aside = self.folder / "etc"
        for name in ("upper", "work"):
            (aside / name).mkdir(parents=True, exist_ok=True)
        layers = f"lowerdir=/etc,upperdir={aside}/upper,workdir={aside}/work"
        mount = f'{shutil.which("mount")} -t overlay overlay -o {layers} /etc && exec "$@"'
        return [str(shutil.which("unshare")), "--mount", "/bin/sh", "-c", mount, "sh"]

    @property
    def said(self) -> str:
        """Text on its console."""
        return self.console.read_text()

    def power_offs(self) -> list[str]:
        """What `shutdown` was told so far."""
        record = self.folder / "shutdown.txt"
        return record.read_text().splitlines() if record.exists() else []

    def planned_ends(self) -> list[str]:
        """The shutdowns that were planned or cancelled so far."""
        record = self.folder / "planned.txt"
        return record.read_text().splitlines() if record.exists() else []

    def wait_until_off(self, seconds: float = 30) -> str:
        """Console text of a machine that has powered itself off after its script."""
        wait_until(self.power_offs, seconds)
        if self.process is not None:
            self.process.wait(30)
        return self.said

    def processes(self) -> list[int]:
        """What runs there."""
        return processes_naming(str(self.folder))

    def close(self) -> None:
        """End everything that runs there. A second time is harmless."""
        for _ in range(3):  # the jobs of an agent are ended by those that look after them, or here
            for pid in self.processes():
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)
        wait_until(lambda: not self.processes(), 20)
