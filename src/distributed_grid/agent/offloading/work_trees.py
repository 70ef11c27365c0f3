"""Trees of work: which processes are the roots of pieces of work, which parents wait for them, which files they need.

A root is a process whose parent only hosts sessions (init, sshd, tmux, an interactive shell, ...), is another user's,
or is in another session while the process leads its own. Every other process belongs to the tree of its parent.
Processes that host sessions are no work themselves.

A living parent counts as waiting for its child, because waiting cannot be seen. Three kinds of parent do not wait: init
and other processes that only adopt orphans; a parent whose child is in a session that neither of them leads or shares,
which shows that it was adopted; and an interactive shell whose child runs in its background. Systemd waits for the
process of a unit.

The files that a tree needs are those outside of its working directory, of which another machine may lack some, and
those inside that look like secrets, which are not shipped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from distributed_grid.agent.offloading.proc_entries import ProcDetails, ProcRow
from distributed_grid.domain.processes import MAX_PATHS
from distributed_grid.trees.secret_files import is_secret, is_withheld

SHELLS = frozenset({"bash", "sh", "zsh", "fish", "dash", "ksh", "mksh", "tcsh", "csh", "ash", "xonsh", "nu"})
SESSION_HOSTS = frozenset(
    {
        "sshd",
        "sshd-session",
        "login",
        "systemd",
        "init",
        "(sd-pam)",
        "tmux: server",
        "tmux",
        "screen",
        "SCREEN",
        "dtach",
    }
)
ADOPTERS = frozenset(
    {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "conmon", "containerd-shim", "runit"}
)
"""Programs that start or adopt processes, and wait only for their own; a unit of systemd is a case of its own."""
SUPERVISORS = frozenset({"supervisord", "runsv", "s6-supervise", "supervise", "monit", "circusd", "pm2"})
SESSION_UNITS = ("ssh.service", "sshd.service", "ssh@", "sshd@", "user@", "session-", "getty@", "serial-getty@")
_FILE_OPTIONS = frozenset({"--rcfile", "--init-file"})
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


def is_interactive_shell(name: str, argv: Sequence[str], stdin: str) -> bool:
    """True for a shell that a person types at: no script, no `-c`, and a terminal to read from."""
    if name.lstrip("-") not in SHELLS or not stdin.startswith(("/dev/pts/", "/dev/tty")):
        return False
    words = iter(argv[1:])
    for word in words:
        if word in _FILE_OPTIONS:
            next(words, None)
        elif not word.startswith(("-", "+")) or (not word.startswith("--") and "c" in word):
            return False
    return True


def lineage(row: ProcRow, table: Mapping[int, ProcRow]) -> Iterator[ProcRow]:
    """A process, its parent, the parent of that, and so on, as far as the table has them."""
    seen: set[int] = set()
    member: ProcRow | None = row
    while member is not None and member.pid not in seen:
        yield member
        seen.add(member.pid)
        member = table.get(member.ppid)


class WorkForest:
    """The processes of one moment, divided into trees of work.

    `is_typed_at` says whether a process is an interactive shell, `unit_of` the systemd unit it is in.
    """

    def __init__(
        self,
        table: Mapping[int, ProcRow],
        uid: int,
        left_out: Callable[[ProcRow], bool],
        is_typed_at: Callable[[ProcRow], bool],
        unit_of: Callable[[int], str],
    ) -> None:
        self._table = table
        self._uid = uid
        self._is_typed_at = is_typed_at
        self._unit_of = unit_of
        self.children: dict[int, list[ProcRow]] = {}
        for row in table.values():
            self.children.setdefault(row.ppid, []).append(row)
        self._hosts: dict[int, bool] = {}
        self._own = {
            pid: row
            for pid, row in table.items()
            if row.uid == uid and not row.is_kernel and not row.is_dead and pid != 1 and not left_out(row)
        }

    def roots(self) -> list[ProcRow]:
        return [row for row in self._own.values() if self._is_root(row)]

    def _is_root(self, row: ProcRow) -> bool:
        if self.hosts_sessions(row):
            return False
        parent = self._own.get(row.ppid)
        if parent is None or self.hosts_sessions(parent):
            return True
        return row.pid == row.session != parent.session

    def hosts_sessions(self, row: ProcRow) -> bool:
        """True if the children of a process are pieces of work of their own, and it is none itself."""
        if row.pid not in self._hosts:
            is_shell = row.name.lstrip("-") in SHELLS
            self._hosts[row.pid] = row.name in SESSION_HOSTS or (is_shell and self._is_typed_at(row))
        return self._hosts[row.pid]

    def tree(self, root: ProcRow, *, whole: bool) -> list[ProcRow]:
        """The root and what descends from it, parents first; where it need not be `whole`, without what is a root
        itself. Processes of other users are part of it."""
        members, waiting = [root], [root.pid]
        seen = {root.pid}
        while waiting:
            for row in self.children.get(waiting.pop(), ()):
                if row.pid in seen or row.is_dead or (not whole and row.pid in self._own and self._is_root(row)):
                    continue
                seen.add(row.pid)
                members.append(row)
                waiting.append(row.pid)
        return members

    def waiting_parent(self, row: ProcRow) -> str:
        """The process that waits for this one, in words; empty where none does."""
        parent = self._table.get(row.ppid)
        if parent is None:
            return "" if row.ppid <= 1 else f"process {row.ppid} of another user"
        if parent.name == "systemd":
            unit = self._unit_of(row.pid)
            is_service = unit.endswith(".service") and not unit.startswith(SESSION_UNITS)
            return f"systemd, as {unit}" if is_service else ""
        name = f"{parent.name} (pid {parent.pid})"
        if parent.name in SUPERVISORS:
            return name
        was_adopted = row.session not in (row.pid, parent.session)
        if parent.pid == 1 or parent.name.startswith(tuple(ADOPTERS)) or was_adopted:
            return ""
        if parent.name.lstrip("-") in SHELLS and self._is_typed_at(parent):
            return name + ", in whose foreground it runs" if row.group == row.foreground else ""
        return name


class NeededFiles:
    """Finds what processes need; the size of each file is asked for once."""

    def __init__(self) -> None:
        self._sizes: dict[str, int | None] = {}

    def find(self, first: ProcDetails, members: Sequence[ProcDetails]) -> tuple[tuple[str, int], ...]:
        """The program of the root, the files that its command names, open files, and of mapped files one per folder.

        A program of the system is needed by its path alone, with any size."""
        cwd = first.cwd
        needed: dict[str, int] = {}
        if first.exe and not is_below(first.exe, cwd):
            size = 0 if _is_system(first.exe) else self._size(first.exe)
            needed[first.exe] = max(size or 0, 0)  # a directory: the program is in another mount namespace
        for word in first.argv:
            for part in _parts(word):
                if "/" in part:
                    self._add(needed, os.path.normpath(os.path.join(cwd, part)), cwd)
        for member in members:
            for file in member.files:
                if not file.writes:
                    self._add(needed, file.path, cwd)
        folders: set[str] = set()
        for member in members:
            for mapping in member.mappings:
                folder = mapping.path.rpartition("/")[0]
                if folder not in folders and not _is_system(mapping.path) and not mapping.is_shared_writable:
                    folders.add(folder)
                    self._add(needed, mapping.path, cwd)
            if len(needed) >= MAX_PATHS:
                break
        return tuple(needed.items())[:MAX_PATHS]

    def _add(self, needed: dict[str, int], path: str, cwd: str) -> None:
        if path in needed or len(needed) >= MAX_PATHS or _is_system(path) or is_below(path, cwd):
            return
        size = self._size(path)
        if size is not None:
            needed[path if size >= 0 else path.rstrip("/") + "/"] = max(size, 0)

    def _size(self, path: str) -> int | None:
        if path not in self._sizes:
            self._sizes[path] = file_size(path)
        return self._sizes[path]


def needed_secrets(first: ProcDetails, members: Sequence[ProcDetails]) -> Iterator[str]:
    """Paths in the working directory of a tree's root that look like secrets, so they are not shipped, and that the
    tree has open or mapped, or that the command of the root names."""
    cwd = first.cwd
    paths = dict.fromkeys(os.path.normpath(os.path.join(cwd, part)) for word in first.argv for part in _parts(word))
    for member in members:
        paths |= dict.fromkeys([*(file.path for file in member.files), *(mapping.path for mapping in member.mappings)])
    for path in paths:
        inside = os.fsencode(path[len(cwd) + 1 :]) if is_below(path, cwd) else b""
        if inside and is_secret(inside, is_directory=False) and is_withheld(cwd, inside) and os.path.lexists(path):
            yield os.fsdecode(inside)


def file_size(path: str) -> int | None:
    """The size of a regular file, -1 of a directory, None of anything else and where there is nothing."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(status.st_mode):
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else None


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
    """True if a path is a folder or in it; nothing counts as below the root directory."""
    return folder != "/" and (path == folder or path.startswith(folder + "/"))


def _parts(word: str) -> Iterable[str]:
    """Possible paths in a word of a command: the word itself, and the value of an option."""
    for part in (word, word.partition("=")[2]):
        if part and "://" not in part and len(part) < 4096 and not part.startswith("-"):
            yield part


def _is_system(path: str) -> bool:
    return path.startswith(SYSTEM_FOLDERS)
