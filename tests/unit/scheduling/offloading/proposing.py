"""Proposals for leaving a node of three."""

from __future__ import annotations

from typing import Any

from distributed_grid.domain.processes import ProcessInfo
from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.scheduling.offloading.proposals import Proposal, propose
from distributed_grid.scheduling.pressure.scan import PressureScan, scan_pressure
from tests.support.builders import GB, Scenario
from tests.support.rebalance_rounds import a_reading, rules

PRESSED = a_reading("master", memory=900, cpu=200)
BIG: dict[str, Any] = {"pss_bytes": 4 * GB, "cpu_milli": 900, "cpu_ms": 60_000}


def a_scan(scenario: Scenario, *readings: PressureReading, **numbers: Any) -> PressureScan:
    named = {reading.node for reading in readings}
    idle = (a_reading(name) for name in scenario.ledger.nodes if name not in named)
    return scan_pressure(scenario.ledger, (*readings, *idle), rules(**numbers), scenario.now)


def propose_all(
    scenario: Scenario, *processes: ProcessInfo, reading: PressureReading = PRESSED, **how: Any
) -> list[Proposal]:
    return propose(a_scan(scenario, reading), "master", processes, scenario.ledger.consents, **how)


def the_only(proposals: list[Proposal]) -> Proposal:
    (one,) = proposals
    return one
