"""Numbers as text for people: plain decimals without an exponent, and the noun in singular where there is one."""

from __future__ import annotations

import math

KIB, MIB, GIB = 1024, 1024**2, 1024**3
SHOWN_DIGITS = 3
"""Digits after the point; of a number below 0.01, leading zeros not counted."""


def plain_number(value: float) -> str:
    """A number as a person writes it: `1000000`, `0.25`, `0.0000125`; `inf` and `nan` as they are."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(SHOWN_DIGITS, SHOWN_DIGITS - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".")


def rounded(value: float) -> str:
    """A number to three digits, and never less than its whole part: `0.0625`, `15.6`, `1536`."""
    if not value or not math.isfinite(value):
        return plain_number(value)
    return plain_number(round(value, max(SHOWN_DIGITS - 1 - math.floor(math.log10(abs(value))), 0)))


def counted(value: float, noun: str) -> str:
    """A number and its noun, which has an `s` unless there is exactly one: `1 core`, `0.5 cores`."""
    return f"{plain_number(value)} {noun}{'' if value == 1 else 's'}"


def size_text(size: int) -> str:
    """A number of bytes in the largest unit of which there is a tenth; below a KB in bytes."""
    if size >= GIB / 10:
        return f"{size / GIB:.1f} GB"
    if size >= MIB / 10:
        return f"{size / MIB:.1f} MB"
    return f"{size / KIB:.1f} KB" if size >= KIB else counted(size, "byte")
