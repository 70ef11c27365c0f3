"""Regressions learned online: they find the weights, and shrug off outliers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from distributed_grid.prediction.regression_mixture import FIRST_WEIGHTS, RegressionMixture

SIZE = len(FIRST_WEIGHTS)


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
