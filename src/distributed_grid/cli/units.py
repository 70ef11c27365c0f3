"""Sizes and spans of time as people write and read them: GB is 1024³ bytes."""

from __future__ import annotations

import math
import re

from distributed_grid.errors import BadInput

UNITS = ("", "K", "M", "G", "T", "P")
LARGEST_BYTES = 1 << 46
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:I?B)?", re.IGNORECASE)
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def bytes_in(text: str) -> int:
    """The bytes that a size such as `5GB`, `1.5GiB` or `4096` means; BadInput for what is none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise BadInput(f"a size is written as 4096, 512MB or 1.5GB, not {text!r}")
    size = float(found[1]) * 1024 ** UNITS.index(found[2].upper())
    if not size.is_integer() and not found[2]:
        raise BadInput(f"{text!r} is no whole number of bytes")
    if not 1 <= size <= LARGEST_BYTES:
        raise BadInput(f"a block has 1 byte to {size_text(LARGEST_BYTES)}, not {text}")
    return int(found[1]) if found[1].isdigit() and not found[2] else round(size)


def size_text(size: int) -> str:
    """A size in the largest unit of which there is one: `1.5 GB`."""
    if size < 1024:
        return f"{size} byte{'' if size == 1 else 's'}"
    power = min(int(math.log2(size)) // 10, len(UNITS) - 1)
    return f"{size / 1024**power:.4g} {UNITS[power]}B"


def span_text(seconds: float) -> str:
    """A span of time in one unit: `55 min`."""
    for length, unit in _SPANS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def seconds_in(text: str | float) -> float:
    """More than no seconds; BadInput for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadInput(f"a time is a number of seconds above zero, not {text!r}")
    return seconds
