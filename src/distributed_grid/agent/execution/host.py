"""Attempt host of a node: launches attempts, watches their shims, stops them, recovers them after a restart.

An attempt id runs at most once, with any number of orders and through any crash. An attempt is reported
as ended when nothing of it is left, and again on request. The job directories are the truth: a new host
of the same root finds the whole state there.

A shim that this host ordered reports on a pipe, its channel. A shim that was found running is watched by its pidfd,
and its reports are in the attempt's directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from distributed_grid.agent.execution import cpu_control
from distributed_grid.agent.execution.attempt import (
    DAMAGED,
    STOP_ENDINGS,
    AttemptExit,
    AttemptLaunch,
    AttemptSpec,
    AttemptUsage,
    RunningAttempt,
    ShimReport,
    StartRecord,
    StopRequest,
    find_hold_key,
    kill_damaged,
    kill_leftovers,
    kill_without_record,
    may_have_run,
    outcome_of,
    read_end,
    read_exit,
    read_shim,
    read_started,
    read_unacknowledged,
    restore_state,
)
from distributed_grid.agent.execution.cpu_control import CoreAffinity, RunningTree
from distributed_grid.agent.execution.launch import START_EXPIRED, is_node_fault
from distributed_grid.agent.execution.spawner_client import SpawnerClient, wait_until
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.files.job_signals import HoldDeadline
from distributed_grid.agent.limits import process_tree
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.errors import BadInput, StaleFence
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.posix.private_files import remove_file
from distributed_grid.state_dir import machine_id
from distributed_grid.supervision import start_restarted

LOCK_TIMEOUT_S = 10.0
SYNC_S = 0.2  # after which an end that is not acknowledged is put on the disk
REPEAT_S = 1.0  # how often a stop, or a record that found no room, is tried again
MAX_SENDS = 5  # to a spawner that dies each time
SEND_S = 2.0  # how long an order waits for a spawner that takes nothing
log = logging.getLogger(__name__)


class AttemptHost:
    """Runs, watches and stops attempts below `root`; at most one host at a time for a root.

    `report` gets each end once or more often; `count_cpu_time` once, with the node and the CPU time there.
    """

    def __init__(
        self,
        root: Path,
        *,
        report: Callable[[AttemptLaunch | AttemptExit], None],
        count_cpu_time: Callable[[str, int], None] = lambda node, cpu_ms: None,
        real_cores: Sequence[int] | None = None,
        use_cgroups: bool = True,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        grid_locks: Sequence[str | Path] = (),
    ) -> None:
        self.root = str(root.absolute())
        self._report = report
        self._count_cpu_time = count_cpu_time
        self._running: dict[str, RunningAttempt] = {}
        self._ended: dict[str, AttemptExit] = {}
        self._unsynced: set[str] = set()
        self._syncs_ends = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._boot_id = boot_id()
        self._hold = HoldDeadline(self.root)
        self.affinity = CoreAffinity(self.root, self._running, real_cores)
        own_locks = (f"{self.root}/{job_dir.HOST_LOCK}", f"{self.root}/{job_dir.WATCH_LOCK}")
        locks = (*own_locks, *map(str, grid_locks))
        self._grid = process_tree.GridProcesses(locks, partial(job_dir.live_shim_locks, self.root))
        self._spawner = SpawnerClient(
            self.root, use_cgroups=use_cgroups, lock_timeout_s=lock_timeout_s, grid_locks=locks
        )
        self._stopped = True
        self.machine = ""
        """Names this machine and the root: an agent with another one knows nothing of what is recorded here."""
        self._repeats_stops = False

    async def start(self) -> None:
        """Lock the root, start the spawner, and report every attempt found. A second call does nothing."""
        if not self._stopped:
            return
        job_dir.make_root(self.root)
        await self._spawner.lock_root()
        self._stopped = False
        attempts, damaged = read_unacknowledged(self.root, self._grid)
        self._hold.restore(find_hold_key(attempts) or os.urandom(16).hex())
        self.machine = job_dir.machine_name(self.root, machine_id())
        self._spawner.start()
        for attempt in attempts:
            with JobDir(self.root, attempt.id) as job:
                record = read_end(job)
                if record is None and not job.is_locked() and not may_have_run(job):
                    job.remove(job_dir.LOCK)  # recorded but never started: the order comes again
                    self.forget(attempt.id)
                    continue
                restore_state(attempt, job)
            self._running[attempt.id] = attempt
            if record is not None:
                self._finish(attempt, record)
                continue
            self._repeat_stops()
            attempt.sends = MAX_SENDS  # it is not started anew without an order
            if not self._watch_shim(attempt):
                self._start_watch(partial(self._wait_for_shim, attempt))
        for attempt_id in damaged:
            # Without a record an attempt is unknown: it is ended and not listed, so the control plane calls it lost.
            log.warning("the record of %s is damaged: its remains are killed", attempt_id)
            with JobDir(self.root, attempt_id) as job:
                await kill_damaged(job, self.root, self._grid)
            self._record_exit(attempt_id, Outcome(Ending.LOST, detail=DAMAGED))
            self.forget(attempt_id)
        cpu_control.clear_throttled(self.root)

    async def stop(self) -> None:
        """Stop watching and unlock the root; attempts keep running. Safe twice."""
        if self._stopped:
            return
        self._stopped = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for attempt in self._running.values():
            attempt.unwatch()
        await self._spawner.stop()
        self._sync(self._unsynced)
        self._unsynced.clear()
        self._running.clear()
        self._ended.clear()

    def _start_watch(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run this in the background; on a failure (no descriptors, a broken disk) it is repeated."""
        task = start_restarted(work, "the watch of an attempt")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ launching

    async def launch(self, spec: AttemptSpec) -> None:
        """Run it, once: a second call reports again what is known. `StaleFence` for an order from the past."""
        _check_name(spec.attempt_id)
        known = self._running.get(spec.attempt_id) or self._find_exit(spec.attempt_id)
        if known is not None:
            if spec.fence < known.fence:
                raise StaleFence(f"{spec.attempt_id}: fence {spec.fence} is older than {known.fence}")
            if spec.fence > known.fence:
                try:
                    with JobDir(self.root, spec.attempt_id) as job:
                        job.write(job_dir.FENCE, {"fence": spec.fence, "nonce": job.nonce()})
                except OSError as error:  # a full disk: the next agent gets it with the repeated order
                    log.warning("the fence of %s could not be recorded: %s", spec.attempt_id, error.strerror)
                if isinstance(known, AttemptExit):
                    known = msgspec.structs.replace(known, fence=spec.fence)
                    self._ended[spec.attempt_id] = known
                else:
                    known.fence = spec.fence
                    known.started = known.started and msgspec.structs.replace(known.started, fence=spec.fence)
            report = known if isinstance(known, AttemptExit) else known.started
            if report is not None:
                self._report(report)
            return
        now = boot_ms()
        attempt = RunningAttempt(spec, spec.fence, now, self._grid)
        self._running[attempt.id] = attempt
        self.affinity.rearrange()
        try:
            with JobDir.make(self.root, attempt.id) as job:
                if spec.hold_ms:
                    self._hold.begin(now, spec.hold_ms)
                job.remove(job_dir.CORES)  # of an earlier order that came to nothing
                record: dict[str, Any] = {"launched_boot_ms": now, "boot": self._boot_id, "cores": attempt.cores}
                record |= {"nonce": os.urandom(16).hex(), "hold_key": self._hold.key}
                job.write_spec(msgspec.to_builtins(spec) | record)
            attempt.recorded = True
        except OSError as error:
            problem = f"could not be recorded: {error.strerror}"
            self._finish(attempt, Outcome(Ending.NEVER_STARTED, detail=problem, node_fault=is_node_fault(error)))
            return
        if spec.start_by_boot_ms:
            self._start_watch(partial(self._expire_start, attempt))
        try:
            async with asyncio.timeout(SEND_S):  # a spawner that is stopped must not delay other orders
                await self._send_to_spawner(attempt)
        except OSError as error:
            log.warning(
                "%s could not be sent to the spawner yet: %s", attempt.id, error.strerror or "it does not answer"
            )
            self._on_shim_exit(attempt)

    async def _expire_start(self, attempt: RunningAttempt) -> None:
        """End an attempt that was not started in time, once it is certain that no shim can start it any more.

        A shim records its identity, checks the time, then executes the command. So after that time an attempt
        without an identity never starts, even if a stopped spawner or shim is resumed; one with an identity may
        run already.
        """
        await asyncio.sleep(max(attempt.spec.start_by_boot_ms - boot_ms(), 0) / 1000)
        while attempt.id in self._running and attempt.started is None:
            if attempt.is_start_expired and self._can_be_sealed(attempt):
                log.warning("%s was not started in time", attempt.id)
                expired = Outcome(Ending.NEVER_STARTED, detail=START_EXPIRED, node_fault=True)
                self._seal(attempt, expired if attempt.stop is None else attempt.stop.outcome)
                return
            await asyncio.sleep(REPEAT_S)

    def _can_be_sealed(self, attempt: RunningAttempt) -> bool:
        """True if it is certain that its command never starts.

        A free lock is taken: then no spawner gives the attempt to a shim. While a spawner or shim has the lock,
        the time decides.
        """
        try:
            with JobDir(self.root, attempt.id) as job:
                with contextlib.suppress(OSError):  # a full disk: the shim checks the time all the same
                    lock = job.take_lock()
                    if lock is not None:
                        os.close(lock)
                        return True
                return attempt.is_start_expired and read_shim(job) is None
        except OSError:  # its directory cannot be read: nothing is certain
            return False

    def _seal(self, attempt: RunningAttempt, outcome: Outcome) -> None:
        """Record and report the end of an attempt that no shim can start any more."""
        self._record_exit(attempt.id, outcome)
        self._finish(attempt, outcome)

    async def _send_to_spawner(self, attempt: RunningAttempt) -> None:
        """Have a shim run it, which reports on the write end of a pipe."""
        attempt.sends += 1
        channel, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write_end, True)
        attempt.watch_fd = channel
        asyncio.get_running_loop().add_reader(channel, self._read_channel, attempt)
        await self._spawner.send(attempt.id, write_end)

    def _read_channel(self, attempt: RunningAttempt) -> None:
        """Read the reports of a shim, or its end."""
        assert attempt.watch_fd is not None
        data = os.read(attempt.watch_fd, 65536)
        *lines, attempt.received = (attempt.received + data).split(b"\n")
        for line in lines:
            try:
                message = msgspec.json.decode(line, type=ShimReport)
            except msgspec.DecodeError as error:  # its journal will say it
                log.warning("the shim of %s sent an invalid report: %s", attempt.id, error)
                continue
            if message.started is not None:
                self._on_started(attempt, message.started)
            if message.ended is not None and (outcome := outcome_of(message.ended)) is not None:
                self._finish(attempt, outcome)
        if not data and attempt.id in self._running:
            self._on_shim_exit(attempt)

    def _on_started(self, attempt: RunningAttempt, started: StartRecord) -> None:
        attempt.start_record = started
        attempt.started = AttemptLaunch(
            attempt_id=attempt.id,
            fence=attempt.fence,
            pid=started.pid,
            cores=started.cores,
            at_boot_ms=started.at_boot_ms,
            pid_start=started.start,
        )
        shim = process_tree.read_process(started.shim.pid)
        if shim is not None and shim.start == started.shim.start:
            attempt.shim = shim._replace(waited_ticks=started.shim.waited_ticks)
            self.affinity.on_started(attempt, attempt.started.cores, shim.pid)
        self._report(attempt.started)
        attempt.signal_stop(boot_ms())

    # ------------------------------------------------------------------ attempts of the last host

    def _watch_shim(self, attempt: RunningAttempt) -> bool:
        """Watch a shim of an earlier host; False when it is gone or has not started its command yet."""
        with JobDir(self.root, attempt.id) as job:
            if not job.is_locked():
                return False
            started = read_started(job)
        if started is None:
            return False
        try:
            pidfd = os.pidfd_open(started.shim.pid)
        except ProcessLookupError:
            return False
        shim = process_tree.read_process(started.shim.pid)
        if shim is None or shim.start != started.shim.start:  # the pid belongs to another process
            os.close(pidfd)
            return False
        attempt.watch_fd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_shim_exit, attempt)
        self._on_started(attempt, started)
        if cpu_control.is_marked_throttled(self.root):  # the last agent died while this gave way to the owner
            self.affinity.pin(attempt, shim.pid)
            process_tree.signal_all(process_tree.descendants(shim.pid, attempt.exempt), signal.SIGCONT)
        return True

    async def _wait_for_shim(self, attempt: RunningAttempt) -> None:
        with contextlib.suppress(FileNotFoundError), JobDir(self.root, attempt.id) as job:
            while job.is_locked():
                if self._watch_shim(attempt):
                    return
                await asyncio.sleep(0.005)
        await self._resolve_silent_exit(attempt)

    # ------------------------------------------------------------------ ends

    def _on_shim_exit(self, attempt: RunningAttempt) -> None:
        attempt.unwatch()
        self._start_watch(partial(self._resolve_silent_exit, attempt))

    async def _resolve_silent_exit(self, attempt: RunningAttempt) -> None:
        """Resolve the end of a shim that is gone without a report, and make sure that nothing of its tree is left.

        An attempt whose command cannot have run is sent again; one whose command may have run is not. Its end is
        recorded before it is reported.
        """
        try:
            job = JobDir(self.root, attempt.id)
        except (FileNotFoundError, NotADirectoryError):
            await kill_without_record(attempt, self.root)
            detail = "its directory was removed; nothing of it is left"
            self._finish(
                attempt, attempt.stop.outcome if attempt.stop is not None else Outcome(Ending.LOST, detail=detail)
            )
            return
        with job:
            await wait_until(lambda: not job.is_locked())
            record = read_end(job)
            began = attempt.started is not None or may_have_run(job)
            if record is None and not began and attempt.sends < MAX_SENDS and not attempt.is_start_expired:
                job.remove(job_dir.LOCK)
                await self._send_to_spawner(attempt)  # spawner or shim died before it was taken up
                return
            if record is None:
                if began:
                    await kill_leftovers(attempt, job)
                record = _exit_without_shim(attempt, began=began)
                self._record_exit(attempt.id, record)
        self._finish(attempt, record)

    def _record_exit(self, attempt_id: str, outcome: Outcome) -> None:
        """Record an end that no shim has written: now, or on a full disk when there is room."""
        if not self._try_record_exit(attempt_id, outcome):
            self._start_watch(partial(self._record_exit_later, attempt_id, outcome))

    async def _record_exit_later(self, attempt_id: str, outcome: Outcome) -> None:
        while not self._try_record_exit(attempt_id, outcome):
            await asyncio.sleep(REPEAT_S)

    def _try_record_exit(self, attempt_id: str, outcome: Outcome) -> bool:
        """False without room on the disk; a missing directory needs no record."""
        try:
            with JobDir(self.root, attempt_id) as job:
                job.write_exit(msgspec.to_builtins(outcome))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            log.warning("the end of %s could not be recorded yet: %s", attempt_id, error.strerror)
            return False
        return True

    def _finish(self, attempt: RunningAttempt, outcome: Outcome) -> None:
        """Free its cores and report its end. Whatever fails on the way, the end is reported."""
        if self._running.pop(attempt.id, None) is None:
            return
        if attempt.stop is not None and outcome.ending is attempt.stop.ending and not outcome.detail:
            outcome = msgspec.structs.replace(outcome, detail=attempt.stop.detail)  # a signal had no room for it
        if attempt.meter.memory.peak_bytes > outcome.max_memory_bytes:  # the same measure, read by the host
            outcome = msgspec.structs.replace(outcome, max_memory_bytes=attempt.meter.memory.peak_bytes)
        ended = AttemptExit(attempt.id, attempt.fence, outcome, attempt.spec.node)
        self._ended[attempt.id] = ended
        try:
            attempt.unwatch()
            self._count_cpu_time(ended.node, outcome.cpu_ms)
            if attempt.cores:
                self.affinity.rearrange()
            # Have the record of an end on the disk in a moment, unless the control plane has it in its store by then.
            self._unsynced.add(attempt.id)
            if not self._syncs_ends:
                self._syncs_ends = True
                self._start_watch(self._sync_ends)
        except Exception:  # the outermost place of an end: it must be reported
            log.exception("%s has ended, but not all of its traces could be removed", attempt.id)
        try:
            self._report(ended)
        except Exception:  # likewise: the end stays, and so does the duty to report it
            log.exception("the end of %s could not be reported; it is tried again", attempt.id)
            self._start_watch(partial(self._report_later, attempt.id))

    async def _report_later(self, attempt_id: str) -> None:
        """Report an end that could not be reported, unless it is acknowledged meanwhile."""
        await asyncio.sleep(REPEAT_S)
        if ended := self._ended.get(attempt_id):
            self._report(ended)

    async def _sync_ends(self) -> None:
        self._syncs_ends = True
        try:
            while waiting := self._unsynced.copy():
                await asyncio.sleep(SYNC_S)
                await asyncio.to_thread(self._sync, waiting & self._unsynced)
                self._unsynced -= waiting
        finally:
            self._syncs_ends = False

    def _sync(self, attempt_ids: set[str]) -> None:
        for attempt_id in attempt_ids:
            try:
                with JobDir(self.root, attempt_id) as job:
                    job.sync_end()
            except (FileNotFoundError, NotADirectoryError):  # its directory was removed: there is no reader
                pass
            except OSError as error:
                log.warning("the end of %s could not be put on the disk: %s", attempt_id, error.strerror)

    # ------------------------------------------------------------------ stopping and limiting

    async def stop_attempt(
        self,
        attempt_id: str,
        *,
        ending: Ending,
        detail: str = "",
        grace_ms: int | None = None,
        is_disk_overrun: bool = False,
    ) -> None:
        """Stop the whole tree; the first `ending` stays, a later call may shorten the grace.

        It needs no disk: the shim is signalled first; the file is for a later host or shim. Both are repeated
        until nothing of the tree is left. An ended attempt is reported again, an unknown one as never started.
        """
        if ending not in STOP_ENDINGS:
            raise BadInput(f"an attempt cannot be stopped as {str(ending)!r}")
        attempt = self._running.get(attempt_id)
        if attempt is None:
            unknown = AttemptExit(attempt_id, 0, Outcome(Ending.NEVER_STARTED, detail="not known here"))
            self._report(self._find_exit(attempt_id) or unknown)
            return
        now = boot_ms()
        kill_at = now + (attempt.spec.grace_ms if grace_ms is None else grace_ms)
        stop = attempt.request_stop(StopRequest(ending, detail, kill_at, is_disk_overrun))
        if attempt.started is None and attempt.recorded and self._can_be_sealed(attempt):
            self._seal(attempt, stop.outcome)  # its spawner has not taken it yet, or is stopped
            return
        attempt.signal_stop(now)
        if self._record_stop(attempt):
            attempt.signal_stop(now)
        self._repeat_stops()

    def _record_stop(self, attempt: RunningAttempt) -> bool:
        """Write the request to stop it; True if it was written now. On a full disk it is tried again."""
        if attempt.stop is None or attempt.stop.recorded:
            return False
        try:
            with JobDir(self.root, attempt.id) as job:
                job.write(job_dir.STOP, attempt.stop.content)
        except OSError as error:
            log.warning("the stop of %s could not be recorded yet: %s", attempt.id, error.strerror)
            return False
        attempt.stop.recorded = True
        return True

    def _repeat_stops(self) -> None:
        if not self._repeats_stops and self._stopping():
            self._repeats_stops = True
            self._start_watch(self._repeat_until_stopped)

    def _stopping(self) -> list[RunningAttempt]:
        return [attempt for attempt in self._running.values() if attempt.stop is not None]

    async def _repeat_until_stopped(self) -> None:
        self._repeats_stops = True
        try:
            while stopping := self._stopping():
                stops = [attempt.stop for attempt in stopping if attempt.stop is not None]
                deadlines = [stop.kill_at_boot_ms - boot_ms() for stop in stops]
                await asyncio.sleep(min([REPEAT_S, *(ms / 1000 for ms in deadlines if ms > 0)]))
                for attempt in self._stopping():
                    self._record_stop(attempt)
                    attempt.signal_stop(boot_ms())
        finally:
            self._repeats_stops = False

    def resize(self, attempt_id: str, memory_bytes: int, most_memory_bytes: int) -> None:
        """Raise the memory of an attempt whose lease may grow, for its shim. On a full disk it is ordered again."""
        attempt = self._running.get(attempt_id)
        if attempt is None or not attempt.recorded:
            return
        if not attempt.enlarge(memory_bytes, most_memory_bytes) and attempt.memory_recorded:
            return
        spec, attempt.memory_recorded = attempt.spec, False
        try:
            with JobDir(self.root, attempt.id) as job:
                sizes = {"memory_bytes": spec.memory_bytes, "most_memory_bytes": spec.most_memory_bytes}
                job.write(job_dir.MEMORY, {**sizes, "nonce": job.nonce()})
            attempt.memory_recorded = True
            if attempt.shim is not None:
                process_tree.send_signal(attempt.shim, signal.SIGUSR1)
        except OSError as error:
            log.warning("the larger lease of %s could not be recorded yet: %s", attempt.id, error.strerror)

    def extend_hold(self, until_boot_ms: int) -> None:
        self._hold.extend(until_boot_ms, in_use=bool(self._running))

    def forget(self, attempt_id: str) -> None:
        """Its end is acknowledged: do not report it unasked any more. The files stay. Safe twice."""
        if attempt_id not in self._running and job_dir.is_safe_name(attempt_id):
            self._ended.pop(attempt_id, None)
            self._unsynced.discard(attempt_id)
            remove_file(f"{self.root}/{job_dir.LIVE}/{attempt_id}")

    # ------------------------------------------------------------------ state

    @property
    def spawner_pid(self) -> int:
        return self._spawner.pid

    @property
    def exempt(self) -> process_tree.Exempt:
        return self._grid.besides(0)

    def shim_pids(self) -> set[int]:
        return {attempt.shim.pid for attempt in self._running.values() if attempt.shim is not None}

    @property
    def is_held(self) -> bool:
        return self._hold.lasts

    def work_dir(self, attempt_id: str) -> Path:
        """Working directory of an attempt, made if missing: it may be filled before the launch."""
        _check_name(attempt_id)
        with JobDir.make(self.root, attempt_id) as job:
            return Path(job.path, job_dir.WORK)

    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    def unstarted(self) -> list[str]:
        return [attempt.id for attempt in self._running.values() if attempt.started is None]

    def knows(self, attempt_id: str) -> bool:
        return attempt_id in self._running or self._find_exit(attempt_id) is not None

    def is_active(self, attempt_id: str) -> bool:
        """True if its command runs without a request to stop."""
        attempt = self._running.get(attempt_id)
        return attempt is not None and attempt.shim is not None and attempt.stop is None

    def running_trees(self) -> tuple[RunningTree, ...]:
        """The attempts whose commands run, oldest first."""
        return tuple(
            RunningTree(
                spec=attempt.spec,
                fence=attempt.fence,
                shim=attempt.shim,
                stopping=attempt.stop is not None,
                launched_boot_ms=attempt.launched_boot_ms,
                exempt=attempt.exempt,
            )
            for attempt in sorted(self._running.values(), key=lambda attempt: attempt.launched_boot_ms)
            if attempt.shim is not None
        )

    def usage(self) -> dict[str, AttemptUsage]:
        now = boot_ms()
        return {attempt.id: attempt.usage(now) for attempt in self._running.values() if attempt.shim is not None}

    def _find_exit(self, attempt_id: str) -> AttemptExit | None:
        if attempt_id in self._ended or not job_dir.is_safe_name(attempt_id):
            return self._ended.get(attempt_id)
        return read_exit(self.root, attempt_id)


def _check_name(attempt_id: str) -> None:
    if not job_dir.is_safe_name(attempt_id):
        raise BadInput(f"not a safe attempt id: {attempt_id!r}")


def _exit_without_shim(attempt: RunningAttempt, *, began: bool) -> Outcome:
    """The end of an attempt whose shim died: that of its stop request, or else by its progress."""
    if attempt.stop is None and not began and attempt.is_start_expired:
        return Outcome(Ending.NEVER_STARTED, detail=START_EXPIRED, node_fault=True)
    if attempt.stop is None and not began:
        return Outcome(Ending.NEVER_STARTED, detail="could not be started: its supervisor died first")
    lost = Outcome(Ending.LOST, detail="its supervisor died; nothing of it is left")
    record = lost if attempt.stop is None else attempt.stop.outcome
    if attempt.started is None:
        return record
    wall_ms = max(boot_ms() - attempt.started.at_boot_ms, 0)
    return msgspec.structs.replace(record, cpu_ms=attempt.meter.cpu_ms, wall_ms=wall_ms)
