"""Prefixes of ids, which may stand for whole ids in requests.

A short prefix could name the only row there is by accident, so it needs a minimum length of its own.
"""

from __future__ import annotations

from distributed_grid.errors import NotFound

MIN_PREFIX_LENGTH = 4
GENERATED = ("job-", "auto-", "worker-", "move-")
"""Prefixes of generated ids, which all ids of their kind share."""


def is_prefix(text: str) -> bool:
    """True for a text long enough to stand for an id."""
    return len(text) - len(generated_part(text)) >= MIN_PREFIX_LENGTH


def generated_part(text: str) -> str:
    """The generated prefix of an id, or ""."""
    return next((generated for generated in GENERATED if text.startswith(generated)), "")


def fits(key: str, name: str) -> bool:
    """True if a name is this id, or a prefix of it that is long enough."""
    return key == name or (is_prefix(name) and key.startswith(name))


def not_found(what: str, name: str) -> NotFound:
    return NotFound(f"no {what} is called {name!r}{prefix_hint(name)}")


def prefix_hint(name: str) -> str:
    """End of an error about a name that is too short for a prefix."""
    needed = f"{MIN_PREFIX_LENGTH} characters of its own"
    return "" if is_prefix(name) else f"; the beginning of an id needs {needed}"
