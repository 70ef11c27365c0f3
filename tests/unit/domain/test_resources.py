"""Amounts: integers only, and nothing that no machine could have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.resources import MAX_AMOUNT, Amounts, Priority, ResourceType, normalized_custom
from distributed_grid.errors import BadInput


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (Amounts(), "nothing is asked for: the amount must be more than zero"),
        (Amounts(gpu_memory_bytes=1), "nothing is asked for: the amount must be more than zero"),
        (Amounts(cpu_milli=-1), "amounts must not be negative"),
        (Amounts(cpu_milli=1, custom=(("fpga", -1),)), "amounts must not be negative"),
        (Amounts(memory_bytes=MAX_AMOUNT + 1), "the amount is larger than any machine"),
        (Amounts(gpu_milli=1500), "more than one GPU can only be asked for in whole devices"),
        (Amounts(cpu_milli=1, custom=(("fpga", 0),)), "the amount must be more than zero"),
        (Amounts(custom=(("fpga", 1), ("fpga", 1))), "a resource is asked for twice"),
        (Amounts(cpu_milli=1), None),
        (Amounts(memory_bytes=MAX_AMOUNT), None),
        (Amounts(gpu_milli=300), None),
        (Amounts(gpu_milli=3000), None),
        (Amounts(custom=(("fpga", 1),)), None),
    ],
)
def test_an_ask_that_makes_no_sense_says_why(ask, problem):
    assert ask.problem() == problem


@pytest.mark.parametrize(
    ("word", "priority"),
    [
        ("low", Priority.LOW),
        ("medium", Priority.MEDIUM),
        ("Normal", Priority.MEDIUM),
        ("HIGH", Priority.HIGH),
        (" urgent ", Priority.URGENT),
        ("critical", Priority.URGENT),
        (2, Priority.HIGH),
        (Priority.LOW, Priority.LOW),
    ],
)
def test_a_priority_has_the_words_of_every_guide(word, priority):
    assert Priority.parse(word) is priority


def test_a_word_that_is_no_priority_lists_those_that_are():
    with pytest.raises(
        BadInput, match=r"^no priority 'asap': use low, medium \(normal\), high or urgent \(critical\)$"
    ):
        Priority.parse("asap")


def test_priorities_are_ordered():
    assert Priority.LOW < Priority.MEDIUM < Priority.HIGH < Priority.URGENT


@pytest.mark.parametrize("word", ["gpu", "GPU", "Gpu"])
def test_a_resource_type_is_found_whatever_its_case(word):
    assert ResourceType(word) is ResourceType.GPU


def test_a_custom_name_is_no_resource_type():
    with pytest.raises(ValueError, match="fpga"):
        ResourceType("fpga")


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9)))
def test_custom_resources_have_one_form_whatever_their_order(named):
    backwards = dict(reversed(named.items()))
    assert normalized_custom(named) == normalized_custom(backwards)
    assert normalized_custom(named) == tuple(sorted(normalized_custom(named)))
    assert dict(normalized_custom(named)) == {name: count for name, count in named.items() if count}
