"""Guard process of a move: owns the freeze lease, the kill and the journal; independent of the agent.

`python -m distributed_grid.agent.offloading.guard_process FOLDER`, started by `GuardClient` in the directory of a move
whose journal has its first line. Standard library only. It leaves its parent, leads a session of its own, and inherits
no descriptor. The started process ends with 0 once the guard takes orders, and with 3 if there is one already.

- Orders are lines on a Unix socket; every answer is a record of the journal, or a problem. A new connection gets the
  record that holds.
- A standby, a child in a session of its own, waits for the guard's lock. The kernel gives it the lock the moment the
  guard is gone, for any reason; it then reads the journal and continues, with a new standby. It kills a guard that does
  nothing: one that has let the lease pass, or has not ended a tree that it decided to end.
- The socket is inherited by the standby, so an agent that connects again is answered as soon as there is a guard.
- If the directory is removed, no order and no record can arrive: a tree that is not decided is thawed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, Final

from distributed_grid.agent.offloading.frozen_tree import FrozenTree, TreeNotFrozen
from distributed_grid.agent.offloading.guard_core import (
    FINAL_PHASES,
    STILL_PHASES,
    ContinueTree,
    GuardAction,
    GuardCore,
    GuardRecord,
    KillTree,
    StopTree,
    TreeView,
    WriteRecord,
)
from distributed_grid.agent.offloading.move_journal import FAILURE, LOCK, SOCKET, MoveJournal, encode_record
from distributed_grid.domain.states import MoveState, Step
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.posix.private_files import open_regular, try_lock, write_all
from distributed_grid.posix.sockets import is_own_peer, peer_pid

GUARDED_ALREADY: Final = 3
MAX_CONNECTIONS, MAX_ORDER_BYTES = 8, 4096
IDLE_MS, BUSY_MS, KILL_WAIT_MS = 2_000, 100, 500
"""How long to wait at most: while nothing is to be done, while it is frozen (the machine may have slept) or to be
killed, and for a kill."""
RETRY_MS: Final = 500
WATCH_SECONDS, STUCK_MS, SLOW_KILL_MS = 0.5, 1_000, 10_000
"""How often a standby reads the journal, and so long after a lease or a decision its guard must have acted on it."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class GuardProcess:
    """Serves one move, with the lock of its directory held."""

    def __init__(self, folder: int, listener: socket.socket, lock: int) -> None:
        self._folder, self._listener, self._lock = folder, listener, lock
        self._journal = MoveJournal(folder)
        self._original, records = self._journal.read()
        self._same_boot = self._original.boot == boot_id()
        self._core = GuardCore(records)
        root = (self._original.pid, self._original.start)
        kept = {"known": self._core.members, "spared": self._core.spared}
        self._tree = FrozenTree(root, own=(os.getpid(),), **kept)
        self._last = records[-1] if records else GuardRecord(MoveState.OPENED, boot_ms())
        self._unwritten: GuardRecord | None = None
        self._connections: dict[int, tuple[socket.socket, bytearray]] = {}
        self._standby = self._standby_pidfd = -1
        self._is_closed = False
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda *_: None)  # its number arrives through the wake-up descriptor
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Guard the original until it is dead, gone or thawed, and that is written."""
        try:
            if not self._core.is_final:
                self._start_standby()
            with contextlib.suppress(TreeNotFrozen):  # the recorded members are enough to thaw it
                if self._same_boot and not self._core.is_final:
                    self._tree.observe()
            self._perform(self._core.resume(boot_ms(), self._view(), same_boot=self._same_boot))
            while not (self._core.is_final and self._unwritten is None) and not self._is_closed:
                if not self._core.is_final and self._is_standby_gone():
                    self._start_standby()
                self._wait()
                if os.fstat(self._folder).st_nlink == 0:
                    self._perform(self._core.thaw(boot_ms(), "the directory of its move was removed"))
                    self._is_closed = self._core.phase is not MoveState.DECIDED
                self._perform(self._core.observe(boot_ms(), TreeView(self._tree.is_alive)))
                # A record that found no room is written as soon as there is some.
                if self._unwritten is not None:
                    self._write(self._unwritten, durable=False)
            # Nothing is left to guard: the standby must not begin.
            if self._standby >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._standby_pidfd, signal.SIGKILL)
                os.waitpid(self._standby, 0)
                self._standby = -1
        except BaseException:
            if self._core.phase not in (MoveState.DECIDED, MoveState.DEAD):
                self._tree.resume()  # the next guard sees that it was continued
            raise

    # ------------------------------------------------------------------ actions

    def _perform(self, actions: list[GuardAction]) -> None:
        """Perform actions in their order, and those that follow from them."""
        waiting = list(actions)
        while waiting:
            action = waiting.pop(0)
            match action:
                case WriteRecord(record, durable):
                    if (problem := self._write(record, durable)) is not None:
                        waiting = self._core.not_recorded(record, boot_ms(), problem)
                case StopTree(by_ms):
                    waiting += self._stop(by_ms)
                case ContinueTree():
                    self._tree.resume()
                case KillTree():
                    if self._tree.kill(KILL_WAIT_MS):
                        waiting += self._core.killed(boot_ms())

    def _stop(self, by_ms: int) -> list[GuardAction]:
        try:
            self._tree.stop(by_ms)
        except TreeNotFrozen as failure:
            return self._core.not_stopped(boot_ms(), str(failure))
        if not self._tree.is_alive:
            return self._core.observe(boot_ms(), TreeView(False))
        if not self._is_in_its_directory():
            return self._core.not_stopped(boot_ms(), "it has changed its working directory")
        return self._core.stopped(boot_ms(), self._tree.living(), tuple(sorted(self._tree.spared)))

    def _is_in_its_directory(self) -> bool:
        try:
            status = os.stat(f"/proc/{self._original.pid}/cwd")
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self._original.device, self._original.inode)

    def _write(self, record: GuardRecord, durable: bool) -> str | None:
        """Write a record, apply it and report it; the reason if it could not be written."""
        try:
            self._journal.append(record, durable=durable)
        except OSError as error:
            reason = error.strerror or str(error)
            if record.step in FINAL_PHASES:
                self._unwritten = record
            if record.step is MoveState.FREEZING:
                message = {"problem": f"the journal of the move cannot be written: {reason}"}
                for fd in list(self._connections):
                    self._send(fd, json.dumps(message).encode() + b"\n")
            elif record.step in (MoveState.THAWED, MoveState.GONE):  # these hold, written or not
                self._report_record(record)
            return reason
        self._core.apply(record)
        self._unwritten = None
        self._report_record(record)
        return None

    def _view(self) -> TreeView:
        """Observation of the tree now; only of a frozen one all threads are read."""
        if not self._same_boot or not self._tree.is_alive:
            return TreeView(False)
        return TreeView(True, self._core.phase in STILL_PHASES and self._tree.is_still())

    # ------------------------------------------------------------------ waiting and orders

    def _wait(self) -> None:
        poll = select.poll()
        waited = [self._listener.fileno(), self._woken, *self._connections]
        root = self._tree.root_pidfd() if self._core.phase in (MoveState.OPENED, *STILL_PHASES) else None
        waited += [fd for fd in (root, self._standby_pidfd) if fd is not None and fd >= 0]
        for fd in waited:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(self._timeout_ms()):
            if fd == self._listener.fileno():
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # the peer is gone
                    continue
                connection.setblocking(False)
                if not is_own_peer(connection) or len(self._connections) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._tree.exclude(peer_pid(connection))
                self._connections[connection.fileno()] = (connection, bytearray())
                self._send(connection.fileno(), encode_record(self._last))
            elif fd == self._woken:
                if signal.SIGTERM in os.read(fd, 512) and self._core.phase is not MoveState.OPENED:
                    self._perform(self._core.thaw(boot_ms(), "its guard was asked to end"))
            elif fd in self._connections:
                peer, text = self._connections[fd]
                try:
                    data = peer.recv(MAX_ORDER_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                text += data
                *lines, rest = bytes(text).split(b"\n")
                text[:] = rest
                for line in lines:
                    self._carry_out(fd, line)
                if (not data or len(rest) > MAX_ORDER_BYTES) and fd in self._connections:
                    self._disconnect(fd)

    def _timeout_ms(self) -> int:
        if self._unwritten is not None:
            return RETRY_MS
        if self._core.phase is MoveState.OPENED:
            return IDLE_MS
        wakes_at_ms = self._core.wakes_at_ms
        return min(max(wakes_at_ms - boot_ms(), 0), BUSY_MS) if wakes_at_ms else BUSY_MS

    def _carry_out(self, fd: int, line: bytes) -> None:
        """Carry out an order; one that changes nothing is answered with the record that holds."""
        try:
            order = json.loads(line)
            name, now, last = order["order"], boot_ms(), self._last
        except (ValueError, KeyError, TypeError, RecursionError):
            self._disconnect(fd)
            return
        if name == Step.FREEZE:
            self._freeze(now, order)
        elif name == "check" and isinstance(changes := order.get("changes"), str):
            self._perform(
                self._core.observe(now, TreeView(self._tree.is_alive))
            )  # an ended original is gone, not thawed
            self._perform(self._core.check(now, changes))
        elif name == Step.COMMIT:
            self._perform(self._core.commit(now, self._view()))
        elif name in (Step.THAW, Step.CLOSE):
            reason = order.get("why")
            self._perform(
                self._core.thaw(now, reason if isinstance(reason, str) and reason else "the move was given up")
            )
            self._is_closed = self._is_closed or (name == Step.CLOSE and self._core.phase is not MoveState.DECIDED)
        if self._last is last:
            self._send(fd, encode_record(last))

    def _freeze(self, now: int, order: dict[str, Any]) -> None:
        lease_ms = order.get("freeze_ms")
        if self._core.phase is not MoveState.OPENED or type(lease_ms) is not int:
            return
        try:
            self._tree.spare_stopped(self._tree.observe())
        except TreeNotFrozen as failure:
            self._perform(self._core.thaw(now, str(failure)))
            return
        self._perform(self._core.freeze(now, lease_ms, self._tree.members, tuple(sorted(self._tree.spared))))

    def _report_record(self, record: GuardRecord) -> None:
        self._last = record
        for fd in list(self._connections):
            self._send(fd, encode_record(record))

    def _send(self, fd: int, line: bytes) -> None:
        connection, _ = self._connections[fd]
        try:
            if connection.send(line) < len(line):
                self._disconnect(fd)  # it does not read: the journal has it all
        except OSError:
            self._disconnect(fd)

    def _disconnect(self, fd: int) -> None:
        self._connections.pop(fd)[0].close()

    # ------------------------------------------------------------------ standby

    def _is_standby_gone(self) -> bool:
        if self._standby < 0:
            return True
        ended, _ = os.waitpid(self._standby, os.WNOHANG)
        if not ended:
            return False
        os.close(self._standby_pidfd)
        self._standby = self._standby_pidfd = -1
        return True

    def _start_standby(self) -> None:
        guard = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no room for another process: the next round tries again
            return
        if not pid:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.setsid()
                for connection, _ in self._connections.values():
                    connection.close()
                self._tree.close()
                self._journal.close()
                for fd in (self._lock, self._woken, self._wake):
                    os.close(fd)
                lock = open_regular(LOCK, os.O_RDWR, self._folder)
                # Kill a guard that is stuck, while this process waits for its lock. The guard is the parent of this
                # process, so its pid belongs to it as long as that is so.

                def check(signum: int, frame: object) -> None:
                    if os.getppid() == guard and is_stuck(self._folder, boot_ms()):
                        os.kill(guard, signal.SIGKILL)

                signal.signal(signal.SIGALRM, check)
                signal.setitimer(signal.ITIMER_REAL, WATCH_SECONDS, WATCH_SECONDS)
                fcntl.flock(lock, fcntl.LOCK_EX)
                signal.setitimer(signal.ITIMER_REAL, 0)
                _serve_logged(self._folder, self._listener, lock)
                code = 0
            finally:
                os._exit(code)
        self._standby, self._standby_pidfd = pid, os.pidfd_open(pid)


def is_stuck(folder: int, now: int) -> bool:
    """True if the journal demands an action that a working guard would have taken long ago."""
    try:
        journal = MoveJournal(folder)
    except OSError:
        return False
    try:
        _, records = journal.read()
    except (OSError, ValueError):
        return False
    finally:
        journal.close()
    core = GuardCore(records)
    if core.phase is MoveState.DECIDED:
        return now > records[-1].at_ms + SLOW_KILL_MS
    return 0 < core.wakes_at_ms < now - STUCK_MS


def main(arguments: list[str]) -> int:
    """Start the guard of a move in the background; the exit code of the process that was started."""
    folder = os.open(arguments[0], _DIRECTORY)
    lock = open_regular(LOCK, os.O_RDWR | os.O_CREAT, folder)
    if not try_lock(lock):
        return GUARDED_ALREADY
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else hard, hard))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = f"/proc/self/fd/{folder}/{SOCKET}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(MAX_CONNECTIONS)
    listener.setblocking(False)
    if os.fork():
        return 0
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        _serve_logged(folder, listener, lock)
        code = 0
    finally:
        os._exit(code)


def _serve_logged(folder: int, listener: socket.socket, lock: int) -> None:
    """Guard the original; an unforeseen failure is written to a file, and the next guard continues."""
    try:
        GuardProcess(folder, listener, lock).serve()
    except Exception as failure:
        import traceback

        with contextlib.suppress(OSError):
            fd = open_regular(FAILURE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, folder)
            write_all(fd, "".join(traceback.format_exception(failure)).encode())
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
