"""A grid at which automatic offloading looks again and again, with levels that a test sets."""

from __future__ import annotations

from itertools import count
from typing import Any

from msgspec.structs import replace

from distributed_grid.domain.events import AttemptMarked, JobSubmitted, OffloadPressureRead
from distributed_grid.domain.jobs import Job, JobEstimate
from distributed_grid.domain.moves import OffloadRules, OffloadWatch
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rebalancing import (
    SHARING_POLICIES,
    Forecast,
    PressureReading,
    RebalanceRules,
    SharingMode,
    Watermarks,
)
from distributed_grid.domain.resources import Priority
from distributed_grid.reactor import Record
from distributed_grid.reactor.effects import PauseAttempt
from distributed_grid.scheduling.pressure.scan import PressureScan, scan_with_lenders
from tests.support.builders import NOW, Scenario, a_command, a_node, a_request

HOUR_MS = 3_600_000


def apart(*names: str, cores: float = 8, memory_gb: float = 32) -> tuple[Node, ...]:
    """Nodes on machines of their own."""
    return tuple(replace(a_node(name, cores=cores, memory_gb=memory_gb), host=name) for name in names)


def rebalance_rules(mode: str = "offload_only", policy: str = "balanced", **marks: int) -> RebalanceRules:
    """The rules of a mode and a policy, rounds of 30 s, the same marks for everything."""
    both = Watermarks(marks.get("high", 800), marks.get("low", 300))
    return RebalanceRules(
        mode=SharingMode(mode), policy=SHARING_POLICIES[policy], interval_ms=30_000, memory=both, cpu=both, gpu=both
    )


class Looks(Scenario):
    """A scenario at which automatic offloading looks."""

    def __init__(
        self,
        *nodes: Node,
        rules: RebalanceRules | None = None,
        offload: OffloadRules | None = None,
        now: int = NOW,
    ) -> None:
        super().__init__(*(nodes or apart("ash", "birch")), now=now)
        self.rules = rules or rebalance_rules()
        self.offload = offload or OffloadRules(enabled=True)
        self._ids = (f"move-{number}" for number in count(1))

    def look(self, **levels: int | tuple[int, int] | PressureReading | None) -> list[Record]:
        """One look at this moment; of nodes that are not named everything is idle. A pair is memory and CPU."""
        readings = tuple(self._reading(name, levels.get(name, 0)) for name in self.ledger.nodes)
        ids = tuple(next(self._ids) for _ in range(16))
        stepped = self.handle(OffloadPressureRead(readings, self.rules, self.offload, ids))
        self.ledger.check()
        return stepped.records

    def looks(self, times: int, **levels: int | tuple[int, int] | PressureReading | None) -> list[Record]:
        """So many looks, each an interval after the last."""
        found: list[Record] = []
        for _ in range(times):
            found += self.look(**levels)
            self.advance(self.offload.interval_ms / 1000)
        return found

    @staticmethod
    def _reading(name: str, level: int | tuple[int, int] | PressureReading | None) -> PressureReading:
        if isinstance(level, PressureReading) or level is None:
            return level or PressureReading(node=name)
        memory, cpu = level if isinstance(level, tuple) else (level, level)
        return PressureReading(node=name, score=(memory + cpu) // 2, memory=memory, cpu=cpu)

    def run_job(
        self,
        uid: str,
        node: str,
        *,
        memory_gb: float = 4,
        cores: float = 1,
        restartable: bool = True,
        expected_s: float = 7200,
        priority: Priority = Priority.MEDIUM,
        **wishes: Any,
    ) -> Job:
        """A job that runs on a node."""
        request = a_request(uid, cores=cores, memory_gb=memory_gb, prefer=[node], priority=priority, **wishes)
        estimate = JobEstimate(run_ms=round(1000 * expected_s)) if expected_s else None
        self.handle(
            JobSubmitted(
                id=f"job-{uid}",
                command=a_command(),
                request=request,
                retries=0,
                estimate=estimate,
                restartable=restartable,
            )
        )
        job = self.start(uid)
        assert job.attempt is not None
        assert job.attempt.node == node
        return job

    def mark(self, uid: str, age_s: float = 0) -> None:
        """The job marks a checkpoint."""
        attempt = self.job(uid).attempt
        assert attempt is not None
        self.handle(AttemptMarked(uid, attempt.number, attempt.fence, round(1000 * age_s)))

    def watch(self, node: str) -> OffloadWatch:
        return self.ledger.offload_watches[node]


def ahead(node: str, memory: int, later: int) -> PressureReading:
    """A node whose memory is at a level, and surely at another one soon."""
    return PressureReading(node=node, score=memory, memory=memory, cpu=0, memory_ahead=Forecast(later, 10))


def kinds(records: list[Record]) -> list[str]:
    return [record.type for record in records]


def scan_now(grid: Looks, **levels: int | PressureReading) -> PressureScan:
    """A scan at this moment; of nodes that are not named everything is idle."""
    readings = tuple(grid._reading(name, levels.get(name, 0)) for name in grid.ledger.nodes)
    return scan_with_lenders(grid.ledger, readings, grid.rules, grid.now, grid.offload)


def pauses(effects: list[object]) -> dict[str, bool]:
    return {one.job.uid: one.paused for one in effects if isinstance(one, PauseAttempt)}


def degraded_grid() -> Looks:
    grid = Looks(*apart("ash"))
    grid.run_job("r1", "ash", restartable=False, priority=Priority.LOW)
    grid.run_job("r2", "ash", restartable=False)
    return grid
