"""Amounts in the words people use."""

from __future__ import annotations

GB = 1024**3


def cores(milli: int) -> str:
    return f"{milli / 1000:g} core{'' if milli == 1000 else 's'}"


def gigabytes(size: int) -> str:
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / 1024**2:.1f} MB"


def gpus(milli: int) -> str:
    return f"{milli / 1000:g} GPU{'' if milli == 1000 else 's'}"
