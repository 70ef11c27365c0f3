"""Predictors in memory over the history on disk: kept ones, their learning, and changes by a training."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distributed_grid.adapters.stores.task_history import DAY_MS, KEPT_MS, TaskHistory
from distributed_grid.prediction.task_runs import TaskRun, Tier, TierSettings
from distributed_grid.server.prediction.service import (
    MAX_LEARNED,
    MAX_PREDICTORS,
    TRAINING_RUNS,
    PredictorPool,
    TypeKey,
)

NOW = 200 * DAY_MS
MB = 1 << 20
TASK = TypeKey("ana", "x")


def runs(count: int, *, key: str = "x", first: int = 0, ended_at_ms: int = NOW) -> list[TaskRun]:
    return [
        TaskRun(
            task_id=f"{key}-{i}",
            attempt=1,
            user="ana",
            key=key,
            memory_bytes=100 * MB + i % 7 * MB,
            run_ms=1000,
            ended_at_ms=ended_at_ms,
        )
        for i in range(first, first + count)
    ]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PredictorPool]:
    pool = PredictorPool(TaskHistory(tmp_path / "predictions.db"), TierSettings())
    yield pool
    pool.close()


def test_a_type_without_a_history_has_no_predictor(pool: PredictorPool) -> None:
    assert pool.load(TASK) is None
    assert pool.cached(TASK) is None
    assert pool.train(TASK, NOW) is None


def test_a_predictor_is_read_from_the_history_and_learns_what_comes(pool: PredictorPool) -> None:
    assert pool.take_in(runs(25), NOW - KEPT_MS) == runs(25)
    assert pool.cached(TASK) is None
    predictor = pool.load(TASK)
    assert predictor is not None
    assert predictor.samples == 25
    assert pool.load(TASK) is predictor
    assert pool.take_in(runs(30), NOW - KEPT_MS) == runs(5, first=25)
    assert predictor.samples == 30
    assert predictor.tier()[0] is Tier.ML


def test_of_many_runs_at_once_the_last_are_learned_and_all_are_counted(pool: PredictorPool) -> None:
    pool.take_in(runs(5), NOW - KEPT_MS)
    predictor = pool.load(TASK)
    assert predictor is not None
    pool.take_in(runs(10 * MAX_LEARNED, first=5), NOW - KEPT_MS)
    assert predictor.samples == 5 + 10 * MAX_LEARNED


def test_samples_beyond_those_that_are_read_count(pool: PredictorPool) -> None:
    pool.take_in(runs(TRAINING_RUNS + 50), NOW - KEPT_MS)
    predictor = pool.load(TASK)
    assert predictor is not None
    assert predictor.samples == TRAINING_RUNS + 50


def test_runs_from_before_the_kept_time_are_left_out(pool: PredictorPool) -> None:
    assert pool.take_in(runs(3, ended_at_ms=NOW - KEPT_MS - 1), NOW - KEPT_MS) == []


def test_training_replaces_what_is_in_memory_and_reports_both(pool: PredictorPool) -> None:
    pool.take_in(runs(40), NOW - KEPT_MS)
    before = pool.load(TASK)
    assert pool.take_untrained() == []
    pool.take_in(runs(1, first=40), NOW - KEPT_MS)
    assert pool.take_untrained() == [TASK]
    assert pool.take_untrained() == []
    trained = pool.train(TASK, NOW + 1)
    assert trained is not None
    assert (trained.samples, trained.tier, trained.tier_before) == (41, Tier.ML, Tier.ML)
    assert trained.confidence > 0.8
    assert pool.cached(TASK) is not before
    assert pool.trained_at_ms(TASK) == NOW + 1


def test_training_what_nobody_asks_for_fills_no_memory(pool: PredictorPool) -> None:
    pool.take_in(runs(40), NOW - KEPT_MS)
    trained = pool.train(TASK, NOW)
    assert trained is not None
    assert trained.tier_before is None
    assert pool.cached(TASK) is None


def test_old_runs_count_by_their_summary(pool: PredictorPool) -> None:
    old = runs(20, ended_at_ms=NOW - KEPT_MS)
    pool.take_in(old, NOW - KEPT_MS)
    later = NOW + DAY_MS
    assert pool.fold(later - KEPT_MS) == 20
    predictor = pool.load(TASK)
    assert predictor is not None
    assert (predictor.samples, predictor.tier()[0]) == (20, Tier.STATISTICS)


def test_the_predictors_that_were_asked_for_longest_ago_leave(pool: PredictorPool) -> None:
    for i in range(MAX_PREDICTORS + 2):
        pool.take_in(runs(1, key=f"k{i}"), NOW - KEPT_MS)
        pool.load(TypeKey("ana", f"k{i}"))
        pool.cached(TypeKey("ana", "k0"))
    assert pool.cached(TypeKey("ana", "k0")) is not None
    assert pool.cached(TypeKey("ana", "k1")) is None
    assert pool.cached(TypeKey("ana", f"k{MAX_PREDICTORS + 1}")) is not None


def test_a_predictor_may_be_asked_while_it_learns(pool: PredictorPool) -> None:
    pool.take_in(runs(40), NOW - KEPT_MS)
    predictor = pool.load(TASK)
    assert predictor is not None
    asked = 0
    with ThreadPoolExecutor(1) as thread:
        learning = thread.submit(lambda: [pool.take_in(runs(10, first=100 * i), NOW - KEPT_MS) for i in range(1, 20)])
        while not learning.done():
            found = predictor.predict(asked)
            assert found is not None
            assert 100 * MB <= found.memory_bytes < 130 * MB
            asked += 1
        learning.result()
    assert predictor.samples == 40 + 190
    assert asked > 0
