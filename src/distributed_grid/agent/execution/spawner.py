"""Spawner process: forks shims ahead of time and gives each attempt one.

`python -m distributed_grid.agent.execution.spawner ROOT SOCKET LOCK CGROUPS GRID_LOCK…`, started by `SpawnerClient`
with everything imported that a shim needs; standard library only. One packet is one attempt id with one descriptor,
the channel on which the shim reports. A shim whose attempt has ended may serve another: most of the time of a short
costs would otherwise be the fork and the pages that are copied after it.

- The spawner ends when its socket closes, that is with its agent. Running shims stay; waiting ones end, so an
  adopted attempt has a shim to itself.
- The attempt's lock is taken before the attempt is given to a shim, and travels with it. The host's lock is held
  until the last one is given: the next holder of the host's lock sees each attempt either locked or never begun.
- Processes of a shim that died early become the spawner's children, and are killed.
- A shim takes the next attempt only when nothing of the last is left (no process, no control group, no limit) and
  the agent has read its end. Until then the agent may pause, move or measure the processes below the shim.
- While a hold is pending it keeps a hold watcher running, which outlives it.

The hold watcher is the second process that ends attempts at the end of their hold, where their shim does not. The
spawner forks it when an attempt with a hold is launched. It outlives agent and spawner, and ends when no attempt with a
hold is left.

- A shim kills its tree at the end of the hold. A shim that is stopped (SIGSTOP, a debugger, a swap storm) cannot. Half
  a second later the watcher kills the tree, and the shim if it is stopped: the control plane lends the resources again
  two seconds after the hold at the earliest.
- It keeps no state of its own: the directories of the attempts and `.hold` suffice. So it may be killed at any time;
  the spawner forks another, and the next spawner replaces one of an earlier agent.
- Processes of this grid are exempt, as for a shim.
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
from typing import Any, Final, NamedTuple, NoReturn

from distributed_grid.agent.execution.shim import Shim, is_valid_spec
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir, journal_entry
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.cgroups import Controllers, group_name, probe_controllers
from distributed_grid.agent.limits.process_tree import GridProcesses, Proc
from distributed_grid.agent.limits.timer import (
    DeadlineTimer,
    become_subreaper,
    install_signal_handlers,
    signal_parent_death,
)
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.posix.private_files import open_regular, try_lock

OVERDUE_MS: Final = 500
"""After the end of a hold; the control plane waits two seconds."""
LOOK_MS: Final = 1000
MAX_LOOK_MS: Final = 10_000  # while ended attempts have no record yet
MAX_KILL_ROUNDS: Final = 500
KILL_PAUSE_S: Final = 0.005
PARENT_DIED: Final = signal.SIGUSR1


def is_hold_pending(root: str) -> bool:
    """True if the deadline in the file, of any attempts, is still to come or has just passed."""
    return job_dir.read_hold_record(root)[0] + OVERDUE_MS > boot_ms()


class HeldAttempt(NamedTuple):
    """An attempt with a hold that has not ended."""

    attempt_id: str
    work: str
    until_boot_ms: int
    shim: Proc | None  # None: it is dead
    shim_pid: int
    main_pid: int
    main_start: int

    @property
    def is_overdue(self) -> bool:
        return boot_ms() >= self.until_boot_ms + OVERDUE_MS


class HoldWatcher:
    """Ends the attempts of a root whose hold has been over for a moment."""

    def __init__(self, root: str, grid: GridProcesses) -> None:
        self._root = root
        self._grid = grid
        self._boot = boot_id()
        self._held_until: dict[str, int] = {}  # by the key of the hold; it never gets earlier

    def serve(self) -> NoReturn:
        """Watch until no attempt with a hold is left."""
        gc.enable()
        spawner = os.getppid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {PARENT_DIED})
        signal_parent_death(PARENT_DIED)
        self._replace_predecessor()
        look_ms = LOOK_MS
        while True:
            left_ms = self._read_hold() + OVERDUE_MS - boot_ms()
            is_orphan = os.getppid() != spawner
            if left_ms <= 0 or is_orphan:
                held = self._held_attempts()
                has_killed = self._end_overdue(held)
                left = [attempt for attempt in held if attempt.shim is not None or not attempt.is_overdue]
                if not left and not has_killed and (is_orphan or not is_hold_pending(self._root)):
                    os._exit(0)
                look_ms = LOOK_MS if has_killed else min(2 * look_ms, MAX_LOOK_MS)
                left_ms = min((attempt.until_boot_ms for attempt in left), default=0) + OVERDUE_MS - boot_ms()
            wait_ms = min(left_ms, LOOK_MS) if left_ms > 0 else look_ms
            signal.sigtimedwait({PARENT_DIED}, wait_ms / 1000)

    def _replace_predecessor(self) -> None:
        """Hold the lock by which this process is known to belong to the grid; the watcher of an earlier agent ends."""
        path = f"{self._root}/{job_dir.WATCH_LOCK}"
        try:
            lock = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError:  # a full disk, or no root any more
            return
        while not try_lock(lock):
            process_tree.signal_all(process_tree.holders_of(path), signal.SIGKILL)
            time.sleep(KILL_PAUSE_S)

    def _read_hold(self) -> int:
        """The deadline of the hold that attempts here believe; 0 where it is not known yet or belongs to none."""
        until, key = job_dir.read_hold_record(self._root)
        if key not in self._held_until:
            return 0
        self._held_until[key] = max(self._held_until[key], until)
        return self._held_until[key]

    def _held_attempts(self) -> list[HeldAttempt]:
        try:
            names = os.listdir(f"{self._root}/{job_dir.LIVE}")
        except OSError:  # the root was removed
            return []
        attempts = []
        for name in names:
            try:
                with JobDir(self._root, name) as job:
                    attempt = self._read_attempt(job)
            except (OSError, ValueError):
                continue
            if attempt is not None:
                attempts.append(attempt)
        return attempts

    def _read_attempt(self, job: JobDir) -> HeldAttempt | None:
        """None for one without a hold, one that has ended, one that no shim has begun, and one of another boot."""
        if job.has(job_dir.EXIT) or not job.has(job_dir.LOCK):
            return None
        spec, shim = job.read(job_dir.SPEC), job.read(job_dir.LOCK)
        if not is_valid_spec(spec, job.attempt_id) or spec["boot"] != self._boot or not spec["hold_ms"]:
            return None
        key = spec["hold_key"]
        held_until = max(self._held_until.get(key, 0), job_dir.read_hold(self._root, key))
        self._held_until[key] = held_until
        started = _fields(job.read(job_dir.STARTED))
        shim_pid, shim_start = _fields(shim)
        proc = process_tree.read_process(shim_pid) if shim_pid and job.is_locked() else None
        return HeldAttempt(
            attempt_id=job.attempt_id,
            work=f"{job.path}/{job_dir.WORK}",
            until_boot_ms=held_until or spec["launched_boot_ms"] + spec["hold_ms"],
            shim=proc if proc is not None and proc.start == shim_start else None,
            shim_pid=shim_pid,
            main_pid=started[0],
            main_start=started[1],
        )

    def _end_overdue(self, held: list[HeldAttempt]) -> bool:
        """Kill the trees after their hold, then their shims that are stopped; True if there were any."""
        overdue = [attempt for attempt in held if attempt.is_overdue]
        has_killed = False
        beyond: set[Proc] = set()
        for _ in range(MAX_KILL_ROUNDS if overdue else 0):
            procs = process_tree.read_processes()
            left = [proc for attempt in overdue for proc in self._tree(attempt, procs) if proc not in beyond]
            if not left:
                break
            has_killed = True
            beyond.update(process_tree.signal_all(left, signal.SIGKILL))
            time.sleep(KILL_PAUSE_S)
        for attempt in overdue:
            shim = process_tree.read_process(attempt.shim.pid) if attempt.shim is not None else None
            if shim is not None and shim.stopped and attempt.shim is not None and shim.start == attempt.shim.start:
                has_killed = True
                process_tree.signal_all([shim], signal.SIGKILL)
        return has_killed

    def _tree(self, attempt: HeldAttempt, procs: dict[int, Proc]) -> list[Proc]:
        exempt = self._grid.besides(attempt.main_pid)
        if attempt.shim is not None:
            return process_tree.descendants(attempt.shim.pid, exempt, procs)
        return process_tree.find_attempt_processes(
            attempt.attempt_id,
            attempt.work,
            exempt,
            attempt.main_pid,
            attempt.main_start,
            group_name(attempt.attempt_id, attempt.shim_pid),
        )


def _fields(record: Any) -> tuple[int, int]:
    """Pid and start time from a part of the journal; zeros if it has none."""
    if not isinstance(record, dict):
        return 0, 0
    pid, start = record.get("pid"), record.get("start")
    return (pid, start) if isinstance(pid, int) and isinstance(start, int) else (0, 0)


BOOT_ID: Final = boot_id()
PACKET_BYTES: Final = 1024  # the longest id of an attempt takes 800
IDLE_SHIMS: Final = 2  # enough that one forks while the other is taken
MAX_IDLE_SHIMS: Final = IDLE_SHIMS + len(os.sched_getaffinity(0))  # of those that come back
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
        """The next attempt, its lock and its channel; nothing when the spawner ended or has enough idle shims."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, 2)
        except ConnectionResetError:
            return "", []
        return packet.decode(), descriptors

    def _run_to_completion(self, attempt_id: str, lock: int, channel: int) -> bool:
        """Run it; True if another may follow. The lock stays open, and so held, until nothing of it is left."""
        for fd in (lock, channel):
            os.set_inheritable(fd, False)  # unlike those opened here, the command would inherit received ones
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
        """Identity by boot, pid and start time; CPU ticks so far are not the next attempt's."""
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
        self.shims: set[int] = set()  # children not reaped yet: their pids are not used again
        self.idle_shims: list[socket.socket] = []
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
                self.idle_shims = [shim for shim in self.idle_shims if _is_waiting(shim)]
            if not ready and len(self.idle_shims) > IDLE_SHIMS:
                self.idle_shims.pop(0).close()  # which ends it
            elif (not ready and len(self.idle_shims) < IDLE_SHIMS) or (asked and not self.idle_shims):
                child = self.fork_shim()
                if child is not None:
                    return child
            if asked:
                packet, descriptors, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, 1)
                if not packet:
                    return None
                child = self.launch(packet, descriptors[0])
                if child is not None:
                    return child
                self.needs_watcher = self.watcher == 0
            if self.needs_watcher:
                watcher = self.fork_watcher()
                if watcher is not None:
                    return watcher

    def poll_timeout_ms(self) -> int | None:
        """Time until the number of idle shims is corrected, or a watcher is forked; None: no limit."""
        if len(self.idle_shims) < IDLE_SHIMS:
            return RETRY_FORK_MS if self.fork_error else REFILL_MS
        return SHRINK_MS if len(self.idle_shims) > IDLE_SHIMS else WATCHER_RETRY_MS if self.needs_watcher else None

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
        """Take back a shim that is ready for another attempt; close the socket of one that is gone."""
        self.poll.unregister(fd)
        shim = self.busy.pop(fd)
        try:
            is_ready = shim.recv(1) == READY
        except ConnectionResetError:
            is_ready = False
        if is_ready and len(self.idle_shims) < MAX_IDLE_SHIMS:
            self.idle_shims.append(shim)
        else:
            shim.close()

    def launch(self, attempt_id: bytes, channel: int) -> PreforkedShim | None:
        """Give an attempt its shim; a locked attempt, or one that has run already, is left alone. Returns as
        `fork_shim`."""
        child = None
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
                    child = self.fork_shim()
                    assigned = child is not None or self._assign(attempt_id, lock, channel)
                if not assigned:
                    _refuse(job, channel, f"could not be started: {self.fork_error or 'its shim was killed'}")
                os.close(lock)
        os.close(channel)
        return child

    def _assign(self, attempt_id: bytes, lock: int, channel: int) -> bool:
        while self.idle_shims:
            shim = self.idle_shims.pop()  # the last one used, which has its pages already
            try:
                socket.send_fds(shim, [attempt_id], [lock, channel])
            except (BrokenPipeError, ConnectionResetError):  # it was killed while it waited
                shim.close()
                continue
            self.busy[shim.fileno()] = shim
            self.poll.register(shim, select.POLLIN)
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
            self.idle_shims.append(ours)
        else:
            ours.close()
        return None

    def _become_child(self) -> None:
        """Leave behind what belongs to the spawner alone."""
        signal.set_wakeup_fd(-1)
        for sock in (self.sock, *self.idle_shims, *self.busy.values()):
            sock.close()
        for fd in (self.host_lock, self.woken, self.wake):
            os.close(fd)
        os.setsid()

    def reap(self) -> None:
        """Collect dead shims and other children, and kill orphans of a dead shim."""
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
        """True for a shim forked here, or another process of this grid."""
        return proc.pid in self.shims or self.grid.besides(0)(proc, fresh=fresh)


def _is_waiting(shim: socket.socket) -> bool:
    """True if the shim at the other end is alive."""
    try:
        shim.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    shim.close()
    return False


def _refuse(job: JobDir, channel: int, detail: str) -> None:
    """Record and report that an attempt could not be started."""
    with contextlib.suppress(OSError):  # a full disk: the agent gets the report all the same
        job.write_exit({"ending": "never_started", "detail": detail})
    _report_refusal(channel, detail)


def _report_refusal(channel: int, detail: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(channel, journal_entry("ended", {"ending": "never_started", "detail": detail}))


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
