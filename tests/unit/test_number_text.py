"""Numbers as a person writes them, and nouns in singular where there is one."""

from __future__ import annotations

import pytest

from distributed_grid.number_text import counted, plain_number, rounded, size_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1_000_000, "1000000"),
        (1e6, "1000000"),
        (12_345_678.5, "12345678.5"),
        (0.25, "0.25"),
        (2 / 3, "0.667"),
        (0.0000125, "0.0000125"),
        (-0.5, "-0.5"),
        (0, "0"),
        (100, "100"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_a_number_has_no_exponent(value, text):
    assert plain_number(value) == text


def test_a_rounded_number_keeps_its_whole_part():
    assert [rounded(value) for value in (0, 1 / 16, 15.63, 125.63, 1536, 1e6)] == [
        *("0", "0.0625", "15.6", "126", "1536", "1000000")
    ]


def test_one_of_something_is_singular():
    assert [counted(number, "core") for number in (0, 0.5, 1, 2, 1e6)] == [
        *("0 cores", "0.5 cores", "1 core", "2 cores", "1000000 cores")
    ]


def test_a_size_is_in_a_unit_in_which_it_is_not_nothing():
    sizes = (0, 1, 100, 2048, 500_000, 50 * 1024**2, 4 * 1024**3)
    assert [size_text(size) for size in sizes] == [
        *("0 bytes", "1 byte", "100 bytes", "2.0 KB", "0.5 MB", "50.0 MB", "4.0 GB")
    ]
