"""Tables of offers and allocations; the status at a glance."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from distributed_grid.cli.commands.status import (
    MAX_ROWS,
    OFF,
    allocations_table,
    offers_table,
    sharing_parts,
    status_text,
)
from tests.support.records import records

OFFER = {"node_id": "gpu1", "resource_type": "memory", "expires_at": None, "state": "open"}


@pytest.mark.parametrize(
    ("amount", "shown"), [(12.3456, "12.3 GB"), (0.05, "0.1 GB"), (0.042, "0.04 GB"), (0.001, "1.0 MB")]
)
def test_a_little_is_not_shown_as_nothing(amount: float, shown: str) -> None:
    assert shown in offers_table(records([{**OFFER, "amount": amount}]))


def test_a_paused_offer_is_listed_with_its_mark_its_measure_and_its_earliest_return() -> None:
    paused = {"state": "paused", "mark_percent": 50.0, "measured_percent": 63.4, "returns_at": "2026-05-01T13:00:00Z"}
    shown = offers_table(records([{**OFFER, "amount": 2.0}, {**OFFER, **paused, "amount": 3.0}])).splitlines()
    assert shown[0].split() == ["NODE", "OFFERS", "UNTIL", "PAUSED"]
    assert "63.4 % over the last minute, limit 50 %; may return at " in shown[2]
    settling = paused | {"measured_percent": 12.0}
    shown = offers_table(records([{**OFFER, **settling, "amount": 3.0}])).splitlines()
    assert "12 % over the last minute, limit 50 %, often more in the last hour; returns at " in shown[1]
    assert "PAUSED" not in offers_table(records([{**OFFER, "amount": 2.0}]))


def test_nothing_is_offered_where_sharing_is_off() -> None:
    status = records({"offers": [{**OFFER, "amount": 2.0}], "allocations": [], "omitted": {"allocations": 0}})
    assert sharing_parts(status, None) == [OFF, "no active allocations"]
    assert sharing_parts(status, "")[0].startswith("NODE  OFFERS")


def test_two_allocations_never_look_alike() -> None:
    common = {"node_id": "gpu1", "resource_type": "cpu", "amount": 1, "user": "ana", "priority": "low"}
    common |= {"state": "active", "job_id": None, "expires_at": None, "target_node": None}
    ids = ["experiment-of-ana-1", "experiment-of-ana-2"]
    _, *rows = allocations_table(records([{**common, "allocation_id": id_} for id_ in ids])).splitlines()
    assert [row.split()[0] for row in rows] == ids


def test_allocations_for_a_node_say_so() -> None:
    row = {"allocation_id": "auto-gpu1-memory-1", "node_id": "gpu2", "resource_type": "memory", "amount": 4.0429}
    row |= {"user": "grid", "priority": "low", "state": "active", "job_id": None, "expires_at": None}
    head, line = allocations_table(records([{**row, "target_node": "gpu1"}])).splitlines()
    assert head.split()[:4] == ["ALLOCATION", "NODE", "AMOUNT", "FOR"]
    assert line.split()[:5] == ["auto-gpu1-memory-1", "gpu2", "4.04", "GB", "gpu1"]


def test_leases_that_a_status_omits_are_counted_below_the_table() -> None:
    text = allocations_table([], 1234)
    assert text.splitlines()[-1] == "… and 1,234 more (grid explain ID shows any of them)"


def a_job(number: int, state: str) -> dict[str, Any]:
    asked = {"resource_type": "cpu", "amount": 1.0, "command": "python train.py --rate 0.001 --seed " + "1" * 80}
    return {"job_id": f"sweep-{number}", "state": state, "node_id": None, **asked}


def a_node(number: int, state: str = "alive") -> dict[str, Any]:
    lent = {"cpu_lent": 2.0, "cpu_cores": 16.0, "memory_lent_gb": 10.0, "memory_gb": 125.6, "gpus_lent": 0, "gpus": 2}
    flags = {
        "cooling": False,
        "stopped": False,
        "degraded": None,
        "clock_jump": None,
        "rejected": None,
        "simulated": True,
        "pressure": 0.5,
    }
    return {"node_id": f"gpu{number}", "state": state, **flags, **lent}


def a_status(nodes: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> dict[str, Any]:
    waiting = sum(job["state"] == "queued" for job in jobs)
    return {
        "nodes": nodes,
        "jobs": jobs,
        "allocations": [{}] * 30,
        "waiting": waiting,
        "recommendations": [],
        "job_states": Counter(job["state"] for job in jobs),
        "omitted": {"allocations": 0},
    }


def test_a_long_queue_is_shown_at_a_glance_with_its_counts() -> None:
    jobs = [a_job(n, "queued") for n in range(1402)] + [a_job(n, "running") for n in range(1402, 1432)]
    lines = status_text(records(a_status([a_node(1)], jobs)), MAX_ROWS, 80).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "30 leases, 30 jobs running, 1,402 waiting" in lines
    assert lines[-1] == "… and 1,422 more (grid jobs list); in all 1,402 queued, 30 running"
    assert sum(" running " in line for line in lines if line.startswith("sweep")) == MAX_ROWS


def test_of_many_nodes_those_with_a_problem_are_shown() -> None:
    nodes = [a_node(n) for n in range(99)] + [a_node(99, "lost")]
    lines = status_text(records(a_status(nodes, [])), MAX_ROWS, 80).splitlines()
    assert lines[1].split()[:2] == ["gpu99", "lost,"]
    assert lines[11] == "… and 90 more (grid status --all); in all 99 alive, 1 lost"


def test_everything_is_shown_where_it_is_asked_for() -> None:
    nodes, jobs = [a_node(n) for n in range(20)], [a_job(n, "queued") for n in range(50)]
    text = status_text(records(a_status(nodes, jobs)), sys.maxsize, 0)
    assert "more" not in text
    assert text.count("sweep-") == 50
    assert text.count("gpu") == 20


def test_a_stopped_node_is_shown_as_stopped_with_the_command_that_starts_it() -> None:
    nodes = [{**a_node(1, "joining"), "stopped": True, "simulated": False}, a_node(2, "joining")]
    lines = status_text(records(a_status(nodes, [])), MAX_ROWS, 0).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["gpu1", "stopped"], ["gpu2", "joining,"]]
    assert "gpu1 is stopped; type: grid cluster start gpu1" in lines
