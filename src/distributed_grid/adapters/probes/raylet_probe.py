"""Raylet probe: which processes of this machine are nodes of Ray, by the program they run and not by their name."""

from __future__ import annotations

import os
from collections.abc import Iterator

RAYLET_PROGRAM = "/ray/core/src/ray/raylet/raylet"  # where every installed Ray has it


def is_raylet(pid: int, besides: str = "") -> bool:
    """Whether a process runs the raylet of an installed Ray, not below the path `besides`.

    What a process calls itself says nothing. The Ray belongs to root or to this user, or whoever runs it cannot change
    it. A process of another user shows its program to root only.
    """
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        found, runner = os.stat(f"/proc/{pid}/exe"), os.stat(f"/proc/{pid}").st_uid
    except OSError:  # ended, or another user's
        return False
    if besides and program.startswith(os.path.join(os.path.realpath(besides), "")):
        return False
    is_trusted = found.st_uid in (0, os.geteuid()) or found.st_uid != runner
    return program.endswith(RAYLET_PROGRAM) and is_trusted and not found.st_mode & 0o002


def find_raylets() -> Iterator[int]:
    """The pids of all that run on this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and is_raylet(int(name)))
