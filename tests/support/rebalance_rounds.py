"""A grid that is balanced round after round, with levels that a test sets."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from distributed_grid.domain.events import PressureRead
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rebalancing import (
    SHARING_POLICIES,
    Advice,
    Forecast,
    PressureReading,
    RebalanceRules,
    RebalanceState,
    SharingMode,
    Watermarks,
)
from distributed_grid.reactor import Record
from distributed_grid.scheduling.pressure.scan import automatic_leases
from tests.support.builders import NOW, Scenario, a_node

INTERVAL_MS = 30_000

Level = int | tuple[int, Forecast] | None


def apart(node: Node) -> Node:
    """A node on a machine of its own."""
    return replace(node, host=node.name)


def three() -> tuple[Node, ...]:
    """A busy master and two workers, each a machine of its own."""
    return tuple(apart(a_node(name, cores=8, memory_gb=30)) for name in ("master", "gpu1", "gpu2"))


def rules(
    policy: str = "balanced",
    mode: str = "dynamic_balancing",
    *,
    high: int = 800,
    low: int = 300,
    excess: int = 200,
    **numbers: object,
) -> RebalanceRules:
    """The rules of a policy, the same marks for every resource; `numbers` of the policy may be changed."""
    chosen = replace(SHARING_POLICIES[policy], **numbers) if numbers else SHARING_POLICIES[policy]
    marks = Watermarks(high, low)
    return RebalanceRules(
        mode=SharingMode(mode),
        policy=chosen,
        interval_ms=INTERVAL_MS,
        memory=marks,
        cpu=marks,
        gpu=marks,
        excess_milli=excess,
    )


def a_reading(
    name: str, memory: Level = 0, cpu: Level = 0, gpu: Level = None, score: int | None = None
) -> PressureReading:
    """A reading of a node; a level may have its forecast. Without one of memory the node is unknown."""
    if memory is None:
        return PressureReading(node=name)
    (m, m_ahead), (c, c_ahead), (g, g_ahead) = _apart(memory), _apart(cpu), _apart(gpu)
    weight = (m or 0) if c is None else ((m or 0) + c) // 2
    return PressureReading(
        node=name,
        score=weight if score is None else score,
        memory=m,
        cpu=c,
        gpu=g,
        memory_ahead=m_ahead,
        cpu_ahead=c_ahead,
        gpu_ahead=g_ahead,
    )


def _apart(level: Level) -> tuple[int | None, Forecast | None]:
    return level if isinstance(level, tuple) else (level, None)


class Rounds(Scenario):
    """A scenario with a rebalancer in it."""

    def __init__(self, *nodes: Node, rules: RebalanceRules, now: int = NOW, ledger: Ledger | None = None) -> None:
        super().__init__(*(nodes or three()), now=now, ledger=ledger)
        self.rules = rules
        self.records: list[Record] = []

    def read(self, *readings: PressureReading) -> list[Record]:
        """One round at this moment, unnamed nodes being idle; its lines in the audit trail."""
        named = {reading.node for reading in readings}
        others = tuple(a_reading(name) for name in self.ledger.nodes if name not in named)
        stepped = self.handle(PressureRead((*readings, *others), self.rules))
        if not all(isinstance(row, RebalanceState) for row in stepped.changes):  # no index is derived from these
            self.ledger.check()
        self.records += stepped.records
        return stepped.records

    def round(self, *readings: PressureReading, times: int = 1) -> list[Record]:
        """`count` rounds, each an interval after the last; their lines in the audit trail."""
        records: list[Record] = []
        for _ in range(times):
            records += self.read(*readings)
            self.advance(self.rules.interval_ms / 1000)
        return records

    @property
    def leases(self) -> list[Lease]:
        return automatic_leases(self.ledger)

    def advice(self, node: str) -> Advice | None:
        balance = self.ledger.rebalance_states.get(node)
        return balance.advice if balance is not None else None


def actions(records: list[Record]) -> list[str]:
    """Actions of the rounds: `asked`, `refused`, `given_back`, `recommended`."""
    kinds = {"rebalanced", "recommended"}
    return [str(record.data.get("action", record.type)) for record in records if record.type in kinds]


SHARE = "share_and_offload"
HARD = a_reading("master", memory=900)
CALM = a_reading("master", memory=500)
IDLE = a_reading("master", memory=100)


def begin_rounds(policy: str = "aggressive", mode: str = SHARE, **numbers: Any) -> Rounds:
    """Three machines that are balanced by a policy; its `numbers` may be changed."""
    return Rounds(rules=rules(policy, mode, **numbers))
