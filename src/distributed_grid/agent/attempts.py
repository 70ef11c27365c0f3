"""Runs attempts on this machine and tells what became of them; the only door to everything in this package.

Rule 1. An attempt id runs at most once, whoever asks how often and whoever crashes in between.
Rule 2. Every attempt is reported ended exactly when nothing of it is left, and again whenever somebody asks.
Rule 3. The directories are the truth. This object only remembers them: made anew, it knows the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distributed_grid.agent import jobdir, throttling, tree
from distributed_grid.agent.clearing import clear, was_begun
from distributed_grid.agent.cores import Claim, arrange, within
from distributed_grid.agent.jobdir import JobDir
from distributed_grid.agent.limits.alarm import boot_ms
from distributed_grid.agent.limits.memory import TreeMeter
from distributed_grid.agent.reports import (
    AttemptEnded,
    AttemptSpec,
    AttemptStarted,
    AttemptUsage,
    ended_from,
    record_of,
)
from distributed_grid.agent.spawner import SpawnerLink
from distributed_grid.errors import BadInput, StaleFence

HALT_KINDS = frozenset(
    ("cancelled", "preempted", "reclaimed", "over_limit", "timed_out", "hold_expired", "expired", "lost")
)
HOST_LOCK_WAIT_S = 10.0
log = logging.getLogger(__name__)
SENDS = 5  # to a spawner that dies each time


class _Attempt:
    """What is remembered about one attempt that has not ended."""

    def __init__(self, spec: AttemptSpec, fence: int, launched_boot_ms: int) -> None:
        self.spec = spec
        self.fence = fence
        self.launched_boot_ms = launched_boot_ms
        self.recorded = False
        self.halting = False
        self.cores: tuple[int, ...] = ()
        self.started: AttemptStarted | None = None
        self.shim: tree.Proc | None = None
        self.watched: int | None = None  # the channel, or the pidfd of an adopted shim
        self.heard = b""
        self.sends = 0
        self.wake_wanted = False
        self.meter = TreeMeter()

    @property
    def id(self) -> str:
        return self.spec.attempt_id


class AttemptHost:
    """Runs, watches and stops attempts below `root`; at most one at a time for a root."""

    def __init__(
        self,
        root: Path,
        *,
        report: Callable[[AttemptStarted | AttemptEnded], None],
        real_cores: Sequence[int] | None = None,
        use_cgroups: bool = True,
    ) -> None:
        self._root = str(root.absolute())
        self._report = report
        self._real_cores = sorted(os.sched_getaffinity(0) if real_cores is None else real_cores)
        self._link = SpawnerLink(self._root, use_cgroups=use_cgroups)
        self._linked = asyncio.Event()
        self._running: dict[str, _Attempt] = {}
        self._ended: dict[str, AttemptEnded] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._held_until = self._held_on_disk = 0
        self._allowed: tuple[int, ...] | None = None
        self._own_cores = sorted(os.sched_getaffinity(0))
        self._boot_id = tree.boot_id()
        self._closed = True

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Take the root, start the spawner, and report every attempt found. A second call does nothing."""
        if not self._closed:
            return
        for path in (Path(self._root), Path(self._root, jobdir.LIVE)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:  # a predecessor's spawner may need a moment to see that it is alone
            await asyncio.wait_for(_until(self._link.take_root), HOST_LOCK_WAIT_S)
        except TimeoutError as error:
            self._link.leave_root()
            raise BadInput(f"{self._root} is in use by another agent") from error
        self._closed = False
        self._held_until = self._held_on_disk = jobdir.read_hold(self._root, self._boot_id)
        self._connect()
        self._adopt_all()
        throttling.unmark(self._root)

    async def close(self) -> None:
        """Stop watching and let go of the root; what runs goes on. Safe twice."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for attempt in self._running.values():
            self._unwatch(attempt)
        if self._link.fileno() >= 0:
            loop.remove_reader(self._link.fileno())
        self._linked.clear()
        self._link.end()
        await _until(self._link.ended)
        self._link.leave_root()
        self._running.clear()
        self._ended.clear()

    def _connect(self) -> None:
        self._link.begin()
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._spawner_gone)
        self._linked.set()

    def _spawner_gone(self) -> None:
        """Its socket ended (it never speaks otherwise): start another."""
        asyncio.get_running_loop().remove_reader(self._link.fileno())
        self._linked.clear()
        self._link.end()
        self._do(self._reconnect())

    async def _reconnect(self) -> None:
        await _until(self._link.ended)
        await asyncio.sleep(self._link.pause_s())
        self._connect()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ launching

    async def launch(self, spec: AttemptSpec) -> None:
        """Run it, once: a second call tells again what is known. `StaleFence` for an order from the past."""
        if not jobdir.is_safe_name(spec.attempt_id):
            raise BadInput(f"not a safe attempt id: {spec.attempt_id!r}")
        known = self._running.get(spec.attempt_id) or self._find_ended(spec.attempt_id)
        if known is not None:
            self._tell_again(known, spec)
            return
        now = boot_ms()
        attempt = _Attempt(spec, spec.fence, now)
        self._running[attempt.id] = attempt
        self._rearrange()
        try:
            with JobDir.make(self._root, attempt.id) as job:
                if spec.hold_ms:
                    self._held_until = self._held_until if self._held_until > now else now + spec.hold_ms
                    self._write_hold()
                job.remove(jobdir.CORES)  # of an earlier order that came to nothing
                record = {"launched_boot_ms": now, "boot": self._boot_id, "cores": attempt.cores}
                job.write(jobdir.SPEC, msgspec.to_builtins(spec) | record)
            attempt.recorded = True
        except OSError as error:
            self._finish(attempt, record_of("never_started", f"could not be recorded: {error.strerror}"))
            return
        await self._hand_over(attempt)

    def _tell_again(self, known: _Attempt | AttemptEnded, spec: AttemptSpec) -> None:
        if spec.fence < known.fence:
            raise StaleFence(f"{spec.attempt_id}: fence {spec.fence} is older than {known.fence}")
        if spec.fence > known.fence:
            with JobDir(self._root, spec.attempt_id) as job:
                job.write(jobdir.FENCE, spec.fence)
            if isinstance(known, AttemptEnded):
                known = msgspec.structs.replace(known, fence=spec.fence)
                self._ended[spec.attempt_id] = known
            else:
                known.fence = spec.fence
                known.started = known.started and msgspec.structs.replace(known.started, fence=spec.fence)
        told = known if isinstance(known, AttemptEnded) else known.started
        if told is not None:
            self._report(told)

    async def _hand_over(self, attempt: _Attempt) -> None:
        """Give it to the spawner, with the writing end of a pipe on which the shim will tell its story."""
        attempt.sends += 1
        channel, telling = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(telling, True)
        attempt.watched = channel
        asyncio.get_running_loop().add_reader(channel, self._hear, attempt)
        try:
            await self._linked.wait()
            while not self._link.send(attempt.id, telling):
                await self._room_in_link()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the spawner just died: the channel ends with this block, and that leads back here
        finally:
            os.close(telling)

    async def _room_in_link(self) -> None:
        loop = asyncio.get_running_loop()
        room: asyncio.Future[None] = loop.create_future()
        fd = self._link.fileno()
        loop.add_writer(fd, _resolve, room)
        try:
            await room
        finally:
            loop.remove_writer(fd)

    # ------------------------------------------------------------------ listening

    def _hear(self, attempt: _Attempt) -> None:
        """The shim told something, or is gone."""
        assert attempt.watched is not None
        told = os.read(attempt.watched, 65536)
        *lines, attempt.heard = (attempt.heard + told).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "started" in message:
                self._took_off(attempt, message["started"])
            else:
                self._finish(attempt, message["ended"])
        if not told:
            self._unwatch(attempt)
            self._do(self._after_shim(attempt))

    def _unwatch(self, attempt: _Attempt) -> None:
        if attempt.watched is not None:
            asyncio.get_running_loop().remove_reader(attempt.watched)
            os.close(attempt.watched)
            attempt.watched = None

    def _took_off(self, attempt: _Attempt, started: dict[str, Any]) -> None:
        attempt.started = AttemptStarted(
            attempt_id=attempt.id,
            fence=attempt.fence,
            pid=started["pid"],
            cores=tuple(started["cores"]),
            at_boot_ms=started["at_boot_ms"],
        )
        shim = tree.look(started["shim"]["pid"])
        if shim is not None and shim.start == started["shim"]["start"]:
            attempt.shim = shim._replace(waited_ticks=started["shim"].get("waited_ticks", 0))
        if attempt.cores != attempt.started.cores or self._allowed is not None:
            self._pin(attempt, started["shim"]["pid"])
        self._report(attempt.started)
        if attempt.wake_wanted:
            self._wake(attempt)

    def _finish(self, attempt: _Attempt, record: dict[str, Any]) -> None:
        """It is over: give its cores back and say so."""
        if self._running.pop(attempt.id, None) is None:
            return
        self._unwatch(attempt)
        ended = ended_from(attempt.id, attempt.fence, record)
        if attempt.meter.peak_bytes > ended.max_memory_bytes:
            ended = msgspec.structs.replace(ended, max_memory_bytes=attempt.meter.peak_bytes)
        self._ended[attempt.id] = ended
        if attempt.cores:
            self._rearrange()
        self._report(ended)

    async def _after_shim(self, attempt: _Attempt) -> None:
        """Its shim is gone without a word: find out what happened, and make sure that nothing is left."""
        with JobDir(self._root, attempt.id) as job:
            await _until(lambda: not job.is_locked())
            record = job.read_end()
            begun = was_begun(job)
            if record is None and not begun and attempt.sends < SENDS:
                job.remove(jobdir.LOCK)
                await self._hand_over(attempt)  # spawner or shim died before it was taken up
                return
            if record is None:
                if begun:
                    await clear(job)
                    record = record_of("lost", "its supervisor died; nothing of it is left")
                else:
                    record = record_of("never_started", "could not be started: its supervisor died first")
                job.write(jobdir.EXIT, record, durable=True)
        self._finish(attempt, record)

    # ------------------------------------------------------------------ stopping, holding, pausing

    async def halt(self, attempt_id: str, *, kind: str, detail: str = "", grace_ms: int | None = None) -> None:
        """Stop the whole tree; the first `kind` stays, a later call may shorten the grace.

        What has ended is reported again, and what was never seen here as never started.
        """
        if kind not in HALT_KINDS:
            raise BadInput(f"an attempt is not halted as {kind!r}")
        attempt = self._running.get(attempt_id)
        if attempt is None:
            unknown = AttemptEnded(attempt_id=attempt_id, fence=0, kind="never_started", detail="not known here")
            self._report(self._find_ended(attempt_id) or unknown)
            return
        grace_ms = attempt.spec.grace_ms if grace_ms is None else grace_ms
        with JobDir(self._root, attempt_id) as job:
            before = job.read(jobdir.HALT)
            halt = {"kind": kind, "detail": detail, "kill_at_boot_ms": boot_ms() + grace_ms}
            if before is not None:
                halt = before | {"kill_at_boot_ms": min(before["kill_at_boot_ms"], halt["kill_at_boot_ms"])}
            if halt != before:
                job.write(jobdir.HALT, halt)
        attempt.halting = True
        self._wake(attempt)

    def hold(self, until_boot_ms: int) -> None:
        """Let everything that has a hold go on until then; a hold never gets shorter."""
        if until_boot_ms <= self._held_until:
            return
        self._held_until = until_boot_ms
        if self._running:
            self._write_hold()

    def _write_hold(self) -> None:
        if self._held_until == self._held_on_disk:
            return
        try:
            jobdir.write_hold(self._root, self._held_until, self._boot_id)
            self._held_on_disk = self._held_until
        except OSError as error:  # a full disk: what runs is stopped in time, as if nobody had been heard
            log.warning("the hold could not be renewed: %s", error.strerror)

    async def pause(self, attempt_id: str) -> None:
        """Stop every process of the tree where it stands. Nothing happens to what has ended."""
        attempt = self._running.get(attempt_id)
        if attempt is None or attempt.shim is None:
            return
        tree.freeze(attempt.shim.pid)

    async def resume(self, attempt_id: str) -> None:
        """Let every process of the tree run on. Nothing happens to what has ended or runs already."""
        attempt = self._running.get(attempt_id)
        if attempt is not None and attempt.shim is not None:
            tree.send_all(tree.below(attempt.shim.pid), signal.SIGCONT)

    def _wake(self, attempt: _Attempt) -> None:
        """Make the shim look into its directory; one that has not started its command is woken when it has."""
        attempt.wake_wanted = attempt.shim is None
        if attempt.shim is not None:
            tree.send(attempt.shim, signal.SIGUSR1)

    # ------------------------------------------------------------------ knowing

    @property
    def spawner_pid(self) -> int:
        return self._link.pid

    def work_dir(self, attempt_id: str) -> Path:
        """The directory an attempt finds itself in, made if need be: it may be filled before the launch."""
        with JobDir.make(self._root, attempt_id) as job:
            return Path(job.path, jobdir.WORK)

    def running(self) -> tuple[str, ...]:
        """Ids of the attempts that have not ended."""
        return tuple(self._running)

    def knows(self, attempt_id: str) -> bool:
        """Whether it was ever launched here, wherever it is in its life."""
        return attempt_id in self._running or self._find_ended(attempt_id) is not None

    @property
    def is_held(self) -> bool:
        """Whether the hold that was given last has not run out."""
        return self._held_until > boot_ms()

    def is_under_way(self, attempt_id: str) -> bool:
        """Whether its command runs and nobody has asked it to end."""
        attempt = self._running.get(attempt_id)
        return attempt is not None and attempt.shim is not None and not attempt.halting

    def borrowed(self) -> tuple[throttling.Tree, ...]:
        """The attempts whose commands run, oldest first."""
        attempts = sorted(self._running.values(), key=lambda attempt: attempt.launched_boot_ms)
        return tuple(
            throttling.Tree(attempt.spec, attempt.fence, attempt.shim, attempt.halting, attempt.launched_boot_ms)
            for attempt in attempts
            if attempt.shim is not None
        )

    @property
    def root(self) -> str:
        return self._root

    @property
    def cores_in_use(self) -> tuple[int, ...]:
        """All cores there are for attempts, those first that some are pinned to."""
        pinned = {core for attempt in self._running.values() for core in attempt.cores}
        return tuple(sorted(self._real_cores, key=lambda core: core not in pinned))

    def forget(self, attempt_id: str) -> None:
        """Its end is known where it matters: report it no more unasked. The files stay. Safe twice."""
        if attempt_id not in self._running and jobdir.is_safe_name(attempt_id):
            self._ended.pop(attempt_id, None)
            Path(self._root, jobdir.LIVE, attempt_id).unlink(missing_ok=True)

    def usage(self) -> dict[str, AttemptUsage]:
        """What each running attempt's tree has used and holds."""
        now = boot_ms()
        found = {}
        for attempt in self._running.values():
            if attempt.shim is not None:
                found[attempt.id] = AttemptUsage(*attempt.meter.read(attempt.shim, now))
        return found

    def _find_ended(self, attempt_id: str) -> AttemptEnded | None:
        """How it ended, from memory or from its directory."""
        if attempt_id in self._ended or not jobdir.is_safe_name(attempt_id):
            return self._ended.get(attempt_id)
        try:
            with JobDir(self._root, attempt_id) as job:
                spec, record = job.read(jobdir.SPEC), job.read_end()
                fence = job.read(jobdir.FENCE) or 0
        except (FileNotFoundError, NotADirectoryError):
            return None
        return ended_from(attempt_id, max(fence, spec["fence"]), record) if spec and record else None

    # ------------------------------------------------------------------ adopting

    def _adopt_all(self) -> None:
        found = []
        for live in tuple(Path(self._root, jobdir.LIVE).iterdir()):
            try:
                with JobDir(self._root, live.name) as job:
                    spec = job.read(jobdir.SPEC)
            except (FileNotFoundError, NotADirectoryError):
                spec = None
            if spec is None:  # the last agent died before it had written what to run
                live.unlink(missing_ok=True)
            else:
                found.append((spec["launched_boot_ms"], live.name, msgspec.convert(spec, AttemptSpec)))
        for launched, _, spec in sorted(found, key=lambda item: item[:2]):
            self._adopt(_Attempt(spec, spec.fence, launched))

    def _adopt(self, attempt: _Attempt) -> None:
        with JobDir(self._root, attempt.id) as job:
            record = job.read_end()
            if record is None and not job.is_locked() and not was_begun(job):
                job.remove(jobdir.LOCK)  # recorded, but nobody got to start it: the order comes again
                self.forget(attempt.id)
                return
            attempt.fence = max(attempt.fence, job.read(jobdir.FENCE) or 0)
            attempt.cores = tuple(job.read(jobdir.CORES) or job.read(jobdir.SPEC).get("cores") or ())
            attempt.halting = job.has(jobdir.HALT)
        attempt.recorded = True
        attempt.sends = SENDS  # whatever it was, it is not started anew without being asked
        self._running[attempt.id] = attempt
        if record is not None:
            self._finish(attempt, record)
        elif not self._watch_shim(attempt):
            self._do(self._wait_for_shim(attempt))

    def _watch_shim(self, attempt: _Attempt) -> bool:
        """Watch a shim somebody else had forked; False when it is gone or has not started its command yet."""
        with JobDir(self._root, attempt.id) as job:
            if not job.is_locked():
                return False
            started = job.read(jobdir.STARTED)
        if started is None:
            return False
        try:
            pidfd = os.pidfd_open(started["shim"]["pid"])
        except ProcessLookupError:
            return False
        attempt.watched = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._shim_ended, attempt)
        self._took_off(attempt, started)
        if throttling.is_marked(self._root):  # the last agent died while this gave way to the owner
            self._pin(attempt, started["shim"]["pid"])
            tree.send_all(tree.below(started["shim"]["pid"]), signal.SIGCONT)
        return True

    async def _wait_for_shim(self, attempt: _Attempt) -> None:
        with JobDir(self._root, attempt.id) as job:
            while job.is_locked():
                if self._watch_shim(attempt):
                    return
                await asyncio.sleep(0.005)
        await self._after_shim(attempt)

    def _shim_ended(self, attempt: _Attempt) -> None:
        self._unwatch(attempt)
        self._do(self._after_shim(attempt))

    # ------------------------------------------------------------------ cores

    def _rearrange(self) -> None:
        """Pin as `cores.arrange` says, those included that have to make room."""
        claims = {
            attempt.id: Claim(attempt.spec.cpu_milli, attempt.cores)
            for attempt in self._running.values()
            if attempt.spec.cpu_milli
        }
        for attempt_id, cores in arrange(claims, self._real_cores).items():
            attempt = self._running[attempt_id]
            if cores != attempt.cores:
                attempt.cores = cores
                if attempt.recorded:  # else they go into the record with the rest
                    self._note_cores(attempt)
                if attempt.shim is not None:
                    self._pin(attempt, attempt.shim.pid)

    def _note_cores(self, attempt: _Attempt) -> None:
        try:
            with JobDir(self._root, attempt.id) as job:
                job.write(jobdir.CORES, attempt.cores)
        except OSError as error:  # a full disk: it is moved all the same, and only the next agent will wonder
            log.warning("the cores of %s could not be noted: %s", attempt.id, error.strerror)

    def confine(self, cores: Sequence[int] | None) -> None:
        """Keep everything on these cores, or (None) on its own again. Leases and their cores stay what they are."""
        allowed = None if cores is None else tuple(sorted(cores))
        if allowed == self._allowed:
            return
        self._allowed = allowed
        for attempt in self._running.values():
            if attempt.shim is not None:
                self._pin(attempt, attempt.shim.pid)

    def _pin(self, attempt: _Attempt, shim_pid: int) -> None:
        """The one place that moves a tree: to its own cores, as far as they are allowed now."""
        tree.pin(shim_pid, within(attempt.cores or self._own_cores, self._allowed))


async def _until(true: Callable[[], bool]) -> None:
    """Wait for what nobody announces: that a lock is free, that a process is gone."""
    while not true():
        await asyncio.sleep(0.002)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
