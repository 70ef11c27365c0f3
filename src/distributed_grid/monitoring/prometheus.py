"""Prometheus exposition of the grid, made anew for every scrape.

Names are `grid_…` with their unit, amounts are in base units (cores, bytes, seconds, parts of one). Unknown values
are absent: a node without a fresh report has `grid_node_up` 0 and no measurements. Counters start at zero with the
control plane, as Prometheus expects of a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from distributed_grid import __version__
from distributed_grid.api.answers.metrics import SchedulingFigures
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MoveEnd
from distributed_grid.domain.nodes import cpu_part, gpu_part, pressure
from distributed_grid.domain.rebalancing import ACTIONS
from distributed_grid.domain.states import MOVE_TRANSITIONS, JobState, LeaseState, NodeState
from distributed_grid.monitoring.snapshots import fresh_usage, heartbeat_age_seconds

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NODE_GAUGES = {
    "grid_node_up": "1 for a node with a recent heartbeat; 0 is unknown, not idle.",
    "grid_node_heartbeat_age_seconds": "Age of the latest heartbeat of the node.",
    "grid_node_cpu_capacity_cores": "Cores of the node.",
    "grid_node_memory_capacity_bytes": "Memory of the node.",
    "grid_node_gpu_capacity_devices": "GPUs of the node.",
    "grid_node_cpu_used_ratio": "Part of the cores in use, by anybody.",
    "grid_node_cpu_outside_ratio": "Part of the cores in use by others than the grid.",
    "grid_node_memory_used_bytes": "Memory in use, by anybody.",
    "grid_node_memory_outside_bytes": "Memory in use by others than the grid.",
    "grid_node_gpu_used_ratio": "Mean use of the GPUs.",
    "grid_node_gpu_memory_used_bytes": "GPU memory in use, over all devices.",
    "grid_node_pressure_ratio": "Weighted use of the node: CPU 30 %, memory 30 %, GPU 40 %.",
    "grid_node_cpu_lent_cores": "Cores that leases hold.",
    "grid_node_memory_lent_bytes": "Memory that leases hold.",
    "grid_node_gpu_lent_devices": "GPUs that leases hold.",
    "grid_node_cpu_offered_cores": "Cores the node would lend now.",
    "grid_node_memory_offered_bytes": "Memory the node would lend now.",
    "grid_node_gpu_offered_devices": "GPUs the node would lend now.",
}


class MetricsReading(Struct, frozen=True):
    """Figures of the ledger at one moment; the text is made from them outside the ledger's queue."""

    nodes: list[tuple[str, str, dict[str, float]]]
    leases: Mapping[str, int]
    jobs: Mapping[str, int]
    waiting: int
    alerts: list[tuple[str, str]]
    moves: Mapping[str, int] = {}


def read_ledger(ledger: Ledger, now: int, alerts: Iterable[tuple[str, str]] = ()) -> MetricsReading:
    """`alerts` are the nodes and resources with a raised alert."""
    return MetricsReading(
        nodes=[(name, str(node.state), _node(ledger, name, now)) for name, node in ledger.nodes.items()],
        leases=Counter(str(lease.state) for lease in ledger.leases.values()),
        jobs=Counter(str(job.state) for job in ledger.jobs.values()),
        waiting=len(ledger.waiting),
        alerts=list(alerts),
        moves=Counter(str(move.state) for move in ledger.moves.values()),
    )


def _node(ledger: Ledger, name: str, now: int) -> dict[str, float]:
    """The gauges of a node by their names, without `grid_node_`."""
    node, seen, claims = ledger.nodes[name], ledger.observations.get(name), ledger.claims_on(name)
    has, usage = node.capacity, fresh_usage(node, seen, now)
    gauges: dict[str, float] = {
        "up": usage is not None,
        "cpu_capacity_cores": has.cpu_milli / 1000,
        "memory_capacity_bytes": has.memory_bytes,
        "gpu_capacity_devices": len(has.gpus),
        "cpu_lent_cores": claims.cpu_milli / 1000,
        "memory_lent_bytes": claims.memory_bytes,
        "gpu_lent_devices": sum(claims.gpu_milli.values()) / 1000,
    }
    age = heartbeat_age_seconds(seen, now)
    if age is not None:
        gauges["heartbeat_age_seconds"] = age
    offer = ledger.offers.get(name)
    lends = offer.lends if offer is not None and node.state is NodeState.ALIVE else None
    gauges["cpu_offered_cores"] = max(lends.cpu_milli - claims.cpu_milli, 0) / 1000 if lends else 0
    gauges["memory_offered_bytes"] = max(lends.memory_bytes - claims.memory_bytes, 0) if lends else 0
    gauges["gpu_offered_devices"] = sum(claims.free_milli(gpu) for gpu in lends.gpus) / 1000 if lends else 0
    if usage is None:
        return gauges
    gauges["cpu_used_ratio"] = cpu_part(usage)
    gauges["cpu_outside_ratio"] = usage.cpu_outside_milli / 1000
    gauges["memory_used_bytes"] = usage.memory_bytes
    gauges["memory_outside_bytes"] = usage.memory_outside_bytes
    gauges["pressure_ratio"] = pressure(has, usage)
    busy = gpu_part(usage)
    if busy is not None:
        gauges["gpu_used_ratio"] = busy
        gauges["gpu_memory_used_bytes"] = sum(gpu.in_use_bytes for gpu in usage.gpus)
    return gauges


def exposition(
    reading: MetricsReading,
    events: Mapping[str, int],
    outcomes: Mapping[str, int],
    rebalances: Mapping[str, int] | None = None,
    figures: SchedulingFigures | None = None,
    moves: Mapping[str, int] | None = None,
) -> bytes:
    """Text of a scrape: a reading of the ledger, the counts since the start, and the scheduling figures."""
    families = [*_gauges(reading), *_counters(events, outcomes, rebalances or {}, moves or {})]
    if figures is not None:
        for name, (text, value) in {
            "grid_task_time_mean_seconds": ("Mean run time of jobs.", figures["task_time_mean_seconds"]),
            "grid_task_time_p95_seconds": (
                "Run time that 19 of 20 jobs did not exceed.",
                figures["task_time_p95_seconds"],
            ),
            "grid_resource_efficiency_ratio": ("CPU time used of core time held.", figures["resource_efficiency"]),
            "grid_allocation_success_ratio": ("Part of the requests granted.", figures["allocation_success_rate"]),
            "grid_rebalances_per_hour": ("Rebalances in the last hour.", figures["rebalances_per_hour"]),
        }.items():
            if value is not None:
                families.append(GaugeMetricFamily(name, text, value=value))
    registry = CollectorRegistry()
    registry.register(_FixedCollector(families))
    return generate_latest(registry)


class _FixedCollector(Collector):
    """Collector of given metric families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauges(reading: MetricsReading) -> Iterable[Metric]:
    yield InfoMetricFamily("grid_build", "The control plane.", {"version": __version__})
    families = {name: GaugeMetricFamily(name, text, labels=["node"]) for name, text in NODE_GAUGES.items()}
    states = GaugeMetricFamily("grid_node_state", "1 for the current state of a node.", labels=["node", "state"])
    for name, state, gauges in reading.nodes:
        for key, value in gauges.items():
            families[f"grid_node_{key}"].add_metric([name], value)
        for node_state in NodeState:
            states.add_metric([name, str(node_state)], state == node_state)
    yield from families.values()
    yield states
    leases = GaugeMetricFamily("grid_leases", "Leases that are requested or held.", labels=["state"])
    for lease_state in LeaseState:
        if lease_state is not LeaseState.ENDED:
            leases.add_metric([str(lease_state)], reading.leases.get(str(lease_state), 0))
    jobs = GaugeMetricFamily("grid_jobs", "Jobs that have not ended.", labels=["state"])
    for job_state in JobState:
        if job_state is not JobState.ENDED:
            jobs.add_metric([str(job_state)], reading.jobs.get(str(job_state), 0))
    moves = GaugeMetricFamily("grid_moves", "Moves that have not ended.", labels=["state"])
    for move_state in dict.fromkeys(state for state, _ in MOVE_TRANSITIONS):
        moves.add_metric([str(move_state)], reading.moves.get(str(move_state), 0))
    yield leases
    yield jobs
    yield moves
    yield GaugeMetricFamily("grid_waiting_requests", "Requests that wait for resources.", value=reading.waiting)
    alerts = GaugeMetricFamily("grid_alert_raised", "Alerts that are not cleared.", labels=["node", "resource"])
    for node, resource in reading.alerts:
        alerts.add_metric([node, resource], 1)
    yield alerts


def _counters(
    events: Mapping[str, int], outcomes: Mapping[str, int], rebalances: Mapping[str, int], ends: Mapping[str, int]
) -> Iterable[Metric]:
    ended = CounterMetricFamily("grid_jobs_ended", "Ended jobs, by outcome.", labels=["outcome"])
    for outcome, count in sorted(outcomes.items()):
        ended.add_metric([outcome], count)
    yield ended
    lines = CounterMetricFamily("grid_events", "Lines of the audit trail, by type.", labels=["type"])
    for kind, count in sorted(events.items()):
        lines.add_metric([kind], count)
    yield lines
    done = CounterMetricFamily("grid_rebalances", "Automatic leases, by action.", labels=["action"])
    for action in ACTIONS:
        done.add_metric([action], rebalances.get(action, 0))
    yield done
    advised = events.get("recommended", 0)
    yield CounterMetricFamily("grid_recommendations", "Recommendations to move work.", value=advised)
    moves = CounterMetricFamily("grid_moves_ended", "Ended moves, by end.", labels=["end"])
    for end in MoveEnd:
        moves.add_metric([str(end)], ends.get(str(end), 0))
    yield moves
