"""The small process that gives each attempt a shim, forked a little ahead of time, and does nothing else.

`python -m distributed_grid.agent.execution.spawner ROOT SOCKET LOCK CGROUPS`: started once by `AttemptHost`, with
everything a shim needs already imported. One packet is one attempt id with one descriptor, the channel on
which the shim tells what happens. A shim that has seen its attempt through may come back for another (`spare.py`).

Rule 1. It ends when its socket does, that is with its agent; the shims go on.
Rule 2. The attempt's lock is taken before it is given to a shim, and travels with it; the host's lock is kept
        until the last is given. Whoever gets the host's lock sees each attempt either locked or never begun.
Rule 3. Of a shim that died before its time, it is the heir: what that shim left behind it kills.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from distributed_grid.agent.execution.prefork import READY, PreforkedShim
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.cgroups import Controllers, probe
from distributed_grid.agent.limits.timer import become_subreaper, hear_signals
from distributed_grid.posix.locks import try_lock

if TYPE_CHECKING:
    import subprocess

PACKET_BYTES = 512
SPARES = 2  # enough that one forks while the other is taken
MOST_SPARES = SPARES + len(os.sched_getaffinity(0))  # of those that come back
REFILL_MS, TROUBLE_MS, CROWDED_MS = 1, 100, 1000


class Spawner:
    """Keeps a few shims waiting, gives each attempt one, and buries them."""

    def __init__(self, root: str, sock: socket.socket, host_lock: int, controllers: Controllers) -> None:
        self.root = root
        self.sock = sock
        self.host_lock = host_lock
        self.controllers = controllers
        self.spares: list[socket.socket] = []
        self.busy: dict[int, socket.socket] = {}
        self.trouble: str | None = None
        self.poll = select.poll()
        self.woken, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        hear_signals()
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)

    def serve(self) -> PreforkedShim | None:
        """Work until the socket ends or a SIGTERM comes; returns None then, and the spare to be in each child."""
        self.poll.register(self.sock, select.POLLIN)
        self.poll.register(self.woken, select.POLLIN)
        while True:
            ready = dict(self.poll.poll(self.patience_ms()))
            for fd in ready.keys() & self.busy.keys():
                self.take_back(fd)
            if self.woken in ready:
                if signal.SIGTERM in os.read(self.woken, 512):
                    return None
                self.bury()
            asked = self.sock.fileno() in ready
            if asked:
                self.spares = [spare for spare in self.spares if _waits(spare)]
            if not ready and len(self.spares) > SPARES:
                self.spares.pop(0).close()  # which ends it
            elif not ready or (asked and not self.spares):
                spare = self.prepare()
                if spare is not None:
                    return spare
            if asked:
                packet, descriptors, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, 1)
                if not packet:
                    return None
                spare = self.launch(packet, descriptors[0])
                if spare is not None:
                    return spare

    def patience_ms(self) -> int | None:
        """How long to wait for something to do before the number of spares is put right; None: for ever."""
        if len(self.spares) < SPARES:
            return TROUBLE_MS if self.trouble else REFILL_MS
        return CROWDED_MS if len(self.spares) > SPARES else None

    def take_back(self, fd: int) -> None:
        """A shim that was given away is ready for another attempt, or gone."""
        self.poll.unregister(fd)
        spare = self.busy.pop(fd)
        try:
            is_ready = spare.recv(1) == READY
        except ConnectionResetError:
            is_ready = False
        if is_ready and len(self.spares) < MOST_SPARES:
            self.spares.append(spare)
        else:
            spare.close()

    def launch(self, attempt_id: bytes, channel: int) -> PreforkedShim | None:
        """Give an attempt its shim; what is locked or has been run already is left alone. Returns as `prepare`."""
        spare = None
        with JobDir(self.root, attempt_id.decode()) as job:
            lock = job.take_lock()
            if lock is not None:
                given = self._give(attempt_id, lock, channel)
                if not given:  # somebody has just killed those that waited
                    spare = self.prepare()
                    given = spare is not None or self._give(attempt_id, lock, channel)
                if not given:
                    _refuse(job, channel, f"could not be started: {self.trouble or 'its shim was killed'}")
                os.close(lock)
        os.close(channel)
        return spare

    def _give(self, attempt_id: bytes, lock: int, channel: int) -> bool:
        while self.spares:
            spare = self.spares.pop()  # the last one used, which has its pages already
            try:
                socket.send_fds(spare, [attempt_id], [lock, channel])
            except (BrokenPipeError, ConnectionResetError):  # somebody killed it while it waited
                spare.close()
                continue
            self.busy[spare.fileno()] = spare
            self.poll.register(spare, select.POLLIN)
            return True
        return False

    def prepare(self) -> PreforkedShim | None:
        """Fork a process that waits for attempts; returns it in the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError as error:  # too many processes
            self.trouble = error.strerror
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for sock in (ours, self.sock, *self.spares, *self.busy.values()):
                sock.close()
            for fd in (self.host_lock, self.woken, self.wake):
                os.close(fd)
            os.setsid()
            become_subreaper()
            return PreforkedShim(self.root, theirs, self.controllers)
        theirs.close()
        if pid > 0:
            self.trouble = None
            self.spares.append(ours)
        else:
            ours.close()
        return None

    def bury(self) -> None:
        """Collect dead shims and whatever else became ours."""
        orphaned = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            orphaned = orphaned or status != 0
        for _ in range(50 if orphaned else 0):
            left = process_tree.below(os.getpid())  # shims carry this process's environment and so are exempt
            if not left:
                return
            process_tree.send_all(left, signal.SIGKILL)
            time.sleep(0.002)


def _waits(spare: socket.socket) -> bool:
    """Whether there still is somebody at the other end."""
    try:
        spare.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    spare.close()
    return False


def _refuse(job: JobDir, channel: int, detail: str) -> None:
    """Record and tell that an attempt could not be started."""
    record = {"kind": "never_started", "detail": detail}
    job.write(job_dir.EXIT, record, durable=True)
    os.write(channel, json.dumps({"ended": record}).encode() + b"\n")


class SpawnerLink:
    """The agent's end: holds the root's lock, and starts, feeds and ends one spawner after another."""

    def __init__(self, root: str, *, use_cgroups: bool) -> None:
        self._root = root
        self._use_cgroups = use_cgroups
        self._lock = -1
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._begun_at = 0.0
        self._short_lives = 0

    def take_root(self) -> bool:
        """Become the root's one host; False while another is, or its spawner still lives."""
        if self._lock < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock = os.open(f"{self._root}/{job_dir.HOST_LOCK}", flags, 0o600)
        return try_lock(self._lock)

    def leave_root(self) -> None:
        os.close(self._lock)
        self._lock = -1

    def begin(self) -> None:
        """Start a spawner: its own session, no descriptor but its own, next to nothing in its environment."""
        import subprocess  # not in the spawner itself: what it does not import, no shim has to carry

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        package_home = __file__.rsplit("/", 4)[0]
        command = [sys.executable, "-P", "-S", "-m", "distributed_grid.agent.execution.spawner", self._root]
        command += [str(theirs.fileno()), str(self._lock), "1" if self._use_cgroups else "0"]
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
        log = os.open(f"{self._root}/.spawner.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=kept | {"GRID_ROLE": "spawner", "PYTHONPATH": package_home},
                pass_fds=(theirs.fileno(), self._lock),
                start_new_session=True,
            )
        os.close(log)
        self._sock = ours
        self._begun_at = time.monotonic()

    def fileno(self) -> int:
        return self._sock.fileno() if self._sock is not None else -1

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def send(self, attempt_id: str, channel: int) -> bool:
        """Hand an attempt over; False when the spawner has too much to do. `OSError` when it is gone."""
        if self._sock is None:
            raise BrokenPipeError
        try:
            socket.send_fds(self._sock, [attempt_id.encode()], [channel])
        except BlockingIOError:
            return False
        return True

    def end(self) -> None:
        """Close the socket, which ends the spawner. Safe twice."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def pause_s(self) -> float:
        """How long to wait before the next one: longer, the more died young in a row."""
        young = time.monotonic() - self._begun_at < 1.0
        self._short_lives = self._short_lives + 1 if young else 0
        return min(5.0, 0.02 * 2**self._short_lives) if young else 0.0


def main() -> None:
    """Serve, as the command line says."""
    root, sock_fd, host_lock, cgroups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    low, high = sorted((sock_fd, host_lock))
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
    for fd in (sock_fd, host_lock):
        os.set_inheritable(fd, False)
    become_subreaper()
    sock = socket.socket(fileno=sock_fd)
    controllers = probe() if cgroups else Controllers()
    spawner = Spawner(root, sock, host_lock, controllers)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page it touches
    gc.disable()
    spare = spawner.serve()
    if spare is not None:
        spare.serve()


if __name__ == "__main__":
    main()
