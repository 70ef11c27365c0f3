"""Control groups, version 1 or 2, below the group this process is in: made, used and removed without a trace.

Rule 1. Nothing is assumed: `probe` makes a group, joins it, and only then calls a controller usable.
Rule 2. A group's name starts with `grid-`; no other is ever written to or removed, except that our own group
        is asked, in version 2, to hand its controllers down.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from distributed_grid.posix.private_files import read_all

PREFIX = "grid-"


class Controller(NamedTuple):
    """Where groups with one controller (memory or cpu) can be made."""

    version: int
    base: str


class Controllers(NamedTuple):
    """What this user may use of control groups on this machine."""

    memory: Controller | None = None
    cpu: Controller | None = None


def probe() -> Controllers:
    """What really works here; leaves nothing behind."""
    places = own_groups(_get("/proc/self/cgroup"), _get("/proc/self/mountinfo"))
    return Controllers(_usable("memory", places), _usable("cpu", places))


def own_groups(own: str, mounts: str) -> dict[str, Controller]:
    """Controller name ("" for version 2) to this process's own group, from the texts of /proc/self."""
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    places: dict[str, Controller] = {}
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
                places.setdefault(name, Controller(2 if name == "" else 1, (mountpoint + below).rstrip("/")))
    return places


def _usable(name: str, places: dict[str, Controller]) -> Controller | None:
    if name in places:
        candidates = [places[name]]
    elif "" in places:
        # A version 2 group with processes in it cannot hand controllers down, so its parent is next in line.
        own = places[""]
        candidates = [own, Controller(2, own.base.rpartition("/")[0])]
        _hand_down(own, name)
    else:
        return None
    return next((place for place in candidates if _works(place, name)), None)


def _hand_down(place: Controller, name: str) -> None:
    try:
        _put(f"{place.base}/cgroup.subtree_control", f"+{name}")
    except OSError:
        pass


_KNOB = {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("cpu", 1): "cpu.shares",
    ("cpu", 2): "cpu.weight",
}


def _works(place: Controller, name: str) -> bool:
    group = Cgroup(place.version, f"{place.base}/{PREFIX}probe-{os.getpid()}-{name}")
    try:
        group.make()
    except OSError:
        return False
    try:
        if not os.access(f"{group.path}/{_KNOB[name, place.version]}", os.W_OK):
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
        """Have it. Making what is there already is not an error."""
        try:
            os.mkdir(self.path)
        except FileExistsError:
            pass

    def limit_memory(self, limit_bytes: int) -> None:
        """Let its processes together never hold more than that; the kernel kills one that asks for more."""
        if self.version == 1:
            _put(f"{self.path}/memory.limit_in_bytes", str(limit_bytes))
            self._try("memory.memsw.limit_in_bytes", str(limit_bytes))
        else:
            _put(f"{self.path}/memory.max", str(limit_bytes))
            self._try("memory.swap.max", "0")
            self._try("memory.oom.group", "1")

    def weigh_cpu(self, weight: int) -> None:
        """Its share where cores are contended; 1024 is what a group has that nobody weighed."""
        if self.version == 1:
            _put(f"{self.path}/cpu.shares", str(max(2, weight)))
        else:
            _put(f"{self.path}/cpu.weight", str(min(10_000, max(1, round(weight * 100 / 1024)))))

    def _try(self, name: str, value: str) -> None:
        try:
            _put(f"{self.path}/{name}", value)
        except OSError:  # not every kernel has it
            pass

    def join(self) -> None:
        """Put the calling process in."""
        _put(f"{self.path}/cgroup.procs", "0")

    def members(self) -> list[int]:
        return [int(pid) for pid in _get(f"{self.path}/cgroup.procs").split()]

    def release(self, pid: int) -> None:
        """Put a process back into the group this one was made in."""
        try:
            _put(f"{self.path.rpartition('/')[0]}/cgroup.procs", str(pid))
        except ProcessLookupError:
            pass

    def kills(self) -> int:
        """How many of its processes the kernel killed because the limit was reached."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return _field(_get(f"{self.path}/{name}"), "oom_kill")

    def held_bytes(self) -> int:
        """Memory its processes hold that could not simply be dropped, as file contents could."""
        text = _get(f"{self.path}/memory.stat")
        if self.version == 1:
            return _field(text, "total_rss") + _field(text, "total_shmem")
        return _field(text, "anon") + _field(text, "shmem")

    def remove(self) -> bool:
        """Be rid of it once it is empty; the dead take a moment to leave. False when it is still in use."""
        for pause_ms in (0, 1, 2, 5, 10, 20, 50, 100, 200):
            time.sleep(pause_ms / 1000)
            try:
                os.rmdir(self.path)
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


def _get(path: str) -> str:
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


def _put(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
