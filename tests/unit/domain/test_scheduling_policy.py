"""Scheduling policy: words for strategies, whom a quota covers, and how much a user counts for."""

from __future__ import annotations

import pytest

from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import BadInput


def test_a_word_for_a_strategy_may_have_dashes_and_capitals_but_must_be_one():
    assert Strategy.parse("Best-Fit") is Strategy.BEST_FIT
    with pytest.raises(BadInput, match="no strategy 'fastest': use one of load_balanced, "):
        Strategy.parse("fastest")
