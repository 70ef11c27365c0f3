"""The kept slots and the regressors made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distributed_grid.prediction.load_history import KEPT_SLOTS, REGRESSORS, SLOTS_PER_DAY, LoadHistory


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


def test_what_followed_similar_stretches_is_found() -> None:
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
    twin = history.copy()
    twin.add(9.0, 0.0)
    assert history.save() == history_of([1.0, 2.0]).save()
    assert twin.save() != history.save()
