"""Sizes of the measurements: the full ones, or with `--smoke` tiny ones that only show that a measurement runs."""

from __future__ import annotations

import os
from typing import TypeVar

VARIABLE = "GRID_BENCH_SMOKE"
"""Set by `python -m bench --smoke` before a measurement is imported; child processes inherit it."""
T = TypeVar("T")


class Unavailable(Exception):
    """A measurement cannot run here; the text says what is missing."""


def is_smoke() -> bool:
    """True if only tiny sizes are to be run."""
    return bool(os.environ.get(VARIABLE))


def sized(full: T, *, smoke: T) -> T:
    """The size of a measurement, or its tiny one."""
    return smoke if is_smoke() else full
