"""Borrowed work on a real host, as the owner guard measures it and acts on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from distributed_grid.agent.execution.cpu_control import RunningTree, Throttler
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.files import job_signals
from distributed_grid.agent.owner.eviction import Borrowed, OwnerOnGpu, UsageSample
from distributed_grid.agent.owner.outgrown_leases import beyond_lease
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.posix.boot_clock import boot_ms

log = logging.getLogger(__name__)


class HostedWork:
    """The attempts of a host beside what the meter measures; `marked_ago_ms` says when one marked a checkpoint."""

    def __init__(
        self,
        host: AttemptHost,
        meter: UsageMeter,
        marked_ago_ms: Callable[[str], int | None] = lambda attempt_id: None,
    ) -> None:
        self._host = host
        self._meter = meter
        self._marked_ago_ms = marked_ago_ms
        self._throttler = Throttler(host)
        self._gpu_sample: asyncio.Task[tuple[OwnerOnGpu, ...]] | None = None

    def running(self) -> Collection[str]:
        return self._host.running()

    def sample(self) -> UsageSample | None:
        trees = tuple(sorted(self._host.running_trees(), key=self._at_stake, reverse=True))
        if not trees:
            return None
        usage = self._host.usage()
        moment = self._meter.now(usage)
        attempts = tuple(
            Borrowed(
                attempt_id=one.attempt_id,
                node=one.spec.node,
                cpu_milli=one.spec.cpu_milli,
                memory_leased_bytes=one.spec.memory_bytes,
                memory_bytes=usage[one.attempt_id].memory_bytes if one.attempt_id in usage else 0,
                gpu_indexes=one.spec.gpu_indexes,
                at_stake=self._at_stake(one),
                may_run_again=one.spec.may_run_again or self._marked_ago_ms(one.attempt_id) is not None,
            )
            for one in trees
        )
        return UsageSample(
            machine_milli=moment.machine_milli,
            outside_milli=moment.outside_milli,
            own_milli=moment.own_milli,
            attempts=attempts,
            memory_bytes=moment.memory_bytes,
            memory_available_bytes=moment.memory_available_bytes,
            memory_outside_bytes=moment.memory_outside_bytes,
            gpus=self._gpus(trees),
        )

    def _at_stake(self, one: RunningTree) -> int:
        """How much work would have to be done again: thousandths of cores times milliseconds."""
        ran_ms, marked_ago_ms = boot_ms() - one.launched_boot_ms, self._marked_ago_ms(one.attempt_id)
        return (one.spec.cpu_milli or 1000) * (ran_ms if marked_ago_ms is None else min(ran_ms, marked_ago_ms))

    def _gpus(self, trees: tuple[RunningTree, ...]) -> tuple[OwnerOnGpu, ...] | None:
        """What the last question to the driver brought; it is asked in a thread, as it may hang."""
        if not any(one.spec.gpu_indexes for one in trees):
            return None
        asked = self._gpu_sample
        if asked is not None and not asked.done():
            return None
        pids = {proc.pid for one in trees for proc in one.processes()}
        self._gpu_sample = asyncio.create_task(asyncio.to_thread(self._meter.owner_on_gpus, pids))
        try:
            return None if asked is None else asked.result()
        except Exception:  # a driver that fails is no reason to let the owner wait for the processors
            log.exception("the GPUs could not be measured for the owner")
            return None

    def throttle(self, cores: int | None, running_milli: int) -> None:
        self._throttler.throttle(cores, running_milli)

    def pause(self, spared: frozenset[str]) -> list[tuple[str, int]]:
        return [(one.attempt_id, one.fence) for one in self._throttler.pause(spared)]

    def resume(self, attempt_id: str | None = None) -> None:
        self._throttler.resume(attempt_id)

    def release(self) -> None:
        if self._gpu_sample is not None:
            self._gpu_sample.cancel()
            self._gpu_sample = None
        self._throttler.release()

    def give_notice(self, attempt_id: str, why: str, in_ms: int) -> int:
        return job_signals.give_notice(self._host.root, attempt_id, why, in_ms)

    def withdraw_notice(self, attempt_id: str) -> None:
        job_signals.withdraw_notice(self._host.root, attempt_id)

    async def evict(self, attempt_id: str, why: str, grace_ms: int) -> None:
        """One that holds more than its lease, and is not to be run again for that, ends as over its limit."""
        used = self._host.usage().get(attempt_id)
        tree = next((one for one in self._host.running_trees() if one.attempt_id == attempt_id), None)
        if used is not None and tree is not None and tree.spec.is_outgrown_by(used.memory_bytes):
            detail = f"{beyond_lease(used.memory_bytes, tree.spec.memory_bytes)}; {why}"
            await self._host.stop_attempt(attempt_id, kind="over_limit", detail=detail, grace_ms=grace_ms)
            return
        await self._host.stop_attempt(attempt_id, kind="reclaimed", detail=why, grace_ms=grace_ms)
