"""Summaries of old runs: they add up, and typical values are spread as the runs were."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.jobs import MAX_RERUNS
from distributed_grid.domain.resources import MAX_AMOUNT
from distributed_grid.prediction.task_runs import (
    MAX_QUANTITY,
    MIN_LIMIT_BYTES,
    TYPICAL_VALUES,
    Coverage,
    MemoryPrediction,
    RunSummary,
    TaskRun,
    Tier,
    limits_of,
    rounded_limit,
)

quantities = st.integers(0, MAX_QUANTITY)


def a_run(memory_bytes: int, run_ms: int = 0, *, is_lower_bound: bool = False) -> TaskRun:
    return TaskRun("t", 1, "ana", "x", memory_bytes=memory_bytes, run_ms=run_ms, is_lower_bound=is_lower_bound)


@given(st.lists(st.builds(a_run, quantities, quantities), max_size=60), st.integers(0, 60))
def test_folding_in_pieces_gives_what_folding_at_once_gives(runs: list[TaskRun], split: int) -> None:
    at_once = RunSummary().plus(runs)
    assert RunSummary().plus(runs[:split]).plus(runs[split:]) == at_once
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(at_once), type=RunSummary) == at_once


@given(st.lists(st.integers(1, MAX_QUANTITY), min_size=1, max_size=TYPICAL_VALUES))
def test_a_typical_value_is_never_below_its_run_and_a_tenth_above_at_most(values: list[int]) -> None:
    typical = RunSummary().plus(map(a_run, values)).typical_memory_bytes()
    assert len(typical) == len(values)
    for value, shown in zip(sorted(values), typical, strict=True):
        assert value <= shown * (1 + 1e-9)
        assert shown <= value * 1.1 + 1


def test_many_runs_leave_so_many_values_with_the_largest() -> None:
    summary = RunSummary().plus(a_run(100 + i, 1000 * i) for i in range(5000))
    memory, times = summary.typical_memory_bytes(), summary.typical_run_ms()
    assert len(memory) == len(times) == TYPICAL_VALUES
    assert memory == sorted(memory)
    assert memory[-1] >= 5099
    assert times[TYPICAL_VALUES // 2] == pytest.approx(2_500_000, rel=0.15)
    assert summary.count == 5000


def test_runs_that_were_cut_short_are_not_counted() -> None:
    assert RunSummary().plus([a_run(5, 5, is_lower_bound=True)]) == RunSummary()
    assert RunSummary().plus([a_run(0, 5)]).count == 0


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_confidence_comes_to_the_true_share(share: float) -> None:
    dice = random.Random(3)
    seen = []
    coverage = Coverage()
    for _ in range(3000):
        coverage.add(dice.random() < share)
        seen.append(coverage.confidence)
    assert sum(seen[500:]) / len(seen[500:]) == pytest.approx(share, abs=0.03)


def test_nothing_measured_and_little_measured_is_no_certainty() -> None:
    coverage = Coverage()
    assert (coverage.total, coverage.confidence) == (0, 0.5)
    coverage.add(True)
    assert coverage.confidence < 0.7
    coverage.add(True)
    assert 0.7 < coverage.confidence < 0.8


def test_what_changes_is_noticed_within_fifty_runs() -> None:
    coverage = Coverage()
    for _ in range(500):
        coverage.add(True)
    for _ in range(30):
        coverage.add(False)
    assert coverage.confidence < 0.7


@given(st.lists(st.booleans(), max_size=300))
def test_confidence_is_a_share_whatever_comes(results: list[bool]) -> None:
    coverage = Coverage()
    for covered in results:
        coverage.add(covered)
    assert 0 < coverage.confidence < 1
    assert 0 <= coverage.total <= 50.0001


MB = 1 << 20


def test_limits_grow_and_are_four_whatever_the_predictor_says() -> None:
    for following in ((), (200 * MB,), (50 * MB, 100 * MB, 100 * MB), tuple(range(MB, 9 * MB, MB))):
        limits = limits_of(MemoryPrediction(100 * MB, following, None, Tier.STATISTICS, 0.8, 9))
        assert len(limits) == 1 + MAX_RERUNS
        assert list(limits) == sorted(set(limits))
        assert limits[-1] >= 10 * limits[0]
    assert limits_of(MemoryPrediction(MAX_AMOUNT, (), None, Tier.ML, 0.8, 9)) == (MAX_AMOUNT,)


@pytest.mark.parametrize("size", [1, MIN_LIMIT_BYTES, 100 * MB + 1, 1023 * MB, 1 << 40, MAX_AMOUNT, MAX_AMOUNT + 1])
def test_a_limit_is_rounded_up_by_less_than_a_hundredth(size: int) -> None:
    rounded = rounded_limit(size)
    most = size + size // 128
    assert min(max(size, MIN_LIMIT_BYTES), MAX_AMOUNT) <= rounded <= min(max(most, MIN_LIMIT_BYTES), MAX_AMOUNT)
    assert rounded_limit(rounded) == rounded
