"""Runs attempts on this machine and tells what became of them; the only door to everything in this package.

Rule 1. An attempt id runs at most once, whoever asks how often and whoever crashes in between.
Rule 2. Every attempt is reported ended exactly when nothing of it is left, and again whenever somebody asks.
Rule 3. The directories are the truth. This object only remembers them: made anew, it knows the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distributed_grid.agent.execution import throttle
from distributed_grid.agent.execution.affinity import CoreAffinity
from distributed_grid.agent.execution.attempt import (
    AttemptExit,
    AttemptLaunch,
    AttemptSpec,
    AttemptUsage,
    RunningAttempt,
    ended_from,
    record_of,
)
from distributed_grid.agent.execution.hold import HoldDeadline
from distributed_grid.agent.execution.recovery import how_it_ended, left_behind, recall, was_begun
from distributed_grid.agent.execution.shim_monitor import ShimMonitor
from distributed_grid.agent.execution.spawner_client import SpawnerClient
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.errors import BadInput, StaleFence
from distributed_grid.posix.boot_clock import boot_id, boot_ms

STOP_KINDS = frozenset(
    ("cancelled", "preempted", "reclaimed", "over_limit", "timed_out", "hold_expired", "expired", "lost")
)
PATIENCE_S = 10.0
"""How long the last host of a root may take to let go of it."""


class AttemptHost:
    """Runs, watches and stops attempts below `root`; at most one at a time for a root."""

    def __init__(
        self,
        root: Path,
        *,
        report: Callable[[AttemptLaunch | AttemptExit], None],
        real_cores: Sequence[int] | None = None,
        use_cgroups: bool = True,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._root = str(root.absolute())
        self._report = report
        self._running: dict[str, RunningAttempt] = {}
        self._ended: dict[str, AttemptExit] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._boot_id = boot_id()
        self._hold = HoldDeadline(self._root, self._boot_id)
        self._pins = CoreAffinity(self._root, self._running, real_cores)
        self._handover = SpawnerClient(self._root, use_cgroups=use_cgroups, patience_s=patience_s, do=self._do)
        self._watch = ShimMonitor(
            self._root, self._handover, self._pins, do=self._do, took_off=self._took_off, finish=self._finish
        )
        self._closed = True

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Take the root, start the spawner, and report every attempt found. A second call does nothing."""
        if not self._closed:
            return
        for path in (Path(self._root), Path(self._root, job_dir.LIVE)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._handover.take_root()
        self._closed = False
        self._hold.recall()
        self._handover.begin()
        for attempt in left_behind(self._root):
            self._adopt(attempt)
        throttle.unmark(self._root)

    async def close(self) -> None:
        """Stop watching and let go of the root; what runs goes on. Safe twice."""
        if self._closed:
            return
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for attempt in self._running.values():
            self._watch.leave(attempt)
        await self._handover.end()
        self._running.clear()
        self._ended.clear()

    def _adopt(self, attempt: RunningAttempt) -> None:
        """Go on with what the last agent left, or tell its end; what was never begun is forgotten."""
        with JobDir(self._root, attempt.id) as job:
            record = job.read_end()
            if record is None and not job.is_locked() and not was_begun(job):
                job.remove(job_dir.LOCK)  # recorded, but nobody got to start it: the order comes again
                self.forget(attempt.id)
                return
            recall(attempt, job)
        self._running[attempt.id] = attempt
        if record is not None:
            self._finish(attempt, record)
        else:
            self._watch.adopt(attempt)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ launching

    async def launch(self, spec: AttemptSpec) -> None:
        """Run it, once: a second call tells again what is known. `StaleFence` for an order from the past."""
        if not job_dir.is_safe_name(spec.attempt_id):
            raise BadInput(f"not a safe attempt id: {spec.attempt_id!r}")
        known = self._running.get(spec.attempt_id) or self._find_ended(spec.attempt_id)
        if known is not None:
            self._tell_again(known, spec)
            return
        now = boot_ms()
        attempt = RunningAttempt(spec, spec.fence, now)
        self._running[attempt.id] = attempt
        self._pins.rearrange()
        try:
            with JobDir.make(self._root, attempt.id) as job:
                if spec.hold_ms:
                    self._hold.begin(now, spec.hold_ms)
                job.remove(job_dir.CORES)  # of an earlier order that came to nothing
                record = {"launched_boot_ms": now, "boot": self._boot_id, "cores": attempt.cores}
                job.write(job_dir.SPEC, msgspec.to_builtins(spec) | record)
            attempt.recorded = True
        except OSError as error:
            self._finish(attempt, record_of("never_started", f"could not be recorded: {error.strerror}"))
            return
        await self._watch.hand_over(attempt)

    def _tell_again(self, known: RunningAttempt | AttemptExit, spec: AttemptSpec) -> None:
        if spec.fence < known.fence:
            raise StaleFence(f"{spec.attempt_id}: fence {spec.fence} is older than {known.fence}")
        if spec.fence > known.fence:
            with JobDir(self._root, spec.attempt_id) as job:
                job.write(job_dir.FENCE, spec.fence)
            if isinstance(known, AttemptExit):
                known = msgspec.structs.replace(known, fence=spec.fence)
                self._ended[spec.attempt_id] = known
            else:
                known.fence = spec.fence
                known.started = known.started and msgspec.structs.replace(known.started, fence=spec.fence)
        told = known if isinstance(known, AttemptExit) else known.started
        if told is not None:
            self._report(told)

    # ------------------------------------------------------------------ hearing

    def _took_off(self, attempt: RunningAttempt, started: dict[str, Any]) -> None:
        attempt.started = AttemptLaunch(
            attempt_id=attempt.id,
            fence=attempt.fence,
            pid=started["pid"],
            cores=tuple(started["cores"]),
            at_boot_ms=started["at_boot_ms"],
        )
        shim = process_tree.look(started["shim"]["pid"])
        if shim is not None and shim.start == started["shim"]["start"]:
            attempt.shim = shim._replace(waited_ticks=started["shim"].get("waited_ticks", 0))
        self._pins.took_off(attempt, attempt.started.cores, started["shim"]["pid"])
        self._report(attempt.started)
        if attempt.wake_wanted:
            attempt.wake()

    def _finish(self, attempt: RunningAttempt, record: dict[str, Any]) -> None:
        """It is over: give its cores back and say so."""
        if self._running.pop(attempt.id, None) is None:
            return
        self._watch.leave(attempt)
        ended = ended_from(attempt.id, attempt.fence, record)
        if attempt.meter.peak_bytes > ended.max_memory_bytes:
            ended = msgspec.structs.replace(ended, max_memory_bytes=attempt.meter.peak_bytes)
        self._ended[attempt.id] = ended
        if attempt.cores:
            self._pins.rearrange()
        self._report(ended)

    # ------------------------------------------------------------------ stopping, holding, confining

    async def stop_attempt(self, attempt_id: str, *, kind: str, detail: str = "", grace_ms: int | None = None) -> None:
        """Stop the whole tree; the first `kind` stays, a later call may shorten the grace.

        What has ended is reported again, and what was never seen here as never started.
        """
        if kind not in STOP_KINDS:
            raise BadInput(f"an attempt cannot be stopped as {kind!r}")
        attempt = self._running.get(attempt_id)
        if attempt is None:
            unknown = AttemptExit(attempt_id=attempt_id, fence=0, kind="never_started", detail="not known here")
            self._report(self._find_ended(attempt_id) or unknown)
            return
        grace_ms = attempt.spec.grace_ms if grace_ms is None else grace_ms
        with JobDir(self._root, attempt_id) as job:
            before = job.read(job_dir.STOP)
            request = {"kind": kind, "detail": detail, "kill_at_boot_ms": boot_ms() + grace_ms}
            if before is not None:
                request = before | {"kill_at_boot_ms": min(before["kill_at_boot_ms"], request["kill_at_boot_ms"])}
            if request != before:
                job.write(job_dir.STOP, request)
        attempt.stopping = True
        attempt.wake()

    def hold(self, until_boot_ms: int) -> None:
        """Let everything that has a hold go on until then; a hold never gets shorter."""
        self._hold.extend(until_boot_ms, in_use=bool(self._running))

    def confine(self, cores: Sequence[int] | None) -> None:
        """Keep everything on these cores, or (None) on its own again. Leases and their cores stay what they are."""
        self._pins.confine(cores)

    # ------------------------------------------------------------------ knowing

    @property
    def spawner_pid(self) -> int:
        return self._handover.spawner_pid

    def work_dir(self, attempt_id: str) -> Path:
        """The directory an attempt finds itself in, made if need be: it may be filled before the launch."""
        with JobDir.make(self._root, attempt_id) as job:
            return Path(job.path, job_dir.WORK)

    def running(self) -> tuple[str, ...]:
        """Ids of the attempts that have not ended."""
        return tuple(self._running)

    def knows(self, attempt_id: str) -> bool:
        """Whether it was ever launched here, wherever it is in its life."""
        return attempt_id in self._running or self._find_ended(attempt_id) is not None

    @property
    def is_held(self) -> bool:
        """Whether the hold that was given last has not run out."""
        return self._hold.lasts

    def is_under_way(self, attempt_id: str) -> bool:
        """Whether its command runs and nobody has asked it to end."""
        attempt = self._running.get(attempt_id)
        return attempt is not None and attempt.shim is not None and not attempt.stopping

    def borrowed(self) -> tuple[throttle.ThrottledTree, ...]:
        """The attempts whose commands run, oldest first."""
        running = sorted(self._running.values(), key=lambda one: one.launched_boot_ms)
        return tuple(
            throttle.ThrottledTree(one.spec, one.fence, one.shim, one.stopping, one.launched_boot_ms)
            for one in running
            if one.shim is not None
        )

    @property
    def root(self) -> str:
        return self._root

    @property
    def cores_in_use(self) -> tuple[int, ...]:
        """All cores there are for attempts, those first that some are pinned to."""
        return self._pins.in_use

    def forget(self, attempt_id: str) -> None:
        """Its end is known where it matters: report it no more unasked. The files stay. Safe twice."""
        if attempt_id not in self._running and job_dir.is_safe_name(attempt_id):
            self._ended.pop(attempt_id, None)
            Path(self._root, job_dir.LIVE, attempt_id).unlink(missing_ok=True)

    def usage(self) -> dict[str, AttemptUsage]:
        """What each running attempt's tree has used and holds."""
        now = boot_ms()
        found = {}
        for attempt in self._running.values():
            if attempt.shim is not None:
                found[attempt.id] = AttemptUsage(*attempt.meter.read(attempt.shim, now))
        return found

    def _find_ended(self, attempt_id: str) -> AttemptExit | None:
        """How it ended, from memory or from its directory."""
        if attempt_id in self._ended or not job_dir.is_safe_name(attempt_id):
            return self._ended.get(attempt_id)
        return how_it_ended(self._root, attempt_id)
