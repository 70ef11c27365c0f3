"""Workers: when they will be capacity or leave it, margins before an announced end, and a bounded window of samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import (
    MAX_NOTICE_MS,
    MAX_UTILIZATION_SAMPLES,
    STOP_MARGIN_MS,
    EndNotice,
    OfferClosure,
    UtilizationSample,
    UtilizationWindow,
    Worker,
    WorkerResources,
    stop_margin_ms,
)
from tests.support.builders import NOW

WORKER = Worker(
    id="w1", provider="aws", worker_type="cpu", resources=WorkerResources(cpu_milli=4000), created_at_ms=NOW
)
WINDOW_MS = 300_000


def in_state(state: WorkerState, notice: EndNotice | None = None) -> Worker:
    return replace(WORKER, state=state, notice=notice)


def test_a_worker_is_on_its_way_until_it_has_joined():
    assert [state for state in WorkerState if in_state(state).is_on_its_way] == [
        WorkerState.WANTED,
        WorkerState.ASKED,
        WorkerState.BOOTING,
    ]


def test_a_worker_is_over_only_when_it_is_gone():
    assert [state for state in WorkerState if in_state(state).is_over] == [WorkerState.GONE]


def test_a_worker_leaves_where_its_end_is_announced_for_a_moment_and_it_is_there():
    dated, vague = EndNotice("spot notice", NOW + 120_000, NOW + 90_000), EndNotice("it may be taken away")
    assert [state for state in WorkerState if in_state(state, dated).is_leaving] == [
        WorkerState.JOINED,
        WorkerState.DRAINING,
    ]
    assert not any(in_state(state, vague).is_leaving for state in WorkerState)
    assert [in_state(WorkerState.JOINED, notice).leaving_at_ms for notice in (dated, vague, None)] == [
        NOW + 120_000,
        0,
        0,
    ]


def test_the_node_that_a_worker_becomes_has_its_name():
    assert WORKER.node == WORKER.key == "w1"


def test_a_job_is_told_to_stop_its_grace_before_everything_must_be_over():
    assert EndNotice("spot notice", NOW + 120_000, NOW + 90_000).stop_at_ms(5_000) == NOW + 85_000


@given(st.integers(0, MAX_NOTICE_MS))
def test_the_margin_before_an_end_is_at_most_half_a_minute_and_a_quarter_of_what_is_left(left_ms):
    margin = stop_margin_ms(left_ms)
    assert 0 <= margin <= STOP_MARGIN_MS
    assert 4 * margin <= left_ms
    assert margin == STOP_MARGIN_MS or left_ms < 4 * STOP_MARGIN_MS


def test_closures_of_one_provider_are_told_apart_by_their_scope():
    zone = OfferClosure("aws", "zone:a", NOW)
    assert len({zone.key, OfferClosure("aws", "zone:b", NOW).key, OfferClosure("gcp", "zone:a", NOW).key}) == 3
    assert [one.is_over for one in (zone, replace(zone, opened=True))] == [False, True]


def test_the_mean_of_a_window_counts_the_samples_since_a_moment():
    window = UtilizationWindow(tuple(UtilizationSample(at, cpu=at, gpu=7) for at in (100, 200, 400)))
    assert window.mean(ResourceType.CPU, 0) == 233
    assert window.mean(ResourceType.CPU, 200) == 300
    assert window.mean(ResourceType.GPU, 0) == 7
    assert window.mean(ResourceType.CPU, 401) == 0


@pytest.mark.parametrize("window_ms", [1_000, WINDOW_MS, 86_400_000])
@given(gaps=st.lists(st.integers(0, 40_000), max_size=300))
def test_a_window_is_ordered_bounded_and_has_the_newest_sample(window_ms, gaps):
    window, now = UtilizationWindow(), NOW
    for gap in gaps:
        now += gap
        window = window.added(UtilizationSample(now, cpu=gap), window_ms)
        moments = [sample.at_ms for sample in window.samples]
        assert moments == sorted(set(moments))
        assert len(moments) <= MAX_UTILIZATION_SAMPLES
        assert now - window_ms <= moments[0]
        assert window.samples[-1] == UtilizationSample(now, cpu=gap)


def test_samples_of_a_busy_window_reach_back_to_its_beginning():
    window = UtilizationWindow()
    for number in range(3_000):
        window = window.added(UtilizationSample(NOW + 200 * number), WINDOW_MS)
    first, last = window.samples[0].at_ms, window.samples[-1].at_ms
    assert last - first >= WINDOW_MS * 9 // 10
