"""The exposition can be read by Prometheus' own parser, and has nothing about what is not known."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.monitoring.prometheus import NODE_GAUGES, exposition, read_ledger
from tests.support.builders import GB, Scenario, a_node, a_request

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(text: bytes) -> Samples:
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert all(family.documentation for family in families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def at(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def a_scenario() -> Scenario:
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16, gpus=1), a_node('odd"\\name', cores=2))
    scenario.now += 10_000
    scenario.heartbeat(
        "gpu1",
        Usage(
            cpu_busy_milli=500,
            cpu_outside_milli=250,
            memory_bytes=4 * GB,
            memory_outside_bytes=2 * GB,
            gpus=(GpuUsage(0, 300, GB),),
        ),
    )
    scenario.advance(0, heard=False)
    scenario.submit(a_request("r1", cores=1, memory_gb=1), starts=True)
    scenario.submit(a_request("r2", cores=4))
    scenario.now += 1_000
    return scenario


def test_a_scrape_is_read_by_the_official_parser() -> None:
    scenario = a_scenario()
    reading = read_ledger(scenario.ledger, scenario.now, [("gpu1", "memory")])
    samples = scrape(exposition(reading, {"granted": 7}, {"exited": 3, "lost": 1}))
    assert at(samples, "grid_node_up", node="gpu1") == 1
    assert at(samples, "grid_node_cpu_capacity_cores", node="gpu1") == 4
    assert at(samples, "grid_node_memory_capacity_bytes", node="gpu1") == 16 * GB
    assert at(samples, "grid_node_cpu_used_ratio", node="gpu1") == 0.5
    assert at(samples, "grid_node_cpu_outside_ratio", node="gpu1") == 0.25
    assert at(samples, "grid_node_memory_used_bytes", node="gpu1") == 4 * GB
    assert at(samples, "grid_node_memory_outside_bytes", node="gpu1") == 2 * GB
    assert at(samples, "grid_node_gpu_used_ratio", node="gpu1") == 0.3
    assert at(samples, "grid_node_cpu_lent_cores", node="gpu1") == 1
    assert at(samples, "grid_node_memory_lent_bytes", node="gpu1") == GB
    assert at(samples, "grid_node_cpu_offered_cores", node="gpu1") == 3
    assert at(samples, "grid_node_heartbeat_age_seconds", node="gpu1") == 1
    assert at(samples, "grid_node_pressure_ratio", node="gpu1") == 0.345
    assert at(samples, "grid_node_state", node="gpu1", state="alive") == 1
    assert at(samples, "grid_node_state", node="gpu1", state="lost") == 0
    assert at(samples, "grid_leases", state="active") == 1
    assert at(samples, "grid_leases", state="asked") == 1
    assert at(samples, "grid_jobs", state="running") == 1
    assert at(samples, "grid_jobs", state="queued") == 1
    assert at(samples, "grid_jobs", state="stopping") == 0
    assert at(samples, "grid_waiting_requests") == 1
    assert at(samples, "grid_alert_raised", node="gpu1", resource="memory") == 1
    assert at(samples, "grid_jobs_ended_total", outcome="exited") == 3
    assert at(samples, "grid_events_total", type="granted") == 7


def test_an_unknown_node_is_down_and_has_no_measurements() -> None:
    scenario = a_scenario()
    samples = scrape(exposition(read_ledger(scenario.ledger, scenario.now), {}, {}))
    odd = 'odd"\\name'
    assert at(samples, "grid_node_up", node=odd) == 0
    assert at(samples, "grid_node_cpu_capacity_cores", node=odd) == 2
    assert at(samples, "grid_node_heartbeat_age_seconds", node=odd) == 11
    assert at(samples, "grid_node_cpu_offered_cores", node=odd) == 0
    measured = [name for name in NODE_GAUGES if re.search("used|outside|pressure", name)]
    assert len(measured) == 7
    assert [name for name in measured if at(samples, name, node=odd) is not None] == []
    assert at(samples, "grid_node_up", node="gpu1") == 1


def test_every_gauge_has_its_unit_in_its_name() -> None:
    units = ("_cores", "_bytes", "_devices", "_ratio", "_seconds", "_up")
    assert [name for name in NODE_GAUGES if not name.endswith(units)] == []


def test_a_grid_of_five_hundred_nodes_is_told_too() -> None:
    scenario = Scenario(*(a_node(f"n{place}") for place in range(500)))
    samples = scrape(exposition(read_ledger(scenario.ledger, scenario.now), {}, {}))
    assert sum(name == "grid_node_up" for name, _ in samples) == 500
