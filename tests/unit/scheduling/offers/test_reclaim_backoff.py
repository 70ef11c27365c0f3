"""A node that takes work back time after time gets the next one later and later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.events import NodeDeclared
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import NodeObservation
from distributed_grid.domain.states import JobState
from distributed_grid.scheduling.offers.reclaim_backoff import (
    FIRST_REST_MS,
    MAX_REST_MS,
    SETTLED_MS,
    count_reclaim,
    rest_left_ms,
)
from distributed_grid.scheduling.queue.reasons import why_not_lent
from tests.support.builders import Scenario, a_node, a_request

NOW = 1_000_000


def rests(*kept_ms: int) -> list[int]:
    """How long a node rests that keeps what is placed on it so long each time, as soon as it offers again."""
    seen, now, found = NodeObservation("gpu1", NOW), NOW, []
    for kept in kept_ms:
        seen = count_reclaim(seen, now, now + kept)
        now += kept
        found.append(rest_left_ms(seen, now))
        now += found[-1] + 1
    return found


def test_the_rest_doubles_up_to_ten_minutes():
    assert rests(*[1] * 10) == [0, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 600_000, 600_000, 600_000]


def test_what_is_kept_for_a_while_begins_anew():
    assert rests(1, 1, SETTLED_MS, 1, 1) == [0, 10_000, 0, 10_000, 20_000]
    assert rests(*[1] * 6, 160_000) == [0, 10_000, 20_000, 40_000, 80_000, 160_000, 0]
    assert rests(*[1] * 6, 159_000)[-1] == 320_000, "not as long as it rested"


def test_all_that_an_owner_takes_back_at_once_counts_once():
    seen = NodeObservation("gpu1", NOW)
    for number in range(100):
        seen = count_reclaim(seen, NOW - number, NOW + number)
    assert (seen.reclaims, rest_left_ms(seen, NOW)) == (1, 0)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=40))
def test_a_rest_is_never_longer_than_ten_minutes(times):
    seen, now = NodeObservation("gpu1", NOW), NOW
    for placed, kept in times:
        seen = count_reclaim(seen, now + placed, now + placed + kept)
        now += placed + kept
        assert 0 <= rest_left_ms(seen, now) <= MAX_REST_MS
        assert rest_left_ms(seen, now + MAX_REST_MS) == 0


def take_back(scenario: Scenario, ending: Ending) -> None:
    scenario.start("r1")
    scenario.end("r1", Outcome(ending))
    scenario.heartbeat("gpu1")


@pytest.mark.parametrize("ending", [Ending.RECLAIMED, Ending.PREEMPTED])
def test_a_node_that_takes_everything_back_gets_it_later_and_later(ending: Ending):
    scenario = Scenario(a_node("gpu1"))
    scenario.submit(a_request("r1", cores=1, wait_s=10**6))
    take_back(scenario, ending)
    assert scenario.job("r1").state is JobState.ASSIGNED
    scenario.advance(0.1)
    take_back(scenario, ending)
    assert scenario.job("r1").state is JobState.QUEUED
    node = scenario.ledger.nodes["gpu1"]
    assert why_not_lent(scenario.ledger, node, scenario.now) == (
        "took work back 2 times in a row; it lends again in 10 s",
    )
    scenario.handle(NodeDeclared(replace(node, capacity=a_node("gpu1", cores=5).capacity)))
    scenario.advance(FIRST_REST_MS / 1000 - 0.1)
    assert scenario.job("r1").state is JobState.QUEUED
    scenario.advance(0.1)
    assert scenario.job("r1").state is JobState.ASSIGNED


def test_a_node_that_takes_everything_back_causes_few_requeues_in_an_hour():
    scenario = Scenario(a_node("gpu1"))
    scenario.submit(a_request("r1", cores=1, wait_s=10**6))
    for _ in range(3600):
        if scenario.job("r1").state is JobState.ASSIGNED:
            take_back(scenario, Ending.RECLAIMED)
        scenario.advance(1)
    assert len(scenario.job("r1").attempts) <= 14
