"""Scenarios written by hand: two machines, a few jobs, and what goes wrong at which second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_grid.domain.events import JobCancelled, JobSubmitted
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.machine import ScriptedJob
from tests.simulation.scenario import Scenario, UserRequest

GB = 1024**3
PATIENT_MS = 10_000_000


def a_scenario(
    requests: Sequence[UserRequest], faults: Sequence[Fault] = (), *, hold_s: float = 20, seed: int = 1
) -> Scenario:
    """Two far machines of four cores; `ash` is the one that has bad luck."""
    nodes = tuple(
        Node(name=name, capacity=Capacity(4000, 16 * GB), host="far", hold_ms=round(1000 * hold_s), wanted=True)
        for name in ("ash", "birch")
    )
    quiet = max([80_000, *(fault.at_ms + fault.lasts_ms for fault in faults)])
    return Scenario(seed, nodes, "", SchedulingPolicy(), None, list(requests), list(faults), quiet)


def a_job(
    at_s: float, run_s: float, *, uid: str = "job", on: str = "ash", retries: int = 2, grace_s: float = 5, **work: Any
) -> UserRequest:
    """Somebody submits a job of one core for one of the machines; an empty name is any of them."""
    command = ScriptedJob(round(1000 * run_s), **work).command(grace_ms=round(1000 * grace_s))
    request = Request(id=uid, user="ada", ask=Amounts(1000), wait_ms=PATIENT_MS, require=(on,) if on else ())
    return UserRequest(
        round(1000 * at_s), JobSubmitted(id=f"{uid}-name", command=command, request=request, retries=retries)
    )


def a_cancel(at_s: float, uid: str = "job") -> UserRequest:
    return UserRequest(round(1000 * at_s), JobCancelled(uid, "ada"))


def a_fault(kind: FaultKind, at_s: float, lasts_s: float, *, node: str = "ash", strength: float = 0.5) -> Fault:
    return Fault(round(1000 * at_s), kind, node, round(1000 * lasts_s), strength)
