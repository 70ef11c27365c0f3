"""The lightest of some things that together are enough."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.scheduling.preemption.weighted_cover import CoverItem, lightest_cover

RANK = 1000
HEAVY = 10**9


def thing(weight: int, *amounts: int, rank: int = 0) -> CoverItem:
    """An item whose rank is in its weight, as the search expects it."""
    return CoverItem(weight + RANK ** (rank + 1), rank, amounts)


def weight_of(items: list[CoverItem], chosen: list[int] | tuple[int, ...]) -> int:
    return sum(items[at].weight for at in chosen)


def is_enough(items: list[CoverItem], chosen: list[int] | tuple[int, ...], needs: tuple[int, ...]) -> bool:
    return all(sum(items[at].amounts[dim] for at in chosen) >= need for dim, need in enumerate(needs))


def test_met_needs_take_no_item():
    assert lightest_cover([thing(1, 5)], (0,), HEAVY) == []
    assert lightest_cover([], (-3, 0), HEAVY) == []
    assert lightest_cover([], (0,), 0) is None


def test_unmeetable_need_has_no_cover():
    assert lightest_cover([thing(1, 5), thing(1, 4)], (10,), HEAVY) is None
    assert lightest_cover([thing(1, 5, 0), thing(1, 5, 0)], (5, 1), HEAVY) is None


def test_one_large_thing_goes_instead_of_two_small_ones():
    assert lightest_cover([thing(1, 2), thing(1, 2), thing(500, 4)], (4,), HEAVY) == [2]


def test_among_as_many_the_lightest_go():
    assert lightest_cover([thing(9, 4), thing(3, 4), thing(5, 4)], (4,), HEAVY) == [1]


def test_any_number_of_low_rank_go_before_one_of_high_rank():
    items = [thing(1, 4, rank=1), *[thing(50, 1) for _ in range(4)]]
    assert lightest_cover(items, (4,), HEAVY) == [1, 2, 3, 4]


def test_nothing_that_is_not_lighter_is_an_answer():
    items = [thing(3, 4)]
    assert lightest_cover(items, (4,), items[0].weight) is None
    assert lightest_cover(items, (4,), items[0].weight + 1) == [0]


def test_a_search_that_is_cut_short_still_gives_nothing_up_in_vain():
    items = [thing(at % 7, 3 + at % 5, 2 + at % 3) for at in range(12)]
    chosen = lightest_cover(items, (20, 12), HEAVY, steps=0)
    assert chosen is not None
    assert is_enough(items, chosen, (20, 12))
    assert not any(is_enough(items, [one for one in chosen if one != spared], (20, 12)) for spared in chosen)


@pytest.mark.parametrize("count", [300, 900])
def test_hundreds_of_things_are_no_trouble(count):
    items = [thing(at % 13, 1, 2) for at in range(count)]
    chosen = lightest_cover(items, (count - 50, 0), HEAVY)
    assert chosen is not None
    assert len(chosen) == count - 50


amounts = st.sampled_from([0, 0, 1, 2, 3, 5, 7, 9, 12])
things = st.lists(
    st.builds(thing, st.integers(0, 50), amounts, amounts, rank=st.sampled_from([0, 0, 0, 0, 1, 2])), max_size=9
)


def subset_sums(items: list[CoverItem]) -> list[tuple[int, int, int]]:
    """The weight of every subset, and its two amounts."""
    sums = [(0, 0, 0)]
    for one in items:
        first, second = one.amounts
        sums += [(weight + one.weight, a + first, b + second) for weight, a, b in sums]
    return sums


@settings(max_examples=300)
@given(items=things, needs=st.tuples(st.integers(-2, 30), st.integers(-2, 30)), cut=st.integers(0, 3))
def test_nothing_lighter_is_enough(items, needs, cut):
    enough = [weight for weight, *amounts in subset_sums(items) if amounts[0] >= needs[0] and amounts[1] >= needs[1]]
    lightest = min(enough, default=HEAVY**4)
    below = lightest + cut
    found = lightest_cover(items, needs, below)
    if not enough or not cut:
        assert found is None
    else:
        assert found is not None
        assert is_enough(items, found, needs)
        assert weight_of(items, found) == lightest
