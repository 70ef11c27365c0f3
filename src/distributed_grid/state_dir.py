"""State directory of a grid: its paths on this machine, with a subdirectory per host because a home may be shared.

Imports only the standard library: every command loads this module.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from distributed_grid.errors import GridError
from distributed_grid.posix.private_files import try_lock


class StateDir:
    """The files of one state directory on this machine."""

    def __init__(self, state_dir: str | os.PathLike[str] | None = None) -> None:
        chosen = state_dir or os.environ.get("GRID_STATE_DIR") or "~/.distributed_grid"
        self.root = Path(os.path.abspath(os.path.expanduser(chosen)))
        self.host_dir = self.root / "hosts" / machine_id()
        self.database = self.host_dir / "grid.db"
        self.lock = self.host_dir / "daemon.lock"
        self.socket = self.host_dir / "grid.sock"
        self.log = self.host_dir / "daemon.log"
        self.jobs = self.host_dir / "jobs"
        self.reports = self.root / "reports"
        self.cluster_file = self.root / "cluster.yaml"

    def create(self) -> None:
        """Create the directories, accessible by their owner only; one that belongs to another user is refused."""
        try:
            self.host_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            for directory in (self.root, self.root / "hosts", self.host_dir):
                _make_private(directory)
        except OSError as failure:
            raise GridError(f"cannot use the state directory {self.root}: {failure.strerror}") from failure

    def is_locked(self) -> bool:
        """Whether a control plane runs: some process holds the lock."""
        try:
            lock = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not try_lock(lock, exclusive=False)
        finally:
            os.close(lock)


def _make_private(directory: Path) -> None:
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise GridError(f"the state directory {directory} belongs to another user (uid {found.st_uid})")
    if found.st_mode & 0o077:
        directory.chmod(0o700)


def machine_id() -> str:
    """A name for this machine that is safe as a file name."""
    for source in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            found = Path(source).read_text().strip()
            if found.isalnum():
                return found[:32]
    return "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())[:63] or "host"
