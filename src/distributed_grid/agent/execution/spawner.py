"""Spawner process: forks shims ahead of time and gives each attempt one.

`python -m distributed_grid.agent.execution.spawner ROOT SOCKET LOCK CGROUPS GRID_LOCK…`, started by `SpawnerClient`
with everything imported that a shim needs; standard library only. One packet is one attempt id with one descriptor,
the channel on which the shim reports. A shim whose attempt has ended may serve another: most of what a short command
costs would otherwise be the fork and the pages that are copied after it.

- The spawner ends when its socket closes, that is with its agent. Running shims go on; waiting ones end, so an
  adopted attempt has a shim to itself.
- The attempt's lock is taken before the attempt is given to a shim, and travels with it. The host's lock is held
  until the last one is given: the next holder of the host's lock sees each attempt either locked or never begun.
- What a shim that died early left behind becomes the spawner's child, and is killed.
- A shim takes the next attempt only when nothing of the last is left (no process, no control group, no limit) and
  the agent has read its end. Until then the agent may pause, move or measure what is below the shim.
- While a hold is pending it keeps a hold watcher (`hold_watcher.py`) running, which outlives it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from functools import partial
from typing import Final, NoReturn

from distributed_grid.agent.execution.hold_watcher import HoldWatcher, is_hold_pending
from distributed_grid.agent.execution.shim import Shim
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir, journal_entry
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.cgroups import Controllers, probe_controllers
from distributed_grid.agent.limits.process_tree import GridProcesses
from distributed_grid.agent.limits.timer import DeadlineTimer, become_subreaper, install_signal_handlers
from distributed_grid.posix.boot_clock import boot_id, boot_ms

BOOT_ID: Final = boot_id()
PACKET_BYTES: Final = 1024  # the longest id of an attempt takes 800
SPARES: Final = 2  # enough that one forks while the other is taken
MAX_SPARES: Final = SPARES + len(os.sched_getaffinity(0))  # of those that come back
REFILL_MS, RETRY_FORK_MS, SHRINK_MS = 1, 100, 1000
WATCHER_RETRY_MS: Final = 1000  # between two hold watchers, should each die at once
MAX_ATTEMPTS: Final = 200  # of one shim, as nothing collects its garbage
READY: Final = b"+"


class PreforkedShim:
    """A shim process that waits on a socket for an attempt id, its lock and its channel from the spawner."""

    def __init__(self, root: str, sock: socket.socket, controllers: Controllers, grid: GridProcesses) -> None:
        self.root = root
        self.sock = sock
        self.controllers = controllers
        self.grid = grid
        self.timer = DeadlineTimer()
        self.identity = self._identity()

    def serve(self) -> NoReturn:
        """Run one attempt after another, until the spawner ends or this process is no longer clean."""
        last = ""
        for left in reversed(range(MAX_ATTEMPTS)):
            attempt_id, descriptors = self._receive()
            if not attempt_id:
                # Put an end on the disk: the agent may have died before it could see to that.
                with contextlib.suppress(OSError, ValueError), JobDir(self.root, last) as job:
                    job.sync_end()
                break
            if not self._run_to_completion(attempt_id, *descriptors) or not left:
                break
            last = attempt_id
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_receive` will notice
                self.sock.send(READY)
        os._exit(0)

    def _receive(self) -> tuple[str, list[int]]:
        """The next attempt, its lock and its channel; nothing when the spawner ended or has enough spares."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, 2)
        except ConnectionResetError:
            return "", []
        return packet.decode(), descriptors

    def _run_to_completion(self, attempt_id: str, lock: int, channel: int) -> bool:
        """Run it; whether there may be another. The lock stays open, and so held, until nothing of it is left."""
        for fd in (lock, channel):
            os.set_inheritable(fd, False)  # unlike those opened here, received ones would go on to the command
        shim = Shim(self.root, attempt_id, lock, channel, self.grid)
        if not shim.run(self.identity, self.timer, self.controllers):
            return False
        # Wait until the channel has no reader: the agent has read the end, or is gone.
        poll = select.poll()
        poll.register(channel, 0)  # an error is reported unasked
        poll.poll()
        os.close(channel)
        os.close(lock)
        self.identity = self._identity()
        return not self.timer.has_received(signal.SIGTERM)

    def _identity(self) -> dict[str, str | int]:
        """Boot, pid and start time identify it; what it has waited for so far was not the next attempt's."""
        me = process_tree.read_process(os.getpid())
        assert me is not None
        return {"boot": BOOT_ID, "pid": me.pid, "start": me.start, "waited_ticks": me.waited_ticks}


class Spawner:
    """Keeps a few shims waiting, gives each attempt one, and reaps them."""

    def __init__(
        self, root: str, sock: socket.socket, host_lock: int, controllers: Controllers, grid: GridProcesses
    ) -> None:
        self.root = root
        self.sock = sock
        self.host_lock = host_lock
        self.controllers = controllers
        self.grid = grid
        self.shims: set[int] = set()  # children not reaped yet: their pids are nobody else's
        self.spares: list[socket.socket] = []
        self.busy: dict[int, socket.socket] = {}
        self.fork_error: str | None = None
        self.watcher = 0  # the pid of the hold watcher
        self.watcher_forked_ms = 0
        self.needs_watcher = True  # to look whether one is needed: attempts of an earlier agent may run
        self.poll = select.poll()
        self.woken, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        install_signal_handlers()
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)

    def serve(self) -> PreforkedShim | HoldWatcher | None:
        """Serve until the socket closes or SIGTERM comes, and return None; in a forked child, return what it is."""
        self.poll.register(self.sock, select.POLLIN)
        self.poll.register(self.woken, select.POLLIN)
        while True:
            ready = dict(self.poll.poll(self.poll_timeout_ms()))
            for fd in ready.keys() & self.busy.keys():
                self.reclaim(fd)
            if self.woken in ready:
                if signal.SIGTERM in os.read(self.woken, 512):
                    return None
                self.reap()
            asked = self.sock.fileno() in ready
            if asked:
                self.spares = [spare for spare in self.spares if _is_waiting(spare)]
            if not ready and len(self.spares) > SPARES:
                self.spares.pop(0).close()  # which ends it
            elif (not ready and len(self.spares) < SPARES) or (asked and not self.spares):
                spare = self.fork_shim()
                if spare is not None:
                    return spare
            if asked:
                packet, descriptors, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, 1)
                if not packet:
                    return None
                spare = self.launch(packet, descriptors[0])
                if spare is not None:
                    return spare
                self.needs_watcher = self.watcher == 0
            if self.needs_watcher:
                watcher = self.fork_watcher()
                if watcher is not None:
                    return watcher

    def poll_timeout_ms(self) -> int | None:
        """How long to wait for something to do before the number of spares is put right, or a watcher is forked; None:
        for ever."""
        if len(self.spares) < SPARES:
            return RETRY_FORK_MS if self.fork_error else REFILL_MS
        return SHRINK_MS if len(self.spares) > SPARES else WATCHER_RETRY_MS if self.needs_watcher else None

    def fork_watcher(self) -> HoldWatcher | None:
        """Fork the hold watcher where a hold is pending and there is none; returns it in the child."""
        self.needs_watcher = is_hold_pending(self.root)
        if not self.needs_watcher or boot_ms() < self.watcher_forked_ms + WATCHER_RETRY_MS:
            return None
        self.watcher_forked_ms = boot_ms()
        try:
            pid = os.fork()
        except OSError:  # too many processes: it is tried again
            return None
        if pid == 0:
            self._become_child()
            return HoldWatcher(self.root, self.grid)
        self.needs_watcher = False
        self.watcher = pid
        self.shims.add(pid)
        return None

    def reclaim(self, fd: int) -> None:
        """A shim that was given away is ready for another attempt, or gone."""
        self.poll.unregister(fd)
        spare = self.busy.pop(fd)
        try:
            is_ready = spare.recv(1) == READY
        except ConnectionResetError:
            is_ready = False
        if is_ready and len(self.spares) < MAX_SPARES:
            self.spares.append(spare)
        else:
            spare.close()

    def launch(self, attempt_id: bytes, channel: int) -> PreforkedShim | None:
        """Give an attempt its shim; what is locked or has been run already is left alone. Returns as `fork_shim`."""
        spare = None
        try:
            job = JobDir(self.root, attempt_id.decode())
        except OSError:
            _report_refusal(channel, "its directory was removed")
            os.close(channel)
            return None
        with job:
            try:
                lock = job.take_lock()
            except OSError as error:
                _refuse(job, channel, f"could not be started: its record is damaged: {error.strerror}")
                lock = None
            if lock is not None:
                assigned = self._assign(attempt_id, lock, channel)
                if not assigned:  # the waiting ones were just killed
                    spare = self.fork_shim()
                    assigned = spare is not None or self._assign(attempt_id, lock, channel)
                if not assigned:
                    _refuse(job, channel, f"could not be started: {self.fork_error or 'its shim was killed'}")
                os.close(lock)
        os.close(channel)
        return spare

    def _assign(self, attempt_id: bytes, lock: int, channel: int) -> bool:
        while self.spares:
            spare = self.spares.pop()  # the last one used, which has its pages already
            try:
                socket.send_fds(spare, [attempt_id], [lock, channel])
            except (BrokenPipeError, ConnectionResetError):  # it was killed while it waited
                spare.close()
                continue
            self.busy[spare.fileno()] = spare
            self.poll.register(spare, select.POLLIN)
            return True
        return False

    def fork_shim(self) -> PreforkedShim | None:
        """Fork a process that waits for attempts; returns it in the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError as error:  # too many processes
            self.fork_error = error.strerror
            pid = -1
        if pid == 0:
            ours.close()
            self._become_child()
            become_subreaper()
            return PreforkedShim(self.root, theirs, self.controllers, self.grid)
        theirs.close()
        if pid > 0:
            self.fork_error = None
            self.shims.add(pid)
            self.spares.append(ours)
        else:
            ours.close()
        return None

    def _become_child(self) -> None:
        """Leave behind what belongs to the spawner alone."""
        signal.set_wakeup_fd(-1)
        for sock in (self.sock, *self.spares, *self.busy.values()):
            sock.close()
        for fd in (self.host_lock, self.woken, self.wake):
            os.close(fd)
        os.setsid()

    def reap(self) -> None:
        """Collect dead shims and whatever else became ours."""
        orphaned = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            self.shims.discard(pid)
            if pid == self.watcher:
                self.watcher, self.needs_watcher = 0, True
            orphaned = orphaned or status != 0
        for _ in range(50 if orphaned else 0):
            left = process_tree.descendants(os.getpid(), self._is_ours)
            if not left:
                return
            process_tree.signal_all(left, signal.SIGKILL)
            time.sleep(0.002)

    def _is_ours(self, proc: process_tree.Proc, *, fresh: bool = True) -> bool:
        """Whether it is a shim forked here, or another process of this grid."""
        return proc.pid in self.shims or self.grid.besides(0)(proc, fresh=fresh)


def _is_waiting(spare: socket.socket) -> bool:
    """Whether the shim at the other end is still there."""
    try:
        spare.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    spare.close()
    return False


def _refuse(job: JobDir, channel: int, detail: str) -> None:
    """Record and report that an attempt could not be started."""
    with contextlib.suppress(OSError):  # a full disk: the agent hears of it all the same
        job.write_exit({"kind": "never_started", "detail": detail})
    _report_refusal(channel, detail)


def _report_refusal(channel: int, detail: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(channel, journal_entry("ended", {"kind": "never_started", "detail": detail}))


def main() -> None:
    """Run the spawner, or in a forked child the shim or the hold watcher."""
    root, sock_fd, host_lock, cgroups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    low, high = sorted((sock_fd, host_lock))
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
    for fd in (sock_fd, host_lock):
        os.set_inheritable(fd, False)
    become_subreaper()
    sock = socket.socket(fileno=sock_fd)
    controllers = probe_controllers() if cgroups else Controllers()
    grid = GridProcesses(sys.argv[5:], partial(job_dir.live_shim_locks, root))
    spawner = Spawner(root, sock, host_lock, controllers, grid)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page it touches
    gc.disable()
    child = spawner.serve()
    if child is not None:
        child.serve()


if __name__ == "__main__":
    main()
