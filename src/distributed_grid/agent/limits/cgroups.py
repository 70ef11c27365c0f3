"""Control groups (cgroup v1 and v2) below the group of this process.

`probe_controllers` makes a group and joins it before it calls a controller usable. Only groups whose names start with
`grid-` are written to or removed, except that in version 2 our own group is asked to delegate its controllers.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

from distributed_grid.posix.private_files import read_all

PREFIX = "grid-"


def group_name(attempt_id: str, shim_pid: int) -> str:
    """Name of an attempt's groups; another grid may use the same attempt id."""
    return f"{PREFIX}{attempt_id}.{shim_pid}"


class Controller(NamedTuple):
    """Where groups with one controller (memory or cpu) can be made."""

    version: int
    base: str


class Controllers(NamedTuple):
    """Controllers that this user may use on this machine."""

    memory: Controller | None = None
    cpu: Controller | None = None


def probe_controllers() -> Controllers:
    """Controllers that work here; leaves nothing behind."""
    groups = own_groups(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo"))
    return Controllers(_usable("memory", groups), _usable("cpu", groups))


def own_groups(own: str, mounts: str) -> dict[str, Controller]:
    """Controller name ("" for version 2) to this process's own group, from the texts of /proc/self."""
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    groups: dict[str, Controller] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mountpoint = before.split()[3:5]
        filesystem, _, options = after.split()[:3]
        mounted = options.split(",") if filesystem == "cgroup" else [""] if filesystem == "cgroup2" else []
        for name in mounted:
            path = paths.get(name, "/..")
            inside = root == "/" or path == root or path.startswith(root + "/")
            if inside and "/.." not in path:
                below = path if root == "/" else path[len(root) :]
                groups.setdefault(name, Controller(2 if name == "" else 1, (mountpoint + below).rstrip("/")))
    return groups


def _usable(name: str, groups: dict[str, Controller]) -> Controller | None:
    if name in groups:
        candidates = [groups[name]]
    elif "" in groups:
        # A version 2 group with processes in it cannot delegate controllers, so its parent is next in line.
        own = groups[""]
        candidates = [own, Controller(2, own.base.rpartition("/")[0])]
        with contextlib.suppress(OSError):
            _write(f"{own.base}/cgroup.subtree_control", f"+{name}")
    else:
        return None
    return next((controller for controller in candidates if _works(controller, name)), None)


_LIMIT_FILE = {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("cpu", 1): "cpu.shares",
    ("cpu", 2): "cpu.weight",
}


def _works(controller: Controller, name: str) -> bool:
    group = Cgroup(controller.version, f"{controller.base}/{PREFIX}probe-{os.getpid()}-{name}")
    try:
        group.make()
    except OSError:
        return False
    try:
        if not os.access(f"{group.path}/{_LIMIT_FILE[name, controller.version]}", os.W_OK):
            return False
        pid = os.fork()
        if pid == 0:
            try:
                group.join()
                os._exit(0)
            except OSError:
                os._exit(1)
        return os.waitpid(pid, 0)[1] == 0
    finally:
        group.remove()


class Cgroup:
    """One group, for one attempt."""

    def __init__(self, version: int, path: str) -> None:
        self.version = version
        self.path = path

    def make(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path)

    def limit_memory(self, limit_bytes: int) -> None:
        """Let its processes together never hold more than that; the kernel kills one that asks for more."""
        if self.version == 1:
            _write(f"{self.path}/memory.limit_in_bytes", str(limit_bytes))
            self._try("memory.memsw.limit_in_bytes", str(limit_bytes))
        else:
            _write(f"{self.path}/memory.max", str(limit_bytes))
            self._try("memory.swap.max", "0")
            self._try("memory.oom.group", "1")

    def raise_memory_limit(self, limit_bytes: int) -> None:
        """Let its processes hold more than until now; the limit with swap is never below the one without."""
        if self.version == 1:
            self._try("memory.memsw.limit_in_bytes", str(limit_bytes))
            self._try("memory.limit_in_bytes", str(limit_bytes))
        else:
            self._try("memory.max", str(limit_bytes))

    def weigh_cpu(self, weight: int) -> None:
        """Its share where cores are contended; 1024 is the default of a group."""
        if self.version == 1:
            _write(f"{self.path}/cpu.shares", str(max(2, weight)))
        else:
            _write(f"{self.path}/cpu.weight", str(min(10_000, max(1, round(weight * 100 / 1024)))))

    def _try(self, name: str, value: str) -> None:
        try:
            _write(f"{self.path}/{name}", value)
        except OSError:  # not every kernel has it
            pass

    def join(self) -> None:
        _write(f"{self.path}/cgroup.procs", "0")

    def add(self, pid: int) -> None:
        """Put a process in; nothing happens where that is not possible."""
        try:
            _write(f"{self.path}/cgroup.procs", str(pid))
        except OSError:  # ended, or not ours to move
            pass

    def members(self) -> list[int]:
        return [int(pid) for path in self._paths() for pid in _read(f"{path}/cgroup.procs").split()]

    def _paths(self) -> list[str]:
        """It and all groups below it, parents first."""
        return [path for path, _, _ in os.walk(self.path)]

    def release(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            _write(f"{self.path.rpartition('/')[0]}/cgroup.procs", str(pid))

    def kills(self) -> int:
        """Number of its processes that the kernel killed at the limit."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return _field(_read(f"{self.path}/{name}"), "oom_kill")

    def held_and_file_bytes(self) -> tuple[int, int]:
        """Memory its processes hold that could not simply be dropped, and the mapped contents of files, which could."""
        text = _read(f"{self.path}/memory.stat")
        if self.version == 1:
            held = _field(text, "total_rss") + _field(text, "total_shmem")
            mapped, shared = _field(text, "total_mapped_file"), _field(text, "total_shmem")
        else:
            held = _field(text, "anon") + _field(text, "shmem")
            mapped, shared = _field(text, "file_mapped"), _field(text, "shmem")
        return held, max(mapped - shared, 0)

    def remove(self) -> bool:
        """Remove it once it is empty; dead processes take a moment to leave. False when it is still in use."""
        for pause_ms in (0, 1, 2, 5, 10, 20, 50, 100, 200):
            time.sleep(pause_ms / 1000)
            try:
                for path in reversed(self._paths()):
                    os.rmdir(path)
            except FileNotFoundError:
                return True
            except OSError:
                continue
            return True
        return False


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        return read_all(fd).decode()
    except OSError:  # the group went away in between
        return ""
    finally:
        os.close(fd)


def _write(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
