"""The journal of one attempt: a file to which lines are appended, each a JSON object.

The first line is the spec; those after it have one key, which says what they tell: `shim`, `started`, `ended`.

Rule 1. A line cut short by a crash or a full disk counts as absent, and hides none that follows: every line begins
        by ending the one before.
Rule 2. Nothing is told twice unless it is the same, so it does not matter which of two lines is read.
"""

from __future__ import annotations

import json
import os
from typing import Any


def entry(key: str, content: Any) -> bytes:
    """One line, for `append` or for whoever else should hear of it."""
    return json.dumps({key: content}).encode() + b"\n"


def append(fd: int, line: bytes) -> None:
    """Put the line at the end of a journal opened with O_APPEND; after an `OSError` it may simply be put again."""
    write_all(fd, b"\n" + line)


def find(text: bytes, key: str) -> Any:
    """What a journal tells under `key`; None where no whole line does."""
    start = f'{{"{key}": '.encode()
    found = (parsed(line) for line in text.split(b"\n") if line.startswith(start))
    return next((line[key] for line in found if line is not None), None)


def first(text: bytes) -> Any:
    """The first line; None when it was cut short."""
    return parsed(text.partition(b"\n")[0])


def parsed(text: bytes) -> Any:
    """The JSON value; None for what is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
