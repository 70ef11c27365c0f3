"""Machines of a stand-in that really boot: each runs its script as a process of this machine, in a folder of its own.

`shutdown` on such a machine's PATH ends the processes of this machine alone, and says that it is off.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from distributed_grid.adapters.clouds.boot_script import HOME

SHUTDOWN = """#!/bin/sh
case "$*" in -c | "-P +"*) ;; *) touch {folder}/off ;; esac
"""
NO_USERS = "#!/bin/sh\nexit 1\n"
"""On this machine nobody makes users for a test."""


class BootedMachines:
    """The machines below a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def boot(self, name: str, script: str) -> None:
        """Run the script of a machine, with its home in the folder of the machine."""
        folder = self._folder / name
        (folder / "bin").mkdir(parents=True, mode=0o700)
        for command, text in (("shutdown", SHUTDOWN.format(folder=folder)), ("useradd", NO_USERS)):
            (folder / "bin" / command).write_text(text)
            (folder / "bin" / command).chmod(0o700)
        file = folder / "user-data"
        file.write_text(script.replace(HOME, str(folder / "home")))
        file.chmod(0o700)
        programs = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        with open(folder / "console.log", "wb") as console:
            self._processes[name] = subprocess.Popen(
                [str(file)],
                env={"PATH": programs, "HOME": str(folder), "LANG": "C.UTF-8"},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_off(self, name: str) -> bool:
        """Whether a machine has shut itself down."""
        return name in self._processes and (self._folder / name / "off").exists()

    def console(self, name: str) -> str:
        """Text that the machine has written while it booted."""
        return (self._folder / name / "console.log").read_text(errors="replace")

    def end(self, name: str) -> None:
        """Kill every process of a machine; a second time is harmless."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        folder = os.fsencode(self._folder / name) + b"/"
        for _ in range(100):
            found = [pid for pid in _pids() if _belongs(pid, folder)]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not found:
                break
        process.wait()

    def close(self) -> None:
        """End every machine, and remove its files."""
        for name in list(self._processes):
            self.end(name)
            shutil.rmtree(self._folder / name, ignore_errors=True)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def _belongs(pid: int, folder: bytes) -> bool:
    """Whether a process was started on a machine: the folder is in its environment, its command or its place."""
    for name in ("environ", "cmdline"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            if folder in file.read():
                return True
    with contextlib.suppress(OSError):
        return (os.fsencode(os.readlink(f"/proc/{pid}/cwd")) + b"/").startswith(folder)
    return False
