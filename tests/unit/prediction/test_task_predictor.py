"""Predictor of one type of task: its tiers, its measured confidence, its limits, run times and other estimates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.prediction.task_predictor import (
    ESTIMATE_WINDOW,
    MAX_RERUNS,
    TaskPredictor,
    UsageEstimate,
    with_margin,
)
from distributed_grid.prediction.task_runs import RunSummary, TaskRun, Tier, TierSettings

MB = 1 << 20


def an_estimate(count: int, factor: float = 1.0) -> UsageEstimate:
    """Runs of a second for each number, within a tenth."""
    dice = random.Random(4)
    estimate = UsageEstimate(1)
    for _ in range(count):
        number = dice.uniform(1, 100)
        estimate.learn((number,), round(1000 * factor * number * dice.uniform(0.9, 1.1)))
    estimate.fit()
    return estimate


def test_the_median_follows_the_feature() -> None:
    estimate = an_estimate(40)
    for number in (5, 50, 90):
        found = estimate.quantile((number,), 0.5)
        assert found is not None
        assert 800 * number < found < 1200 * number


def test_two_values_say_nothing_and_values_that_were_not_measured_do_not_count() -> None:
    assert an_estimate(2).quantile((5,), 0.5) is None
    estimate = an_estimate(2)
    estimate.learn((5,), 0)
    estimate.fit()
    assert estimate.quantile((5,), 0.5) is None


def test_only_the_last_runs_count() -> None:
    estimate = an_estimate(20, factor=50)
    for _ in range(ESTIMATE_WINDOW):
        estimate.learn((10,), 2000)
    estimate.fit()
    assert estimate.quantile((10,), 0.5) == 2000


def test_an_estimate_stays_until_enough_more_is_known() -> None:
    estimate = an_estimate(40)
    before = estimate.quantile((10,), 0.5)
    estimate.learn((10,), 10**7)
    estimate.fit()
    assert estimate.quantile((10,), 0.5) == before


def a_run(
    number: int,
    memory_bytes: int,
    *,
    input_bytes: int = 0,
    run_ms: int = 1000,
    cpu_ms: int = 0,
    numbers: tuple[float, ...] = (),
) -> TaskRun:
    return TaskRun(
        task_id=f"task-{number}",
        attempt=1,
        user="ana",
        key="x",
        features=numbers,
        input_bytes=input_bytes,
        memory_bytes=memory_bytes,
        run_ms=run_ms,
        cpu_ms=cpu_ms,
    )


def cut_short(number: int, memory_bytes: int) -> TaskRun:
    return TaskRun(
        task_id=f"task-{number}", attempt=1, user="ana", key="x", memory_bytes=memory_bytes, is_lower_bound=True
    )


def steady(count: int, seed: int = 1) -> list[TaskRun]:
    """Half a byte of memory for each byte of input, within a few percent."""
    dice = random.Random(seed)
    sizes = [dice.randrange(100 * MB, 10_000 * MB) for _ in range(count)]
    return [
        a_run(i, round((300 * MB + size / 2) * dice.gauss(1, 0.02)), input_bytes=size, run_ms=size // MB)
        for i, size in enumerate(sizes)
    ]


def a_predictor(runs: list[TaskRun], settings: TierSettings | None = None, numbers: int = 0) -> TaskPredictor:
    predictor = TaskPredictor(settings or TierSettings(), numbers)
    predictor.learn_all(runs)
    return predictor


@pytest.mark.parametrize(
    ("count", "tier"),
    [(0, Tier.DEFAULTS), (4, Tier.DEFAULTS), (5, Tier.STATISTICS), (29, Tier.STATISTICS), (30, Tier.ML)],
)
def test_a_tier_begins_with_so_many_runs(count: int, tier: Tier) -> None:
    predictor = a_predictor(steady(count))
    assert predictor.tier()[0] is tier
    found = predictor.predict(1000 * MB)
    if tier is Tier.DEFAULTS:
        assert found is None
    else:
        assert found is not None
        assert (found.tier, found.samples) == (tier, count)
        assert 780 * MB < found.memory_bytes < 1100 * MB


def test_the_numbers_of_runs_are_settings() -> None:
    early = TierSettings(min_samples_for_ml=10, min_samples_for_stats=6)
    assert [a_predictor(steady(count), early).tier()[0] for count in (5, 6, 10)] == [
        Tier.DEFAULTS,
        Tier.STATISTICS,
        Tier.ML,
    ]


def growing(count: int) -> list[TaskRun]:
    """Every run needs a quarter more than the one before: no earlier run says how much."""
    return [a_run(i, round(10 * MB * 1.25**i)) for i in range(count)]


def test_a_tier_that_covers_too_little_gives_way_to_the_next_and_says_so() -> None:
    predictor = a_predictor(growing(60))
    assert predictor.confidence(Tier.ML) < 0.7
    assert predictor.tier() == (Tier.DEFAULTS, 0.0)
    assert predictor.predict(0) is None
    assert any("covered only" in line for line in predictor.reasons())
    lenient = a_predictor(growing(60), TierSettings(confidence_threshold=0.0))
    assert lenient.tier()[0] is Tier.ML


def gaussian(dice: random.Random) -> int:
    return round(abs(dice.gauss(1000, 30)) * MB)


def heavy(dice: random.Random) -> int:
    return round(dice.paretovariate(1.5) * 100 * MB)


def two_kinds(dice: random.Random) -> int:
    return round(dice.choice((200, 900)) * dice.uniform(0.99, 1.01) * MB)


@pytest.mark.parametrize(
    "draw", [gaussian, *(pytest.param(draw, marks=pytest.mark.slow) for draw in (heavy, two_kinds))]
)
def test_the_confidence_is_the_share_of_new_runs_that_get_enough(draw: Callable[[random.Random], int]) -> None:
    dice = random.Random(7)
    predictor = a_predictor([a_run(i, draw(dice)) for i in range(200)])
    said, enough = [], []
    for i in range(200, 500):
        found = predictor.predict(0)
        assert found is not None
        memory = draw(dice)
        said.append(found.confidence)
        enough.append(memory <= found.memory_bytes)
        predictor.learn_all([a_run(i, memory)])
    assert sum(said) / len(said) == pytest.approx(sum(enough) / len(enough), abs=0.06)


def test_folds_judge_a_few_runs_as_well_as_new_ones_do() -> None:
    """Over many small histories, the confidence said is about the share of the next runs that are covered."""
    said, enough = 0.0, 0
    for seed in range(60):
        dice = random.Random(seed)
        predictor = a_predictor([a_run(i, gaussian(dice)) for i in range(8)], TierSettings(confidence_threshold=0.0))
        found = predictor.predict(0)
        assert found is not None
        assert found.tier is Tier.STATISTICS
        said += found.confidence
        enough += gaussian(dice) <= found.memory_bytes
    assert said / 60 == pytest.approx(enough / 60, abs=0.15)


def test_runs_over_the_limit_count_against_the_confidence_once_and_are_no_samples() -> None:
    predictor = a_predictor([a_run(i, 100 * MB + i) for i in range(40)])
    samples, before = predictor.samples, predictor.confidence(Tier.ML)
    for i in range(100, 110):
        limit = predictor.predict(0)
        assert limit is not None
        predictor.learn_all([cut_short(i, limit.memory_bytes)])
    assert predictor.samples == samples
    assert predictor.confidence(Tier.ML) < before - 0.1


def test_a_run_that_was_cut_short_below_the_limit_says_nothing() -> None:
    predictor = a_predictor([a_run(i, 100 * MB + i) for i in range(40)])
    before = predictor.confidence(Tier.ML), predictor.predict(0)
    predictor.learn_all([cut_short(99, 50 * MB)])
    assert (predictor.confidence(Tier.ML), predictor.predict(0)) == before


def test_the_limits_of_reruns_grow() -> None:
    found = a_predictor(steady(50)).predict(1000 * MB)
    assert found is not None
    assert len(found.next_memory_bytes) == MAX_RERUNS
    limits = [found.memory_bytes, *found.next_memory_bytes]
    assert all(one < other for one, other in itertools.pairwise(limits))


runs = st.lists(
    st.builds(
        lambda number, memory, size, bound: TaskRun(
            task_id=f"task-{number}",
            attempt=1,
            user="ana",
            key="x",
            input_bytes=size,
            memory_bytes=memory,
            run_ms=size,
            is_lower_bound=bound,
        ),
        st.integers(0, 20),
        st.integers(0, 2**60),
        st.integers(0, 2**60),
        st.booleans(),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=40)
@given(runs, st.integers(0, 2**60))
def test_whatever_was_learned_limits_grow_and_the_same_runs_say_the_same(runs: list[TaskRun], size: int) -> None:
    lenient = TierSettings(confidence_threshold=0.0, min_samples_for_ml=5, min_samples_for_stats=3)
    one, other = a_predictor(runs, lenient), a_predictor(runs, lenient)
    found = one.predict(size)
    assert found == other.predict(size)
    assert 0 <= one.tier()[1] <= 1
    if found is not None:
        limits = [found.memory_bytes, *found.next_memory_bytes]
        assert limits[0] > 0
        assert all(a < b for a, b in itertools.pairwise(limits))


def test_the_run_time_follows_the_input_also_where_memory_was_not_measured() -> None:
    times = [a_run(i, 0, input_bytes=size, run_ms=10 * size) for i, size in enumerate(range(100, 4000, 100))]
    predictor = a_predictor(times)
    assert predictor.samples == 0
    assert predictor.predict(2000) is None
    assert predictor.run_ms(2000) == pytest.approx(20_000, rel=0.1)
    assert a_predictor(times[:4]).run_ms(2000) is None


def test_cores_are_those_kept_busy() -> None:
    predictor = a_predictor([a_run(i, MB, run_ms=1000, cpu_ms=2500) for i in range(10)])
    assert predictor.cpu_milli(0) == pytest.approx(2500, rel=0.02)
    assert TaskPredictor(TierSettings()).cpu_milli(0) is None


def test_numbers_of_the_command_are_features() -> None:
    dice = random.Random(5)
    learned = [
        a_run(i, round((100 + 50 * epochs) * MB * dice.gauss(1, 0.01)), numbers=(seed, epochs, 7.0, width))
        for i in range(100)
        for epochs, seed, width in [(dice.randint(1, 20), dice.randint(0, 10**6), dice.randint(1, 3))]
    ]
    predictor = a_predictor(learned, numbers=4)
    found = predictor.predict(0, (5.0, 10.0, 7.0, 2.0))
    assert found is not None
    assert 580 * MB < found.memory_bytes < 660 * MB


def test_batch_factors_are_learned_and_unknown_without_runs() -> None:
    dice = random.Random(6)
    learned = [
        a_run(
            i,
            round((500 + 100 * batch) * MB * dice.gauss(1, 0.01)),
            run_ms=round(batch * 100),
            cpu_ms=round(batch * 50),
            numbers=(batch,),
        )
        for i in range(60)
        for batch in [float(dice.choice((1, 2, 4, 8, 16, 32)))]
    ]
    factors = a_predictor(learned, numbers=1).batch_factors((1.0,), (16.0,))
    assert factors["memory"] == pytest.approx(2100 / 600, rel=0.1)
    assert factors["run_time"] == pytest.approx(16, rel=0.1)
    assert factors["cpu_time"] == pytest.approx(16, rel=0.1)
    assert a_predictor(learned[:4], numbers=1).batch_factors((1.0,), (16.0,)) == {}


def test_summaries_of_old_runs_are_samples_for_statistics() -> None:
    summary = RunSummary().plus(a_run(i, 100 * MB + i * MB, run_ms=5000) for i in range(20))
    predictor = TaskPredictor(TierSettings())
    predictor.learn_summary(summary)
    found = predictor.predict(0)
    assert found is not None
    assert (found.tier, found.samples) == (Tier.STATISTICS, 20)
    assert 110 * MB < found.memory_bytes < 200 * MB
    assert found.run_ms == pytest.approx(5000, rel=0.1)


def test_runs_that_are_only_counted_are_samples() -> None:
    predictor = a_predictor(steady(28))
    predictor.count_unlearned([*steady(2), cut_short(1, MB)])
    assert predictor.samples == 30


def test_cached_answers_end_with_the_next_run() -> None:
    predictor = a_predictor(steady(40))
    first = predictor.predict(1000 * MB)
    assert predictor.predict(1000 * MB) is first
    predictor.learn_all(steady(40, seed=2))
    assert predictor.predict(1000 * MB) is not first


def test_the_margin_is_small_for_small_and_for_large() -> None:
    assert with_margin(8 * MB) == 9 * MB
    assert with_margin(1000 * MB) == 1004 * MB
