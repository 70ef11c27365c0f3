"""Effects: the rows of a ledger call for them, no more and no less, whenever they are derived."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.events import (
    AttemptPaused,
    AttemptsListed,
    AttemptStarted,
    BlockAsked,
    BlockReleased,
    MemoryServed,
    NodeDeclared,
    NodeDrained,
    OffloadPressureRead,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import PressureReading
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import JobState
from distributed_grid.errors import GridError
from distributed_grid.reactor.effects import (
    FreeCopies,
    ServeMemory,
    StartAttempt,
    StopAttempt,
    attempt_effects,
    memory_effects,
    overdue,
    overdue_memory,
)
from tests.support.builders import GB, Scenario, a_node, a_request, a_submission
from tests.support.offload_looks import Looks, apart, degraded_grid, pauses


def test_low_work_of_a_degraded_node_is_paused_again_and_again_and_goes_on_afterwards():
    grid = degraded_grid()
    grid.looks(2, ash=900)
    assert pauses([*attempt_effects(grid.ledger, node="ash")]) == {"r1": True}
    assert pauses([*overdue(grid.ledger, "ash", grid.now)]) == {"r1": True}  # ordered again with heartbeats
    attempt = grid.job("r1").attempt
    assert attempt is not None
    grid.handle(
        AttemptPaused(uid="r1", number=attempt.number, fence=attempt.fence, paused=True, detail="ash is degraded")
    )
    assert grid.job("r1").state is JobState.PAUSED
    assert pauses([*overdue(grid.ledger, "ash", grid.now)]) == {"r1": True}
    grid.look(ash=500)
    grid.advance(60)
    readings = (PressureReading(node="ash", score=500, memory=500, cpu=500),)
    stepped = grid.handle(OffloadPressureRead(readings, grid.rules, grid.offload))
    assert pauses([*attempt_effects(grid.ledger, stepped.changes)]) == {"r1": False}
    assert pauses([*attempt_effects(grid.ledger)]) == {}


def test_what_begins_on_a_degraded_node_stands_still_at_once():
    grid = Looks(*apart("ash"))
    grid.run_job("r1", "ash", restartable=False)
    grid.submit(a_request("r2", cores=1, priority=Priority.LOW))
    grid.looks(2, ash=900)
    attempt = grid.job("r2").attempt
    assert attempt is not None
    stepped = grid.handle(AttemptStarted(uid="r2", number=attempt.number, fence=attempt.fence, pid=8))
    assert pauses([*attempt_effects(grid.ledger, stepped.changes)]) == {"r2": True}


NODES = ("gpu1", "gpu2")
SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from(["low", "low", "urgent", "start", "end", "cancel", "drain", "lose", "wait"]), st.integers(0, 9)
    ),
    max_size=40,
)


def act(scenario: Scenario, what: str, number: int) -> list[Row]:
    """Something happens to a grid that is soon full; the rows that it changed."""
    node, jobs = NODES[number % 2], [job for job in scenario.ledger.jobs.values() if job.attempt is not None]
    job = jobs[number % len(jobs)] if jobs else None
    match what:
        case "low" | "urgent":
            request = a_request(f"r{len(scenario.ledger.jobs)}-{number}", cores=2, priority=what)
            return scenario.handle(a_submission(request)).changes
        case "start" if job is not None:
            return [scenario.start(job.uid)]
        case "end" if job is not None:
            return scenario.end(job.uid).changes
        case "cancel" if job is not None:
            return scenario.cancel(job.uid).changes
        case "drain":
            declared = NodeDeclared(scenario.ledger.nodes[node])
            return [*scenario.handle(NodeDrained(node)).changes, *scenario.handle(declared).changes]
        case "lose":
            return scenario.handle(AttemptsListed(node=node, attempts=())).changes
    return scenario.advance(1 + number).changes


@given(SCRIPTS)
def test_whatever_begins_to_be_pending_was_called_for_by_the_rows_that_changed(script):
    scenario = Scenario(*(a_node(name, cores=2) for name in NODES))
    for what, number in script:
        before = attempt_effects(scenario.ledger)
        changed: list[Row] = []
        with contextlib.suppress(GridError):
            changed = act(scenario, what, number)
        after = attempt_effects(scenario.ledger)
        called_for = attempt_effects(scenario.ledger, changed)
        assert all(effect in after for effect in called_for)
        assert all(effect in before or effect in called_for for effect in after)
        assert sorted(map(repr, after)) == sorted(
            repr(one) for node in NODES for one in attempt_effects(scenario.ledger, node=node)
        )
    scenario.ledger.check()


@given(SCRIPTS)
def test_a_restart_of_the_control_plane_calls_for_the_same(script):
    scenario = Scenario(*(a_node(name, cores=2) for name in NODES))
    for what, number in script:
        with contextlib.suppress(GridError):
            act(scenario, what, number)
    again = Ledger(scenario.ledger.rows(durable_only=True))
    assert sorted(map(repr, attempt_effects(again))) == sorted(map(repr, attempt_effects(scenario.ledger)))


def test_an_order_that_was_called_for_before_a_moment_and_not_reported_is_overdue():
    scenario = Scenario(a_node("gpu1", cores=4))
    job = scenario.submit(a_request("r1"))
    start = StartAttempt("gpu1", job, scenario.lease_of("r1"))
    assert overdue(scenario.ledger, "gpu1", scenario.now) == []
    assert overdue(scenario.ledger, "gpu1", scenario.now + 1) == [start]
    scenario.start("r1")
    assert overdue(scenario.ledger, "gpu1", scenario.now + 1) == []
    scenario.advance(60)
    scenario.cancel("r1")
    assert overdue(scenario.ledger, "gpu1", scenario.now) == [], "a stop counts from when it was asked for"
    assert overdue(scenario.ledger, "gpu1", scenario.now + 1) == [StopAttempt("gpu1", scenario.job("r1"))]


def test_the_memory_of_a_node_is_served_before_anything_else_is_done_with_it():
    scenario = Scenario(a_node("gpu1"), a_node("gpu2"))
    scenario.handle(BlockAsked(id="b1", user="ada", size_bytes=GB, term_ms=3_600_000, prefer="gpu1"))
    assert memory_effects(scenario.ledger) == [ServeMemory("gpu1")]
    assert memory_effects(scenario.ledger, node="gpu2") == overdue_memory(scenario.ledger, "gpu2") == []
    assert overdue_memory(scenario.ledger, "gpu1") == [ServeMemory("gpu1")]
    scenario.handle(
        MemoryServed(MemoryServerRow(node="gpu1", host="10.0.0.1", port=7000, incarnation="life1", key_bytes=b"k" * 32))
    )
    assert memory_effects(scenario.ledger) == overdue_memory(scenario.ledger, "gpu1") == []
    result = scenario.handle(BlockReleased("b1", "ada"))
    freed = FreeCopies("gpu1", ("b1:1",))
    assert memory_effects(scenario.ledger) == memory_effects(scenario.ledger, result.changes) == [freed]
    assert overdue_memory(scenario.ledger, "gpu1") == [freed]
