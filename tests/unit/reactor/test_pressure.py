"""Leases for nodes under pressure: given by a round, kept over restarts, and never in the way of a user."""

from __future__ import annotations

import re

import pytest

from distributed_grid.domain.events import NodeForgotten, PressureRead
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.states import LeaseEnd
from tests.support.builders import GB, a_node, a_request
from tests.support.rebalance_rounds import (
    CALM,
    HARD,
    IDLE,
    SHARE,
    Rounds,
    a_reading,
    actions,
    apart,
    begin_rounds,
    rules,
)


def test_a_node_above_its_high_mark_gets_a_lease_with_itself_as_the_target():
    scenario = begin_rounds()
    records = scenario.round(HARD)
    (lease,) = scenario.leases
    assert lease.request.target == "master"
    assert lease.node in {"gpu1", "gpu2"}
    assert lease.request.user == "grid"
    assert lease.request.wait_ms == 0
    assert lease.request.ask.memory_bytes == 30 * GB * 350 // 1000 // 1024**2 * 1024**2  # down to the middle, 550
    (line,) = [record for record in records if record.type == "rebalanced"]
    assert (line.node, line.subject, line.data["source_node"]) == ("master", lease.id, lease.node)
    assert line.reason == "memory at 90 %, above the mark of 80 %: 10.5 GB of 10.5 GB in excess"


@pytest.mark.parametrize("level", [300, 550, 800])
def test_between_the_marks_nothing_happens(level):
    scenario = begin_rounds()
    assert scenario.round(a_reading("master", memory=level, cpu=level), times=30) == []


def test_after_a_restart_what_is_held_is_kept_and_given_back_below_the_low_mark():
    scenario = begin_rounds("balanced")
    scenario.round(HARD, times=4)
    before = scenario.leases
    scenario.ledger = Ledger(scenario.ledger.rows(durable_only=True))
    assert scenario.ledger.rebalance_states == {}
    for name in scenario.ledger.nodes:
        scenario.heartbeat(name)
    assert actions(scenario.round(CALM, times=10)) == []
    assert [lease.id for lease in scenario.leases] == [lease.id for lease in before]
    assert actions(scenario.round(IDLE, times=10)) == ["given_back"]


def test_the_ids_are_numbered_for_good_and_fit_wherever_ids_are_asked_for():
    long = "node.with.dots." + 48 * "x"
    scenario = Rounds(apart(a_node(long)), apart(a_node("gpu1")), rules=rules("aggressive", SHARE))
    for _ in range(2):
        scenario.round(a_reading(long, memory=900))
        (lease,) = scenario.leases
        assert re.fullmatch(r"auto-[A-Za-z0-9_-]{0,59}", lease.id)
        assert lease.request.problem() is None
        scenario.round(a_reading(long), times=3)
    assert scenario.ledger.counters["automatic"] == 2


@pytest.mark.parametrize("priority", ["low", "medium", "high", "urgent"])
def test_whoever_asks_takes_what_the_grid_holds_at_once(priority):
    scenario = begin_rounds()
    scenario.round(HARD)
    (lease,) = scenario.leases
    lent = scenario.ask(a_request("r1", memory_gb=25, require=(lease.node,), priority=priority, wait_s=0))
    assert lent is not None
    assert lent.node == lease.node
    assert scenario.leases == []
    scenario.round(HARD, times=5)
    assert all(lease.node != lent.node for lease in scenario.leases)


def test_no_more_of_it_goes_than_is_needed():
    scenario = begin_rounds(portion_milli=100, cool_down=1, leases_max=6)
    scenario.round(HARD, a_reading("gpu1", memory=900), times=10)
    held = [lease.id for lease in scenario.leases if lease.node == "gpu2"]
    assert len(held) > 3
    free = 30 - sum(lease.request.ask.memory_bytes for lease in scenario.leases) / GB
    scenario.ask(a_request("r1", memory_gb=free + 0.5, require=("gpu2",), wait_s=0))
    assert len([lease.id for lease in scenario.leases if lease.node == "gpu2"]) == len(held) - 1


def test_a_request_that_is_served_anyway_takes_nothing_from_the_grid():
    scenario = begin_rounds()
    scenario.round(HARD)
    scenario.ask(a_request("r1", memory_gb=25, wait_s=0))
    assert len(scenario.leases) == 1


def test_a_node_that_leaves_takes_what_was_remembered_of_it_along():
    scenario = begin_rounds()
    scenario.round(HARD)
    assert "master" in scenario.ledger.rebalance_states
    scenario.handle(NodeForgotten("master"))
    assert "master" not in scenario.ledger.rebalance_states
    assert all(is_automatic(lease.request) for lease in scenario.leases)
    scenario.round(times=41)
    assert scenario.leases == []


def test_a_refusal_by_the_grid_itself_is_a_line_and_nothing_else():
    scenario = begin_rounds()
    scenario.round(HARD, times=1)
    (lease,) = scenario.leases
    taken = Lease(
        id="auto-master-memory-2", request=a_request("auto-master-memory-2", memory_gb=1), asked_at_ms=scenario.now
    )
    scenario.ledger.apply([taken])  # somebody used that id before: the grid's own request is refused
    records = scenario.round(a_reading("master", memory=1000), times=3)
    assert "refused" in actions(records)
    assert actions(records).count("refused") == 1
    assert [lease.id for lease in scenario.leases] == [lease.id]


def test_reading_twice_at_the_same_moment_changes_nothing():
    scenario = begin_rounds("balanced")
    scenario.round(HARD, times=2)
    scenario.read(HARD)
    rows = scenario.ledger.rows()
    assert scenario.read(HARD) == []
    assert scenario.ledger.rows() == rows


def test_the_lease_that_is_given_back_ended_as_released():
    scenario = begin_rounds()
    scenario.round(HARD)
    (lease,) = scenario.leases
    scenario.advance(30)
    stepped = scenario.handle(PressureRead((IDLE,), scenario.rules))
    over = [row for row in stepped.changes if isinstance(row, Lease)]
    assert [(row.id, row.end) for row in over] == [(lease.id, LeaseEnd.RELEASED)]
