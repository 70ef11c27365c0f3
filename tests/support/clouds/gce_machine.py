"""A machine of a cloud's stand-in that really boots: its startup script, as a process of this machine.

What is a machine's own is in one folder: its home, and a `shutdown` that switches just this machine off. Everything it
starts has the folder in its environment, and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from distributed_grid.adapters.clouds.boot_script import HOME
from tests.support.clouds.booted_machines import NO_USERS

MARK = "STAND_IN_MACHINE"
SHUTDOWN = """#!/bin/sh
touch "$STAND_IN_MACHINE/off"
"""


class BootedMachine:
    """The processes of one machine."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        commands = folder / "bin"
        commands.mkdir(parents=True)
        for command, text in (("shutdown", SHUTDOWN), ("useradd", NO_USERS)):
            (commands / command).write_text(text)
            (commands / command).chmod(0o755)
        file = folder / "startup-script"
        file.write_text(script.replace(HOME, str(folder / "home")))
        file.chmod(0o700)
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        with open(folder / "serial-port.log", "wb") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", str(file)],
                env={"PATH": path, MARK: str(folder), "LANG": "C.UTF-8"},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_off(self) -> bool:
        """Whether it has switched itself off."""
        return (self.folder / "off").exists()

    def output(self) -> str:
        """What its boot has written."""
        return (self.folder / "serial-port.log").read_text(errors="replace")

    def end(self) -> None:
        """Cut its power: nothing of it is left. Safe to call twice."""
        for _ in range(20):
            found = self.processes()
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not found:
                break
            time.sleep(0.02)
        self._process.wait(10)
        for name in ("home", "bin"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def processes(self) -> list[int]:
        """Everything that runs on it."""
        mark, found = f"{MARK}={self.folder}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found
