"""State directory of a grid: its paths on this machine, with a subdirectory per host because a home may be shared.

Every command loads this module, so it imports little: the files of a warm command are texts, the others are paths that
are made on demand.
"""

from __future__ import annotations

import os

from distributed_grid.errors import GridError

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from pathlib import Path

NO_CONFIG = "none"
"""The name of no cluster file (`--config none`): the grid of this machine alone."""


class StateDir:
    """The files of one state directory on this machine."""

    def __init__(self, state_dir: str | os.PathLike[str] | None = None) -> None:
        chosen = state_dir or os.environ.get("GRID_STATE_DIR") or "~/.distributed_grid"
        self._root = os.path.abspath(os.path.expanduser(chosen))
        self._host_dir = os.path.join(self._root, "hosts", machine_id())
        self.socket = os.path.join(self._host_dir, "grid.sock")
        self.lock = os.path.join(self._host_dir, "daemon.lock")
        self.cluster_file = os.path.join(self._root, "cluster.yaml")

    @property
    def root(self) -> Path:
        return _path(self._root)

    @property
    def host_dir(self) -> Path:
        return _path(self._host_dir)

    @property
    def database(self) -> Path:
        return self.host_dir / "grid.db"

    @property
    def log(self) -> Path:
        return self.host_dir / "daemon.log"

    @property
    def failure_report(self) -> Path:
        """Report of the last failure that ended a daemon."""
        return self.host_dir / "failure.txt"

    @property
    def jobs(self) -> Path:
        return self.host_dir / "jobs"

    @property
    def unwaited_jobs(self) -> Path:
        """The detached jobs whose end no command has shown yet."""
        return self.host_dir / "unwaited_jobs"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    def create(self) -> None:
        """Create the directories, accessible by their owner only; one that belongs to another user is refused."""
        try:
            self.host_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            for directory in (self.root, self.root / "hosts", self.host_dir):
                _make_private(directory)
        except OSError as failure:
            raise GridError(f"cannot use the state directory {self.root}: {failure.strerror}") from failure

    def is_locked(self) -> bool:
        """True if a control plane runs: some process holds the lock."""
        try:
            lock = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        from distributed_grid.posix.private_files import try_lock

        try:
            return not try_lock(lock, exclusive=False)
        finally:
            os.close(lock)


def _path(text: str) -> Path:
    from pathlib import Path

    return Path(text)


def _make_private(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise GridError(f"the state directory {directory} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def machine_id() -> str:
    """A name for this machine that is safe as a file name."""
    for source in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(source) as file:
                name = file.read().strip()
        except OSError:
            continue
        if name.isalnum():
            return name[:32]
    return "".join(letter if letter.isalnum() else "-" for letter in os.uname().nodename)[:63] or "host"
