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
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:I?B)?", re.IGNORECASE | re.ASCII)
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(s(?:ec)?|m(?:in)?|h|d|w)(?![a-z])\s*", re.IGNORECASE | re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_size(size: Size, noun: str, *, unit: int = GIB) -> float:
    """Bytes of a size such as `512M`, `1.5GiB` or `4G`, all powers of 1024; a bare number counts in `unit`."""
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        number = float(match[1])
        scale = 1024 ** " KMGTP".index(match[2].upper()) if match[2] else 1 if match[0][-1] in "bB" else unit
    elif isinstance(size, int | float):
        number, scale = float(size), unit
    else:
        number, scale = math.nan, unit
    if not 0 <= number < math.inf:
        raise BadInput(f"{noun} is written as 512M, 1.5GiB or 4G, not {size!r}")
    return number * scale


def parse_seconds(span: Span, noun: str) -> float:
    """Seconds of a duration such as 90, `90s`, `1h30m` or a timedelta."""
    seconds = math.nan
    if isinstance(span, str):
        text = span.strip()
        parts = _SPAN_PART.findall(text)
        if parts and not _SPAN_PART.sub("", text):
            seconds = sum(float(number) * _SECONDS[unit[0].lower()] for number, unit in parts)
        else:
            try:
                seconds = float(text)
            except ValueError:
                seconds = math.nan
    elif isinstance(span, int | float):
        seconds = float(span)
    elif hasattr(span, "total_seconds"):
        seconds = span.total_seconds()
    if not 0 <= seconds <= MAX_SECONDS:
        raise BadInput(f"{noun} is a number of seconds, or a time such as 90s, 5min or 1h30m, not {span!r}")
    return seconds
