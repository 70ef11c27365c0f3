"""Idle workers: those without a lease, since when, and which of them are given back.

Copies of blocks are no lease in this sense: they can move. A worker goes when the part of the window in which it may
have had a lease is below the threshold, the longest idle first, as long as what is lent on the others stays below the
target; where there is a warm pool, down to its size instead. The last one that is warm stays for its cooldown. More
than the maximum are given back at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import ScalingRules, Worker, WorkerResources

Load = tuple[int, int, int]
"""Millicores, bytes of memory, thousandths of GPUs."""


class IdleWorker(Struct, frozen=True):
    """A worker without a lease; `used_milli` is the part of the window that it may have had one."""

    worker: Worker
    idle_ms: int
    used_milli: int


def has_work(ledger: Ledger, node: str) -> bool:
    """Whether anything but copies of blocks is lent on a node."""
    return any(not lease.request.block for lease in ledger.leases_of(node))


def idle_workers(ledger: Ledger, workers: Iterable[Worker], now: int) -> list[IdleWorker]:
    """The workers that have joined and have no lease, the longest idle first."""
    found = [
        _idle_worker(worker, ledger.scaling, now)
        for worker in workers
        if worker.state is WorkerState.JOINED and _is_heard(ledger, worker) and not has_work(ledger, worker.node)
    ]
    return sorted(found, key=lambda one: (-one.idle_ms, one.worker.id))


def _is_heard(ledger: Ledger, worker: Worker) -> bool:
    """Whether its agent is: what became of a silent one is not for scaling to say."""
    node = ledger.nodes.get(worker.node)
    return node is not None and node.state is NodeState.ALIVE


def _idle_worker(worker: Worker, rules: ScalingRules, now: int) -> IdleWorker:
    idle_ms = max(now - max(worker.joined_at_ms, worker.used_at_ms), 0)
    return IdleWorker(worker, idle_ms, 1000 * max(rules.window_ms - idle_ms, 0) // rules.window_ms)


class GiveBack:
    """Which of the idle workers are given back."""

    def __init__(
        self,
        ledger: Ledger,
        serving: Sequence[Worker],
        idle: Sequence[IdleWorker],
        floor: int,
        *,
        has_pool: bool = False,
    ) -> None:
        """`serving` are the workers that are there or on their way; at least `floor` of them are kept. With `has_pool`
        that is the size of a warm pool, which has its headroom: nothing is kept for the target beyond it."""
        self._rules = ledger.scaling
        self._has_pool = has_pool
        self._idle = idle
        self._spare = max(len(serving) - floor, 0)
        joined = [worker for worker in serving if worker.state is WorkerState.JOINED]
        self._joined = len(joined)
        idle_ids = {one.worker.id for one in idle}  # copies of blocks there will move
        self._lent = _sum(_lent_on(ledger, worker) for worker in joined if worker.id not in idle_ids)
        self._has = _sum(_load_of(worker.resources) for worker in joined)

    def choose(self, excess: int, *, resting: bool) -> tuple[list[IdleWorker], str]:
        """The workers to give back, and why not more of them, where that is worth saying.

        So many in `excess` go in any case; the others not while scaling down is `resting`.
        """
        chosen = list(self._idle[: min(excess, self._spare)])
        left = self._has
        for one in chosen:
            left = _less(left, one)
        for one in self._idle[len(chosen) :]:
            if one.used_milli >= self._rules.down_milli or len(chosen) >= self._spare:
                break
            if resting:
                return chosen, "a worker was given back a short while ago"
            left = _less(left, one)
            if not self._has_pool and self._is_above_target(left):
                return chosen, "the others would be above the target without it"
            if len(chosen) == self._joined - 1 and one.idle_ms < self._rules.down_cooldown_ms:
                return chosen, "the last warm worker is kept for its cooldown"
            chosen.append(one)
        return chosen, ""

    def _is_above_target(self, left: Load) -> bool:
        return any(1000 * lent > self._rules.target_milli * has for lent, has in zip(self._lent, left, strict=True))


def _lent_on(ledger: Ledger, worker: Worker) -> Load:
    claims = ledger.claims_on(worker.node)
    return claims.cpu_milli, claims.memory_bytes, sum(claims.gpu_milli.values())


def _load_of(resources: WorkerResources) -> Load:
    return resources.cpu_milli, resources.memory_bytes, WHOLE_GPU * resources.gpu_count


def _less(load: Load, one: IdleWorker) -> Load:
    cpu, memory, gpu = _load_of(one.worker.resources)
    return load[0] - cpu, load[1] - memory, load[2] - gpu


def _sum(loads: Iterable[Load]) -> Load:
    cpu = memory = gpu = 0
    for one in loads:
        cpu, memory, gpu = cpu + one[0], memory + one[1], gpu + one[2]
    return cpu, memory, gpu
