"""Beginnings of ids: what may stand for a whole id, wherever people and programs name things by their ids.

A beginning that fits the only thing there is would name it by accident, so it must have some length of its own.
"""

from __future__ import annotations

from distributed_grid.errors import NotFound

MIN_PREFIX_LENGTH = 4
GENERATED = ("job-", "auto-", "worker-", "move-")
"""What ids made by the grid begin with; it says nothing about which one is meant."""


def is_prefix(text: str) -> bool:
    """Whether a text is long enough to stand for the id that begins so."""
    return len(text) - len(generated_part(text)) >= MIN_PREFIX_LENGTH


def generated_part(text: str) -> str:
    """The beginning of an id that the grid gives to every id of its kind; empty where there is none."""
    return next((generated for generated in GENERATED if text.startswith(generated)), "")


def fits(key: str, name: str) -> bool:
    """Whether a name means this id: it is the id, or a beginning of it that is long enough."""
    return key == name or (is_prefix(name) and key.startswith(name))


def not_found(what: str, name: str) -> NotFound:
    """The error of a name that fits nothing."""
    return NotFound(f"no {what} is called {name!r}{prefix_hint(name)}")


def prefix_hint(name: str) -> str:
    """What to add to that error where the name is too short for a beginning."""
    needed = f"{MIN_PREFIX_LENGTH} characters of its own"
    return "" if is_prefix(name) else f"; the beginning of an id needs {needed}"
