from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.errors import BadInput
from distributed_grid.quantities import bytes_of, parse_seconds, parse_size

GIB = 1024**3


@pytest.mark.parametrize(
    ("size", "byte_count"),
    [
        ("512M", GIB // 2),
        ("512 MiB", GIB // 2),
        ("512mb", GIB // 2),
        ("1.5GiB", 1.5 * GIB),
        ("4G", 4 * GIB),
        ("4", 4 * GIB),
        (4, 4 * GIB),
        (0.5, GIB // 2),
        ("2T", 2048 * GIB),
        ("100B", 100),
        ("100KB", 102_400),
        (0, 0),
    ],
)
def test_sizes_are_powers_of_1024_and_bare_numbers_gigabytes(size: float | str, byte_count: float) -> None:
    assert parse_size(size, "mem") == byte_count


def test_bare_numbers_count_in_the_unit_of_the_caller() -> None:
    assert bytes_of("4096", unit=1) == 4096


@pytest.mark.parametrize("size", ["", "much", "-1", "1e9", "4 X", "1,5G", "G", "nan", math.nan, math.inf, -1, None])
def test_invalid_size_is_refused_in_one_line_with_its_noun(size: float | str) -> None:
    with pytest.raises(BadInput, match=r"^mem is written as 512M, 1.5GiB or 4G, not [^\n]+$"):
        parse_size(size, "mem")


@pytest.mark.parametrize(
    ("span", "seconds"),
    [
        (90, 90),
        (0, 0),
        (0.25, 0.25),
        ("90", 90),
        ("1.5", 1.5),
        ("90s", 90),
        ("90 sec", 90),
        ("5min", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h 30min 5s", 5405),
        ("2D", 172_800),
        ("1w", 604_800),
        (timedelta(minutes=2), 120),
    ],
)
def test_durations(span: float | str | timedelta, seconds: float) -> None:
    assert parse_seconds(span, "a timeout") == seconds


@pytest.mark.parametrize(
    "span", ["", "soon", "-1", "1h30", "h", "1hour", "5 mins", "nan", "inf", math.nan, -1, 1e10, None, timedelta(-1)]
)
def test_invalid_duration_is_refused_in_one_line_with_its_noun(span: float | str | timedelta) -> None:
    with pytest.raises(BadInput, match=r"^a timeout is a number of seconds, or [^\n]+$"):
        parse_seconds(span, "a timeout")


@given(st.integers(0, 30), st.integers(0, 23), st.integers(0, 59))
def test_units_add_up(days: int, hours: int, minutes: int) -> None:
    assert parse_seconds(f"{days}d{hours}h{minutes}m", "a time") == ((days * 24 + hours) * 60 + minutes) * 60
