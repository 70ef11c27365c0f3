"""Scheduling policy: words for strategies, whom a quota covers, and how much a user counts for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy, Strategy
from distributed_grid.errors import BadInput


def test_a_word_for_a_strategy_may_have_dashes_and_capitals_but_must_be_one():
    assert Strategy.parse("Best-Fit") is Strategy.BEST_FIT
    with pytest.raises(BadInput, match="no strategy 'fastest': use one of load_balanced, "):
        Strategy.parse("fastest")


@given(st.sampled_from(Strategy), st.sampled_from("-_"), st.booleans())
def test_every_strategy_is_found_by_its_name_however_that_is_written(strategy, dash, shouts):
    word = strategy.replace("_", dash)
    assert Strategy.parse(f" {word.upper() if shouts else word} ") is strategy


@pytest.mark.parametrize(
    ("user", "team", "covered"),
    [("ada", "", True), ("bob", "", True), ("eve", "ml", True), ("eve", "", False), ("eve", "ops", False)],
)
def test_a_quota_covers_its_user_its_members_and_whoever_asks_for_its_team(user, team, covered):
    assert any(quota.covers(user, team) for quota in (Quota(name="ada"), Quota(name="ml", members=("bob",)))) == covered


def test_a_user_without_a_team_is_not_covered_by_a_quota_without_a_name():
    assert not Quota(name="").covers("eve", "")


def test_a_user_counts_by_its_own_weight_else_by_its_teams_else_as_everybody():
    policy = SchedulingPolicy(weights=(("ada", 3000), ("ml", 2000)), quotas=(Quota(name="ml", members=("ada", "bob")),))
    assert [policy.weight_of(*who) for who in (("ada", "ml"), ("bob",), ("eve", "ml"), ("eve",))] == [
        3000,
        2000,
        2000,
        1000,
    ]
    assert SchedulingPolicy().weight_of("ada", "ml") == 1000


def test_there_is_one_policy_and_it_is_never_over():
    assert SchedulingPolicy(preemptions_max=0).key == SchedulingPolicy().key
    assert not SchedulingPolicy().is_over
