"""Processes of a test, found by a folder that only it uses; and their end, should a test run be interrupted.

`python -I -S processes.py FOLDER` is the janitor of a test run: it waits until its standard input is closed, which
happens however the run ends, and then ends whatever still uses the run's temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

ROUNDS = 50
PAUSE_SECONDS = 0.1


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_naming(text: str) -> list[int]:
    """Processes with this text in their command line or environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        said = b""
        with contextlib.suppress(OSError):
            for part in ("cmdline", "environ"):
                with open(f"/proc/{name}/{part}", "rb") as file:
                    said += file.read()
        if text.encode() in said and is_running(int(name)):
            found.append(int(name))
    return found


def processes_using(folder: str) -> list[int]:
    """Processes that name this folder, or have a file in it open, as a memory server has its log."""
    found = set(processes_naming(folder))
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                files = (os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd"))
                if any(file.startswith(f"{folder}/") for file in files):
                    found.add(int(name))
    return sorted(found)


def main(folder: str) -> None:
    """Wait for the end of the test run, then end what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run = os.getppid()
    sys.stdin.buffer.read()
    for _ in range(ROUNDS):
        left = [pid for pid in processes_using(folder) if pid != run]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
