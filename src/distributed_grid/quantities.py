"""Sizes and durations as people write them, in base units. Only the standard library is imported here."""

from __future__ import annotations

import math
import re

from distributed_grid.errors import BadInput
from distributed_grid.number_text import GIB

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from datetime import timedelta

    Span = float | str | timedelta
    """A duration: seconds, a text such as `1h30m`, or a timedelta."""
    Size = float | str
    """A size: GB, or a text such as `512M`."""

MAX_SECONDS = 3.2e9  # a hundred years
# Patterns are compiled on their first use: every command that submits a job imports this file.
_NUMBER = r"(\d+(?:\.\d+)?)"
_SIZE = _NUMBER + r"\s*([KMGTP]?)(?:I?B)?"
_SPAN_PART = _NUMBER + r"\s*(s(?:ec)?|m(?:in)?|h|d|w)(?![a-z])\s*"
_FLAGS = re.IGNORECASE | re.ASCII
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_size(size: Size, noun: str) -> float:
    """Bytes of a size such as `512M`, `1.5GiB` or `4G`; a bare number is GB."""
    byte_count = bytes_of(size, unit=GIB)
    if math.isnan(byte_count):
        raise BadInput(f"{noun} is written as 512M, 1.5GiB or 4G, not {size!r}")
    return byte_count


def parse_seconds(span: Span, noun: str) -> float:
    """Seconds of a duration such as 90, `90s`, `1h30m` or a timedelta."""
    seconds = seconds_of(span)
    if math.isnan(seconds):
        raise BadInput(f"{noun} is a number of seconds, or a time such as 90s, 5min or 1h30m, not {span!r}")
    return seconds


def bytes_of(size: Size | object, *, unit: int) -> float:
    """Bytes of a size, all units powers of 1024, a bare number in `unit`; NaN for anything else."""
    byte_count = math.nan
    if isinstance(size, int | float):
        byte_count = float(size) * unit
    elif isinstance(size, str) and (match := re.fullmatch(_SIZE, size.strip(), _FLAGS)) is not None:
        scale = 1024 ** " KMGTP".index(match[2].upper()) if match[2] else 1 if match[0][-1] in "bB" else unit
        byte_count = float(match[1]) * scale
    return byte_count if 0 <= byte_count < math.inf else math.nan


def seconds_of(span: Span | object) -> float:
    """Seconds of a duration of at most a century; NaN for anything else."""
    seconds = math.nan
    if isinstance(span, int | float):
        seconds = float(span)
    elif isinstance(span, str):
        text = span.strip()
        parts = re.findall(_SPAN_PART, text, _FLAGS)
        if parts and not re.sub(_SPAN_PART, "", text, flags=_FLAGS):
            seconds = sum(float(number) * _SECONDS[unit[0].lower()] for number, unit in parts)
        elif re.fullmatch(_NUMBER, text, re.ASCII):
            seconds = float(text)
    elif hasattr(span, "total_seconds"):
        seconds = span.total_seconds()
    return seconds if 0 <= seconds <= MAX_SECONDS else math.nan
