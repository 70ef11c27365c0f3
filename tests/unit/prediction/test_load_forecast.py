"""The load forecaster: learning, robustness, saving; its regressions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from statistics import fmean

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.errors import BadInput
from distributed_grid.prediction.load_forecast import (
    FIRST_WEIGHTS,
    KEPT_SLOTS,
    REGRESSORS,
    SLOTS_PER_DAY,
    LoadForecaster,
    LoadHistory,
    RegressionMixture,
    SavedForecaster,
)

SIZE = len(FIRST_WEIGHTS)
LOADS = st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 1.0, 1e-300, 1e300]))


def learned(*, outliers: float = 0.0, steps: int = 800) -> tuple[RegressionMixture, np.ndarray]:
    """A mixture taught a linear truth in which some observations are far off."""
    dice = random.Random(5)
    weights = np.array([dice.uniform(-1, 1) for _ in range(SIZE)])
    mixture = RegressionMixture(SIZE)
    for _ in range(steps):
        regressors = np.array([dice.gauss(0, 1) for _ in range(SIZE)])
        truth = float(weights @ regressors) + dice.gauss(0, 0.01)
        if dice.random() < outliers:
            truth += 50
        mixture.learn(regressors, mixture.predictions(regressors), truth)
    return mixture, weights


def test_a_linear_truth_is_learned() -> None:
    mixture, weights = learned()
    regressors = np.linspace(-1, 1, SIZE)
    predicted = mixture.mixed(mixture.predictions(regressors))
    assert predicted == pytest.approx(float(weights @ regressors), abs=0.05)


def test_outliers_hardly_move_what_was_learned() -> None:
    mixture, weights = learned(outliers=0.05)
    regressors = np.linspace(-1, 1, SIZE)
    predicted = mixture.mixed(mixture.predictions(regressors))
    assert predicted == pytest.approx(float(weights @ regressors), abs=0.3)


def test_before_learning_the_newest_regressors_are_smoothed() -> None:
    mixture = RegressionMixture(SIZE)
    assert mixture.mixed(mixture.predictions(np.ones(SIZE))) == pytest.approx(1, abs=0.01)


def test_regressors_that_stay_zero_do_not_unsettle_the_others() -> None:
    mixture = RegressionMixture(SIZE)
    regressors = np.zeros(SIZE)
    regressors[1] = 1
    for _ in range(20_000):
        mixture.learn(regressors, mixture.predictions(regressors), 3.0)
    assert mixture.mixed(mixture.predictions(regressors)) == pytest.approx(3, abs=0.01)
    assert np.isfinite(mixture.predictions(np.ones(SIZE))).all()


def test_a_restored_mixture_predicts_the_same() -> None:
    mixture, _ = learned(steps=50)
    restored = RegressionMixture.restore(mixture.save(), SIZE)
    assert restored.save() == mixture.save()


def test_a_saved_mixture_of_other_regressors_is_learned_anew() -> None:
    mixture, _ = learned(steps=50)
    restored = RegressionMixture.restore(mixture.save(), SIZE + 1)
    assert restored.save() == RegressionMixture(SIZE + 1).save()


def taught(loads: Iterable[float], first: int = 0) -> LoadForecaster:
    forecaster = LoadForecaster()
    for slot, load in enumerate(loads, first):
        forecaster.observe(slot, load)
    return forecaster


def daily(days: int, *, noise: float = 0.0) -> list[float]:
    """A load with a daily wave of 100 to 500."""
    dice = random.Random(7)
    wave = [300 + 200 * math.sin(2 * math.pi * slot / SLOTS_PER_DAY) for slot in range(SLOTS_PER_DAY)]
    return [load * math.exp(dice.gauss(0, noise)) for _ in range(days) for load in wave]


def test_nothing_known_is_forecast_as_nothing() -> None:
    assert LoadForecaster().forecast(3) == [0, 0, 0]


def test_no_steps_are_no_forecast() -> None:
    assert LoadForecaster().forecast(0) == []
    assert taught([5.0]).forecast(0) == []


@pytest.mark.parametrize("load", [0.0, 0.25, 7.0, 1e6])
def test_a_constant_load_stays_what_it_is(load: float) -> None:
    forecaster = taught([load] * 400)
    assert forecaster.forecast(SLOTS_PER_DAY) == pytest.approx([load] * SLOTS_PER_DAY)


def test_a_step_is_followed_within_half_an_hour() -> None:
    forecaster = taught([10.0] * 600 + [1000.0] * 6)
    assert forecaster.forecast()[0] == pytest.approx(1000, rel=0.1)


def test_a_single_peak_is_forgotten() -> None:
    forecaster = taught([*[100.0] * 600, 10_000.0, *[100.0] * 6])
    assert forecaster.forecast()[0] == pytest.approx(100, rel=0.1)


def test_the_day_is_learned() -> None:
    loads = daily(5, noise=0.05)
    forecaster = taught(loads[: 4 * SLOTS_PER_DAY])
    truth = daily(1)
    tomorrow = forecaster.forecast(SLOTS_PER_DAY)
    assert fmean(abs(ours - load) / load for ours, load in zip(tomorrow, truth, strict=True)) < 0.1


def test_one_step_ahead_is_better_than_the_last_value() -> None:
    loads = daily(3, noise=0.1)
    forecaster = LoadForecaster()
    ours, last = [], []
    for slot, load in enumerate(loads):
        if slot >= SLOTS_PER_DAY:
            ours.append(abs(forecaster.forecast()[0] - load) / load)
            last.append(abs(loads[slot - 1] - load) / load)
        forecaster.observe(slot, load)
    assert fmean(ours) < 0.85 * fmean(last)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 40), LOADS), min_size=1, max_size=60), st.integers(1, 40))
def test_forecasts_are_finite_and_never_negative(steps: list[tuple[int, float]], ahead: int) -> None:
    forecaster = LoadForecaster()
    slot = 0
    for pause, load in steps:
        slot += pause
        forecaster.observe(slot, load)
        forecasts = forecaster.forecast(ahead)
        assert len(forecasts) == ahead
        assert all(math.isfinite(value) and value >= 0 for value in forecasts)


def test_wild_loads_over_weeks_keep_forecasts_finite() -> None:
    dice = random.Random(3)
    forecaster = LoadForecaster()
    for slot in range(2 * KEPT_SLOTS + 200):
        forecaster.observe(slot, dice.choice([0.0, 0.0, 1.0, dice.paretovariate(0.5), 1e12]))
        (load,) = forecaster.forecast()
        assert math.isfinite(load)
        assert load >= 0


def test_the_same_loads_give_the_same_forecasts() -> None:
    loads = daily(2, noise=0.1)
    assert taught(loads).forecast(20) == taught(loads).forecast(20)


def test_forecasting_changes_nothing() -> None:
    loads = daily(2, noise=0.1)
    asked = LoadForecaster()
    for slot, load in enumerate(loads):
        asked.forecast(3 if slot % 50 == 0 else 1)
        asked.observe(slot, load)
    assert asked.forecast(20) == taught(loads).forecast(20)


def test_the_first_step_of_a_long_forecast_is_the_short_one() -> None:
    forecaster = taught(daily(2, noise=0.1))
    assert forecaster.forecast(50)[0] == forecaster.forecast()[0]


@pytest.mark.parametrize("slots", [5, 700, KEPT_SLOTS + 100])
def test_a_restored_forecaster_forecasts_the_same(slots: int) -> None:
    loads = daily(12, noise=0.1)
    forecaster = taught(loads[:slots])
    stored = msgspec.json.encode(forecaster.save())
    restored = LoadForecaster.restore(msgspec.json.decode(stored, type=SavedForecaster))
    for slot in range(slots, slots + 50):
        assert restored.forecast(3) == pytest.approx(forecaster.forecast(3))
        restored.observe(slot, loads[slot])
        forecaster.observe(slot, loads[slot])


def test_an_empty_forecaster_can_be_saved() -> None:
    restored = LoadForecaster.restore(LoadForecaster().save())
    restored.observe(0, 5.0)
    assert restored.forecast() == pytest.approx([5])


def test_the_state_stops_growing_after_eight_days() -> None:
    dice = random.Random(1)
    forecaster = taught(dice.uniform(1, 9) for _ in range(KEPT_SLOTS))
    eight_days = len(forecaster.save().history.rows)
    for slot in range(KEPT_SLOTS, 2 * KEPT_SLOTS + 200):
        forecaster.observe(slot, dice.uniform(1, 9))
        if slot % 200 == 0:
            assert len(forecaster.save().history.rows) == eight_days


def test_a_gap_keeps_the_time_of_day() -> None:
    loads = daily(8)
    gap = range(5 * SLOTS_PER_DAY, 5 * SLOTS_PER_DAY + 100)
    forecaster = LoadForecaster()
    for slot in range(6 * SLOTS_PER_DAY + 50):
        if slot not in gap:
            forecaster.observe(slot, loads[slot])
    start = 6 * SLOTS_PER_DAY + 50
    assert forecaster.forecast(12) == pytest.approx(loads[start : start + 12], rel=0.1)


def test_after_a_gap_longer_than_what_is_kept_the_last_load_counts() -> None:
    forecaster = taught([100.0] * 500)
    for slot in range(100 * SLOTS_PER_DAY + 77, 100 * SLOTS_PER_DAY + 87):
        forecaster.observe(slot, 20.0)
    assert forecaster.forecast()[0] == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize("load", [-1.0, math.nan, math.inf])
def test_a_load_that_is_none_is_refused_and_changes_nothing(load: float) -> None:
    forecaster = taught([5.0, 6.0, 7.0])
    before = forecaster.save()
    with pytest.raises(BadInput, match="a load is a finite number"):
        forecaster.observe(3, load)
    assert forecaster.save() == before


def test_a_slot_is_learned_once() -> None:
    forecaster = taught([5.0, 6.0], first=10)
    with pytest.raises(BadInput, match="slot 11 "):
        forecaster.observe(11, 6.0)


def history_of(logs: list[float]) -> LoadHistory:
    history = LoadHistory()
    for log in logs:
        history.add(log, 0.0)
    return history


@pytest.mark.parametrize("slots", [1, 2, 47, 300, KEPT_SLOTS, KEPT_SLOTS + 1, 2 * KEPT_SLOTS + 1])
def test_there_are_as_many_regressors_at_any_length(slots: int) -> None:
    regressors = history_of([math.sin(slot) for slot in range(slots)]).regressors(0, 0.05)
    assert len(regressors) == REGRESSORS
    assert np.isfinite(regressors).all()


def test_the_first_regressor_is_the_last_slot_relative_to_the_level() -> None:
    history = history_of([1.0, 2.0, 5.0])
    assert history.regressors(0, 0.05)[0] + history.level == pytest.approx(5)


@pytest.mark.parametrize("slots", [3 * SLOTS_PER_DAY, 12 * SLOTS_PER_DAY])
def test_the_day_before_is_the_slot_of_the_same_time(slots: int) -> None:
    history = history_of([float(slot) for slot in range(slots)])
    assert history.day_before() == slots - SLOTS_PER_DAY


def test_usual_is_the_mean_of_the_same_time_on_up_to_seven_days() -> None:
    logs = [float(slot // SLOTS_PER_DAY) for slot in range(10 * SLOTS_PER_DAY)]
    assert history_of(logs[: 2 * SLOTS_PER_DAY]).usual() == pytest.approx(0.5)
    assert history_of(logs).usual() == pytest.approx(6)


def test_sequels_of_similar_stretches_are_found() -> None:
    """A peak follows a pattern that has no fixed period."""
    logs: list[float] = []
    for quiet in (31, 44, 37, 52, 29, 41, 35, 48, 33, 39, 46, 30):
        logs += [*[1.0] * quiet, 2.0, 1.5, 1.8, 1.2, 4.0]
    history = history_of(logs[:-1])
    similar = history.regressors(0, 0.05) + history.level
    assert np.isclose(similar, 4.0, atol=0.3).any()
    assert not np.isclose(history_of([*logs[:-1], 4.0, *[1.0] * 20]).regressors(0, 0.05), 3.0, atol=0.5).any()


def test_a_gap_does_not_move_the_level() -> None:
    history = history_of([1.0] * 10)
    history.add(9.0, 0.0, measured=False)
    assert history.level == pytest.approx(1)


def test_a_copy_is_independent() -> None:
    history = history_of([1.0, 2.0])
    twin = LoadHistory.restore(history.save())
    twin.add(9.0, 0.0)
    assert history.save() == history_of([1.0, 2.0]).save()
    assert twin.save() != history.save()
