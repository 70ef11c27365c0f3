"""Which processes are the roots of pieces of work, and which parents wait for them.

A root is a process whose parent only hosts sessions (init, sshd, tmux, an interactive shell, ...), is another user's,
or is in another session while the process leads its own. Every other process belongs to the tree of its parent.
Processes that host sessions are no work themselves.

A parent that is alive is taken to wait for its child, for nobody can see whether it does. It does not where it is init
or another process that only adopts orphans; where the child is in a session that neither it nor this parent leads or
shares, which shows that it was adopted; and where it is an interactive shell and the child runs in its background: such
a shell goes on whatever becomes of it. What a unit of systemd runs is waited for by systemd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distributed_grid.agent.offloading.proc_entries import ProcRow

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
"""They start or adopt, and wait for nothing that was not theirs from the beginning; a unit of systemd is told apart."""
SUPERVISORS = frozenset({"supervisord", "runsv", "s6-supervise", "supervise", "monit", "circusd", "pm2"})
SESSION_UNITS = ("ssh.service", "sshd.service", "ssh@", "sshd@", "user@", "session-", "getty@", "serial-getty@")
_FILE_OPTIONS = frozenset({"--rcfile", "--init-file"})


def is_interactive_shell(name: str, argv: Sequence[str], stdin: str) -> bool:
    """Whether this is a shell at which somebody types: no script, no `-c`, and a terminal to read from."""
    if name.lstrip("-") not in SHELLS or not stdin.startswith(("/dev/pts/", "/dev/tty")):
        return False
    words = iter(argv[1:])
    for word in words:
        if word in _FILE_OPTIONS:
            next(words, None)
        elif not word.startswith(("-", "+")) or (not word.startswith("--") and "c" in word):
            return False
    return True


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
        """The roots of all pieces of work of this user."""
        return [row for row in self._own.values() if self._is_root(row)]

    def _is_root(self, row: ProcRow) -> bool:
        if self.hosts_sessions(row):
            return False
        parent = self._own.get(row.ppid)
        if parent is None or self.hosts_sessions(parent):
            return True
        return row.pid == row.session != parent.session

    def hosts_sessions(self, row: ProcRow) -> bool:
        """Whether the children of a process are pieces of work of their own, and it is none itself."""
        if row.pid not in self._hosts:
            is_shell = row.name.lstrip("-") in SHELLS
            self._hosts[row.pid] = row.name in SESSION_HOSTS or (is_shell and self._is_typed_at(row))
        return self._hosts[row.pid]

    def tree(self, root: ProcRow, *, whole: bool) -> list[ProcRow]:
        """The root and what descends from it, parents first; where it need not be `whole`, without what is a root
        itself. Processes of other users are part of it."""
        found, waiting = [root], [root.pid]
        seen = {root.pid}
        while waiting:
            for row in self.children.get(waiting.pop(), ()):
                if row.pid in seen or row.is_dead or (not whole and row.pid in self._own and self._is_root(row)):
                    continue
                seen.add(row.pid)
                found.append(row)
                waiting.append(row.pid)
        return found

    def ancestors(self, row: ProcRow) -> list[ProcRow]:
        """Its parent, the parent of that, and so on, as far as they can be seen."""
        found: list[ProcRow] = []
        seen = {row.pid}
        parent = self._table.get(row.ppid)
        while parent is not None and parent.pid not in seen:
            seen.add(parent.pid)
            found.append(parent)
            parent = self._table.get(parent.ppid)
        return found

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
