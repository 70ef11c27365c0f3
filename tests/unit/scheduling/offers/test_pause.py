"""Pauses: nothing new is lent above the mark of the last minute, nor for a while by a node that takes work back."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.nodes import OfferRow
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked, NodeDeclared
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.nodes import GpuUsage, NodeObservation, Usage
from distributed_grid.domain.states import JobState
from distributed_grid.domain.statistics import MarkHistory
from distributed_grid.errors import Refused
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.reactor.dispatch import decide
from distributed_grid.scheduling.offers.pause import (
    FIRST_REST_MS,
    MAX_ABOVE_SHARE,
    MAX_REST_MS,
    MIN_STEP_MS,
    SETTLED_MS,
    WINDOW_MS,
    OfferPause,
    count_failed_start,
    count_reclaim,
    count_start,
    is_disk_full,
    pauses,
    rest_left_ms,
    rest_reason,
)
from distributed_grid.scheduling.queue.reasons import why_not_lent
from tests.support.builders import Scenario, a_node, a_request, a_usage, thresholds

MARK = 0.3
BEAT_MS = 2_000
NOW = 1_000_000


def a_machine(**fields: float) -> Scenario:
    """One machine of ten cores that may be 30 % busy, idle for a minute so far."""
    scenario = Scenario(
        a_node("ash", cores=10, memory_gb=100, gpus=2, thresholds=thresholds(cpu_busy_max=MARK, **fields))
    )
    beats(scenario, a_usage(), 30)
    return scenario


def beats(scenario: Scenario, usage: Usage, count: int) -> None:
    for _ in range(count):
        scenario.now += BEAT_MS
        scenario.heartbeat("ash", usage)


def paused(scenario: Scenario) -> dict[str, OfferPause]:
    return {one.name: one for one in pauses(scenario.ledger.nodes["ash"], scenario.ledger.observations["ash"])}


def listed(scenario: Scenario) -> dict[str, OfferRow]:
    return {row.resource_type: row for row in OfferRow.of_node(Viewer(0), scenario.ledger, "ash")}


def asked(scenario: Scenario, number: int = 1, **amounts: Any) -> Lease | None:
    """The lease, where it is granted at once."""
    try:
        answer = scenario.handle(LeaseAsked(a_request(f"r{number}", wait_s=0, **amounts))).answer
    except Refused:
        return None
    assert isinstance(answer, LeaseAnswer)
    return answer.lease if answer.lease.holds else None


def test_a_node_that_is_53_percent_busy_lends_nothing_where_30_are_allowed() -> None:
    scenario = a_machine()
    beats(scenario, a_usage(cpu_outside=0.53), 20)
    assert asked(scenario, cores=2) is None
    row = listed(scenario)["cpu"]
    assert (row.state, row.mark_percent, row.amount) == ("paused", 30.0, 4.7)
    assert row.measured_percent == 35.4
    assert asked(scenario, memory_gb=2) is not None, "its memory is not above any mark"


def test_paused_resource_is_refused_with_mark_and_measurement() -> None:
    scenario = a_machine()
    beats(scenario, a_usage(cpu_outside=0.53), 20)
    with pytest.raises(Refused, match=r"ash: CPU 3\d\.?\d* % over the last minute, limit 30 %"):
        scenario.handle(LeaseAsked(a_request(cores=2, wait_s=0)))


def test_a_job_that_runs_already_stays_while_the_offer_is_paused() -> None:
    scenario = a_machine()
    scenario.submit(a_request("r1", cores=2), starts=True)
    beats(scenario, a_usage(cpu_outside=0.9), 30)
    assert "cpu" in paused(scenario)
    assert all(lease.holds for lease in scenario.ledger.leases.values())


def test_a_short_visit_pauses_nothing_and_a_pause_is_over_when_the_mean_is_at_the_mark() -> None:
    scenario = a_machine()
    beats(scenario, a_usage(cpu_outside=1.0), 9)
    assert paused(scenario) == {}
    beats(scenario, a_usage(cpu_outside=1.0), 1)
    assert scenario.ledger.offers["ash"].paused == ("cpu",)
    returns_at = paused(scenario)["cpu"].returns_at_ms
    while paused(scenario):
        beats(scenario, a_usage(), 1)
    assert 0 <= scenario.now - returns_at < BEAT_MS
    assert asked(scenario, cores=2) is not None


def minutes(scenario: Scenario, busy: float, count: int) -> None:
    beats(scenario, a_usage(cpu_outside=busy), 30 * count)


def swings(scenario: Scenario, times: int) -> None:
    """Four minutes above the mark and six below it, so often; the mean keeps the offer from being withdrawn."""
    for _ in range(times):
        minutes(scenario, 0.7, 4)
        minutes(scenario, 0.1, 6)


def cpu_history(scenario: Scenario) -> MarkHistory:
    recent = scenario.ledger.observations["ash"].recent
    assert recent is not None
    return recent.marks[0]


def test_use_that_swings_around_the_mark_stays_paused_until_it_was_below_it_for_a_dwell() -> None:
    scenario = a_machine(dwell_s=1200)
    swings(scenario, 4)
    assert "cpu" in paused(scenario)
    assert asked(scenario, cores=2) is None
    below_since_ms = cpu_history(scenario).below_since_ms
    assert below_since_ms is not None
    while paused(scenario):
        beats(scenario, a_usage(cpu_outside=0.1), 1)
    assert 0 <= scenario.now - below_since_ms - 1_200_000 < BEAT_MS
    assert asked(scenario, cores=2) is not None


def test_a_pause_below_the_mark_says_why_and_when_it_ends() -> None:
    scenario = a_machine(dwell_s=1200)
    swings(scenario, 4)
    pause = paused(scenario)["cpu"]
    assert (pause.mark_milli, pause.measured_milli) == (300, 100)
    with pytest.raises(
        Refused, match=r"ash: CPU .* % over the last minute, above its limit of 30 % in \d\d.* % of the last hour"
    ):
        scenario.handle(LeaseAsked(a_request(cores=2, wait_s=0)))
    while paused(scenario):
        beats(scenario, a_usage(cpu_outside=0.1), 1)
    assert 0 <= scenario.now - pause.returns_at_ms < BEAT_MS


def test_a_pause_ends_before_the_dwell_when_only_a_tenth_of_the_last_hour_was_above_the_mark() -> None:
    scenario = a_machine(dwell_s=3600)
    swings(scenario, 3)
    pause = paused(scenario)["cpu"]
    while paused(scenario):
        beats(scenario, a_usage(cpu_outside=0.1), 1)
    assert cpu_history(scenario).above_share == pytest.approx(MAX_ABOVE_SHARE, rel=0.01)
    assert abs(scenario.now - pause.returns_at_ms) < 5 * BEAT_MS


def test_bursts_of_seconds_with_a_mean_below_the_mark_pause_no_longer_than_their_minute() -> None:
    scenario = a_machine(dwell_s=1200)
    for _ in range(30):
        beats(scenario, a_usage(cpu_outside=0.9), 12)
        assert "cpu" in paused(scenario), "24 seconds at 90 % are 36 % of a minute"
        beats(scenario, a_usage(), 48)
        assert paused(scenario) == {}


def test_swings_flip_the_offer_of_a_node_less_often_than_the_mark_does() -> None:
    scenario = a_machine(dwell_s=1200)
    flips = 0
    for _ in range(10):
        for busy, count in ((0.7, 4), (0.1, 6)):
            was = "cpu" in paused(scenario)
            minutes(scenario, busy, count)
            flips += was != ("cpu" in paused(scenario))
    assert flips <= 5, "the mark is crossed twenty times"


def test_a_pause_ends_no_offer_and_a_long_one_becomes_a_withdrawal() -> None:
    scenario = a_machine(dwell_s=600)
    beats(scenario, a_usage(cpu_outside=0.6), 30)
    assert listed(scenario)["cpu"].state == "paused"
    beats(scenario, a_usage(cpu_outside=0.6), 200)
    assert "cpu" not in listed(scenario)
    assert scenario.ledger.offers["ash"].paused == ()
    beats(scenario, a_usage(), 60)
    assert asked(scenario, cores=1) is None, "back after the dwell, not after a minute"


def test_memory_and_each_gpu_are_paused_by_their_own_marks() -> None:
    scenario = a_machine()
    beats(scenario, a_usage(memory_outside_gb=80), 30)
    assert list(paused(scenario)) == ["memory"]
    assert (listed(scenario)["memory"].state, listed(scenario)["cpu"].state) == ("paused", "open")
    scenario = a_machine()
    beats(scenario, Usage(gpus=(GpuUsage(0, 520), GpuUsage(1))), 30)
    assert list(paused(scenario)) == ["gpu0"]
    first, second = (asked(scenario, number, gpus=1) for number in (1, 2))
    assert first is not None
    assert first.claim is not None
    assert [share.index for share in first.claim.gpus] == [1]
    assert second is None


def test_the_heartbeat_itself_pauses_before_anything_that_follows_from_it() -> None:
    """The control plane takes it in at once, and what follows may have to wait for the store."""
    scenario = a_machine()
    beats(scenario, a_usage(cpu_outside=1.0), 9)
    scenario.now += BEAT_MS
    scenario.ledger.apply(
        decide(scenario.ledger, HeartbeatReceived(name="ash", usage=a_usage(cpu_outside=1.0)), scenario.now).changes
    )
    assert scenario.ledger.offers["ash"].paused == ("cpu",)
    assert asked(scenario, cores=1) is None


def test_many_reports_in_a_second_do_not_make_the_history_long() -> None:
    scenario = a_machine()
    for _ in range(3_000):
        scenario.now += 50
        scenario.heartbeat("ash", a_usage(cpu_outside=0.1))
    recent = scenario.ledger.observations["ash"].recent
    assert recent is not None
    assert len(recent.integrals) <= WINDOW_MS // MIN_STEP_MS + 3


def test_without_a_dwell_and_a_margin_every_measurement_decides_alone() -> None:
    scenario = a_machine(dwell_s=0, margin=0)
    for busy in (0.9, 0.1, 0.9, 0.1):
        beats(scenario, a_usage(cpu_outside=busy), 1)
        assert (scenario.ledger.lends("ash").cpu_milli > 0) == (busy < MARK)
        assert scenario.ledger.offers["ash"].paused == ()


def minute_mean(samples: list[tuple[int, int]], now: int) -> Fraction:
    """The mean of the last minute, by adding up: each sample stands for the time since the one before it."""
    total = span = 0
    for (before, _), (at, value) in pairwise(samples):
        part = max(at - max(before, now - WINDOW_MS), 0)
        total, span = total + value * part, span + part
    return Fraction(total, span) if span else Fraction(samples[-1][1])


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((1_000, 2_000, 3_000, 20_000)),
            st.sampled_from((0, 100, 290, 300, 310, 400, 600, 1000)),
            st.integers(1, 12),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_lease_is_ever_granted_above_the_mark(visits: list[tuple[int, int, int, bool]]) -> None:
    scenario = Scenario(a_node("ash", cores=10, thresholds=thresholds(cpu_busy_max=MARK, cores_min=0)))
    samples = [(scenario.now, 0)]
    number = 0
    for apart_ms, busy, count, waits in visits:
        for _ in range(count):
            scenario.now += apart_ms
            samples.append((scenario.now, busy))
            held = set(scenario.ledger.leases)
            scenario.heartbeat("ash", Usage(cpu_busy_milli=busy, cpu_outside_milli=busy))
            number += 1
            request = a_request(f"r{number}", cores=1, wait_s=60 if waits else 0)
            try:
                scenario.handle(LeaseAsked(request))
            except Refused:
                pass
            granted = [lease for key, lease in scenario.ledger.leases.items() if lease.holds and key not in held]
            if minute_mean(samples, scenario.now) > 1000 * MARK:
                assert not granted
            if number % 3 == 0 and granted:
                scenario.release(granted[0].id)


def rests(*kept_ms: int) -> list[int]:
    """How long a node rests that keeps what is placed on it so long each time, as soon as it offers again."""
    seen, now, found = NodeObservation(node="gpu1", at_ms=NOW), NOW, []
    for kept in kept_ms:
        seen = count_reclaim(seen, now, now + kept)
        now += kept
        found.append(rest_left_ms(seen, now))
        now += found[-1] + 1
    return found


def test_the_rest_doubles_up_to_ten_minutes():
    assert rests(*[1] * 10) == [0, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 600_000, 600_000, 600_000]


def test_node_that_keeps_its_leases_for_a_while_begins_anew():
    assert rests(1, 1, SETTLED_MS, 1, 1) == [0, 10_000, 0, 10_000, 20_000]
    assert rests(*[1] * 6, 160_000) == [0, 10_000, 20_000, 40_000, 80_000, 160_000, 0]
    assert rests(*[1] * 6, 159_000)[-1] == 320_000, "not as long as it rested"


def test_all_that_an_owner_takes_back_at_once_counts_once():
    seen = NodeObservation(node="gpu1", at_ms=NOW)
    for number in range(100):
        seen = count_reclaim(seen, NOW - number, NOW + number)
    assert (seen.reclaims, rest_left_ms(seen, NOW)) == (1, 0)


def test_a_node_that_starts_nothing_rests_twice_as_long_each_time_until_it_starts_something():
    seen, now, found = NodeObservation(node="gpu1", at_ms=NOW), NOW, []
    for _ in range(8):
        seen = count_failed_start(seen, now, now + 62_000)
        now += 62_000
        found.append(rest_left_ms(seen, now))
        now += found[-1] + 1
    assert found == [60_000, 120_000, 240_000, 480_000, 960_000, 1_920_000, 3_600_000, 3_600_000]
    later = seen.start_failed_at_ms + 1
    assert rest_reason(seen, later) == "rests for 60 min: it did not start what it was given, 8 times in a row"
    assert rest_left_ms(count_start(seen), later) == 0


def test_failed_starts_of_one_batch_count_once():
    seen = NodeObservation(node="gpu1", at_ms=NOW)
    for number in range(100):
        seen = count_failed_start(seen, NOW - number, NOW + number)
    assert seen.failed_starts == 1


MB = 1 << 20


@pytest.mark.parametrize(
    ("free", "total", "was_full", "is_full"),
    [
        (63 * MB, 10_000 * MB, False, True),
        (65 * MB, 10_000 * MB, False, False),
        (65 * MB, 10_000 * MB, True, True),
        (128 * MB, 10_000 * MB, True, False),
        (1 * MB, 8 * MB, False, False),
        (0, 8 * MB, False, True),
        (0, 0, False, False),
    ],
)
def test_a_disk_is_full_below_the_reserve_and_has_room_again_at_twice_of_it(free, total, was_full, is_full):
    assert is_disk_full(Usage(disk_free_bytes=free, disk_bytes=total), was_full) is is_full


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=40))
def test_a_rest_is_never_longer_than_ten_minutes(times):
    seen, now = NodeObservation(node="gpu1", at_ms=NOW), NOW
    for placed, kept in times:
        seen = count_reclaim(seen, now + placed, now + placed + kept)
        now += placed + kept
        assert 0 <= rest_left_ms(seen, now) <= MAX_REST_MS
        assert rest_left_ms(seen, now + MAX_REST_MS) == 0


def take_back(scenario: Scenario) -> None:
    """The node ends the job though nobody has ordered that."""
    scenario.start("r1")
    scenario.end("r1", Outcome(Ending.PREEMPTED))
    scenario.heartbeat("gpu1")


def test_a_node_that_takes_everything_back_gets_it_later_and_later():
    scenario = Scenario(a_node("gpu1"))
    scenario.submit(a_request("r1", cores=1, wait_s=10**6))
    take_back(scenario)
    assert scenario.job("r1").state is JobState.ASSIGNED
    scenario.advance(0.1)
    take_back(scenario)
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
            take_back(scenario)
        scenario.advance(1)
    assert len(scenario.job("r1").attempts) <= 14
