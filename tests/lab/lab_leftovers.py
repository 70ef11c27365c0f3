"""Leftovers of a lab on the machine, and their removal, whichever process died.

Rule 1. A lab is a number. Everything it makes on the machine carries that number, or is written down in its folder
        before it is made.
Rule 2. Whoever holds the lock of a number owns the lab; the kernel lets go of it when the owner dies.
Rule 3. Removing may be done twice, and by anybody who holds the lock: the owner, the janitor that waits for the
        owner's death, or the next lab.

Run as a program with a number, this is the janitor. It needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BASE = Path("/run/gridlab")
LABS = 200
PATIENCE_S = 10.0


def folder_of(number: int) -> Path:
    """Where a lab keeps its files: a tmpfs of its own."""
    return BASE / str(number)


def bridge_of(number: int) -> str:
    return f"lab{number}"


def cable_of(number: int, index: int) -> str:
    """The bridge's end of a host's cable."""
    return f"lab{number}h{index}"


def claim() -> tuple[int, int]:
    """A number nobody uses, and the descriptor that holds its lock; what dead owners left is removed first."""
    sweep()
    for number in range(LABS):
        lock = take(number)
        if lock is not None:
            remove(number)
            return number, lock
    raise RuntimeError(f"all {LABS} labs are in use")


def sweep() -> None:
    """Remove every lab whose owner is dead."""
    for path in sorted(BASE.glob("*.lock")):
        lock = take(int(path.stem)) if path.stem.isdigit() else None
        if lock is not None:
            remove(int(path.stem))
            give_back(int(path.stem), lock)


def take(number: int, *, wait: bool = False) -> int | None:
    """The lock of a number, or None while somebody else holds it."""
    path = BASE / f"{number}.lock"
    for _ in range(100):
        BASE.mkdir(mode=0o755, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the folder went away with the last lab
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:  # its last holder took it away while we waited
            pass
        os.close(lock)
    return None


def give_back(number: int, lock: int) -> None:
    """Let go of a number whose lab is removed."""
    with contextlib.suppress(OSError):
        (BASE / f"{number}.lock").unlink()
    os.close(lock)
    with contextlib.suppress(OSError):
        BASE.rmdir()


def remove(number: int) -> None:
    """End every process of a lab and take down its links, mounts, control groups and files. Twice is no error."""
    folder = folder_of(number)
    listed = folder / "groups"
    groups = [Path(line) for line in listed.read_text().splitlines()] if listed.exists() else []
    for group in groups:
        empty(group)
    for link in _links(number):
        subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
    for place in sorted(_mounts_below(folder), reverse=True):
        subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
    for group in groups:
        drop(group)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def empty(group: Path) -> None:
    """Kill everything in a control group and below, and wait until it is gone."""
    until = time.monotonic() + PATIENCE_S
    while pids := [*_pids(group)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise TimeoutError(f"{group} still holds {pids}")
        time.sleep(0.005)


def drop(group: Path) -> None:
    """Remove an empty control group and what is below it; the kernel may need a moment to see that it is empty."""
    until = time.monotonic() + PATIENCE_S
    for path, _, _ in [*os.walk(group, topdown=False)]:
        while True:
            try:
                os.rmdir(path)
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.005)


def _pids(group: Path) -> Iterator[int]:
    for path, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            for line in Path(path, "cgroup.procs").read_text().split():
                if int(line) > 0 and _lives(int(line)):
                    yield int(line)


def _lives(pid: int) -> bool:
    """A zombie is dead: it waits for its parent, which may be the one who waits here."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _links(number: int) -> list[str]:
    bridge = bridge_of(number)
    there = os.listdir("/sys/class/net")
    return [name for name in there if name.startswith(f"{bridge}h")] + [name for name in there if name == bridge]


def _mounts_below(folder: Path) -> list[str]:
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if place == str(folder) or place.startswith(f"{folder}/")]


def main(number: int) -> None:
    """Wait until the owner closes our standard input, dead or alive, and remove what is left of its lab."""
    while os.read(0, 64):
        pass
    if not (BASE / f"{number}.lock").exists():
        return
    lock = take(number, wait=True)
    if lock is not None:
        remove(number)
        give_back(number, lock)


if __name__ == "__main__":
    main(int(sys.argv[1]))
