"""Needed files: what a process needs outside of its working directory, and which of such files a machine lacks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence

from distributed_grid.agent.offloading.proc_entries import ProcDetails
from distributed_grid.domain.processes import MAX_PATHS

SYSTEM_FOLDERS = (
    "/usr/",
    "/lib",
    "/bin/",
    "/sbin/",
    "/etc/",
    "/proc/",
    "/sys/",
    "/dev/",
    "/run/",
    "/var/lib/",
    "/boot/",
)


class NeededFiles:
    """Finds what processes need; the size of each file is asked for once."""

    def __init__(self) -> None:
        self._sizes: dict[str, int | None] = {}

    def find(self, first: ProcDetails, members: Sequence[ProcDetails]) -> tuple[tuple[str, int], ...]:
        """The program of the root, then what its command names, what is open, and of mapped files one in each folder.

        Of a program of the system only the path is needed, whatever its size."""
        cwd = first.cwd
        found: dict[str, int] = {}
        if first.exe and not is_below(first.exe, cwd):
            size = self._size(first.exe)
            found[first.exe] = size if size is not None and not _is_system(first.exe) else 0
        for word in first.argv:
            for path in _named_paths(word, cwd):
                self._add(found, path, cwd)
        for one in members:
            for file in one.files:
                if not file.writes:
                    self._add(found, file.path, cwd)
        folders: set[str] = set()
        for one in members:
            for mapping in one.mappings:
                folder = mapping.path.rpartition("/")[0]
                if folder not in folders and not _is_system(mapping.path) and not mapping.is_shared_writable:
                    folders.add(folder)
                    self._add(found, mapping.path, cwd)
            if len(found) >= MAX_PATHS:
                break
        return tuple(found.items())[:MAX_PATHS]

    def _add(self, found: dict[str, int], path: str, cwd: str) -> None:
        if path in found or len(found) >= MAX_PATHS or _is_system(path) or is_below(path, cwd):
            return
        size = self._size(path)
        if size is not None:
            found[path if size >= 0 else path.rstrip("/") + "/"] = max(size, 0)

    def _size(self, path: str) -> int | None:
        if path not in self._sizes:
            self._sizes[path] = file_size(path)
        return self._sizes[path]


def file_size(path: str) -> int | None:
    """The size of a regular file, -1 of a directory, None of anything else and where there is nothing."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(found.st_mode):
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def missing_files(files: Iterable[tuple[str, int]]) -> list[str]:
    """Those of these files that are not here, or have another size. A size of 0 is any; a path that ends with a slash
    is a directory."""
    missing = []
    for path, size in files:
        there = file_size(path) if path.startswith("/") else None
        if there is None or (there < 0) != path.endswith("/") or (size and there != size):
            missing.append(path)
    return missing


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or in it; nothing counts as below the root directory."""
    return folder != "/" and (path == folder or path.startswith(folder + "/"))


def _named_paths(word: str, cwd: str) -> Iterable[str]:
    """The paths that a word of a command may name, itself or as the value of an option."""
    for part in (word, word.partition("=")[2]):
        if part and "/" in part and "://" not in part and len(part) < 4096 and not part.startswith("-"):
            yield os.path.normpath(os.path.join(cwd, part))


def _is_system(path: str) -> bool:
    return path.startswith(SYSTEM_FOLDERS)
