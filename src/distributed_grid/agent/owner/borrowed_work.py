"""Borrowed work on a real host, as the owner guard measures it and acts on it.

A lease whose size was learned from earlier runs is no limit, and the control plane grows it. Where it cannot, or has
not yet, the attempt runs on until the memory of the machine is short: then the attempt with most memory beyond its
lease ends, as over its limit. The agent decides that alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from distributed_grid.agent.execution.attempt import AttemptUsage
from distributed_grid.agent.execution.cpu_control import RunningTree, Throttler
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.files import job_signals
from distributed_grid.agent.limits.process_tree import over_limit_message
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.agent.owner.yield_policy import Borrowed, OwnerOnGpu, UsageSample
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.resources import gigabytes
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import HeldMemory

WATCH_MS = 500
RESERVE_DIVISOR = 40
MAX_RESERVE_BYTES = 512 << 20
"""Memory is short when less than a fortieth of the machine is available, or than 512 MB: half of what offers keep."""
GRACE_MS = 2_000
log = logging.getLogger(__name__)


class OutgrownLeases:
    """The attempts of a host that hold more than they have leased."""

    def __init__(self, host: AttemptHost, meter: UsageMeter) -> None:
        self._host = host
        self._meter = meter

    def reports(self, usage: Mapping[str, AttemptUsage]) -> list[HeldMemory]:
        """Reports for the control plane."""
        return [
            HeldMemory(tree.attempt_id, tree.fence, usage[tree.attempt_id].memory_bytes)
            for tree in self._outgrown(usage)
            if not tree.stopping
        ]

    async def relieve_memory(self) -> None:
        """End one where the memory of the machine is short; the next one when that is gone and it is not enough."""
        if not any(tree.spec.most_memory_bytes for tree in self._host.running_trees()):
            return
        usage = self._host.usage()
        there_is, used, _ = self._meter.memory(usage)
        available = there_is - used
        if available >= min(there_is // RESERVE_DIVISOR, MAX_RESERVE_BYTES):
            return
        outgrown = self._outgrown(usage)
        if not outgrown or any(tree.stopping for tree in outgrown):
            return
        largest = max(outgrown, key=lambda tree: usage[tree.attempt_id].memory_bytes - tree.spec.memory_bytes)
        held = usage[largest.attempt_id].memory_bytes
        detail = f"{beyond_lease(held, largest.spec.memory_bytes)}; its machine has {gigabytes(available)} left"
        log.warning("%s is ended: %s", largest.attempt_id, detail)
        await self._host.stop_attempt(
            largest.attempt_id, ending=Ending.OVER_LIMIT, detail=detail, grace_ms=min(largest.spec.grace_ms, GRACE_MS)
        )

    def _outgrown(self, usage: Mapping[str, AttemptUsage]) -> list[RunningTree]:
        trees = (tree for tree in self._host.running_trees() if tree.attempt_id in usage)
        return [tree for tree in trees if tree.spec.is_outgrown_by(usage[tree.attempt_id].memory_bytes)]


def beyond_lease(held_bytes: int, leased_bytes: int) -> str:
    return f"{over_limit_message(held_bytes, leased_bytes)} leased"


class HostedWork:
    """Attempts of a host, beside the meter's figures; `marked_ago_ms` is the age of a checkpoint mark."""

    def __init__(
        self, host: AttemptHost, meter: UsageMeter, marked_ago_ms: Callable[[str], int | None] = lambda attempt_id: None
    ) -> None:
        self._host = host
        self._meter = meter
        self._marked_ago_ms = marked_ago_ms
        self._throttler = Throttler(host)
        self.running = host.running
        self.throttle = self._throttler.throttle
        self.resume = self._throttler.resume
        self._gpu_sample: asyncio.Task[tuple[OwnerOnGpu, ...]] | None = None

    def sample(self) -> UsageSample | None:
        trees = tuple(sorted(self._host.running_trees(), key=self._at_stake, reverse=True))
        if not trees:
            return None
        usage = self._host.usage()
        moment = self._meter.now(usage)
        attempts = tuple(
            Borrowed(
                attempt_id=tree.attempt_id,
                node=tree.spec.node,
                cpu_milli=tree.spec.cpu_milli,
                memory_leased_bytes=tree.spec.memory_bytes,
                memory_bytes=usage[tree.attempt_id].memory_bytes if tree.attempt_id in usage else 0,
                gpu_indexes=tree.spec.gpu_indexes,
                at_stake=self._at_stake(tree),
                may_run_again=tree.spec.may_run_again or self._marked_ago_ms(tree.attempt_id) is not None,
            )
            for tree in trees
        )
        return replace(moment, attempts=attempts, gpus=self._gpus(trees))

    def _at_stake(self, tree: RunningTree) -> int:
        """Work to repeat after an eviction: thousandths of cores times milliseconds."""
        ran_ms, marked_ago_ms = boot_ms() - tree.launched_boot_ms, self._marked_ago_ms(tree.attempt_id)
        return (tree.spec.cpu_milli or 1000) * (ran_ms if marked_ago_ms is None else min(ran_ms, marked_ago_ms))

    def _gpus(self, trees: tuple[RunningTree, ...]) -> tuple[OwnerOnGpu, ...] | None:
        """Last answer of the driver; it is asked in a thread, as it may hang."""
        if not any(tree.spec.gpu_indexes for tree in trees):
            return None
        asked = self._gpu_sample
        if asked is not None and not asked.done():
            return None
        pids = {proc.pid for tree in trees for proc in tree.processes()}
        self._gpu_sample = asyncio.create_task(asyncio.to_thread(self._meter.owner_on_gpus, pids))
        try:
            return None if asked is None else asked.result()
        except Exception:  # a driver that fails is no reason to let the owner wait for the processors
            log.exception("the GPUs could not be measured for the owner")
            return None

    def pause(self, spared: frozenset[str]) -> list[tuple[str, int]]:
        return [(tree.attempt_id, tree.fence) for tree in self._throttler.pause(spared)]

    def release(self) -> None:
        if self._gpu_sample is not None:
            self._gpu_sample.cancel()
            self._gpu_sample = None
        self._throttler.release()

    def give_notice(self, attempt_id: str, reason: str, in_ms: int) -> int:
        return job_signals.give_notice(self._host.root, attempt_id, reason, in_ms)

    def withdraw_notice(self, attempt_id: str) -> None:
        job_signals.withdraw_notice(self._host.root, attempt_id)

    async def evict(self, attempt_id: str, reason: str, grace_ms: int) -> None:
        """One that holds more than its lease, and is not to be run again for that, ends as over its limit."""
        used = self._host.usage().get(attempt_id)
        tree = next((running for running in self._host.running_trees() if running.attempt_id == attempt_id), None)
        ending, detail = Ending.RECLAIMED, reason
        if used is not None and tree is not None and tree.spec.is_outgrown_by(used.memory_bytes):
            ending, detail = Ending.OVER_LIMIT, f"{beyond_lease(used.memory_bytes, tree.spec.memory_bytes)}; {reason}"
        await self._host.stop_attempt(attempt_id, ending=ending, detail=detail, grace_ms=grace_ms)
