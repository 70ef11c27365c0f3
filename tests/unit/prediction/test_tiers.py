"""Held-out coverage: it comes to the true share, and a few runs are no certainty."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.prediction.tiers import Coverage


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
