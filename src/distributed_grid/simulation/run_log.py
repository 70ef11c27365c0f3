"""What happened in a run, line by line: the last lines to read, all of them in one fingerprint."""

from __future__ import annotations

import hashlib
from collections import deque

LAST = 80


class RunLog:
    """Takes lines down; keeps the last ones, or all when asked to."""

    def __init__(self, *, keep_all: bool = False) -> None:
        self._lines: deque[str] = deque(maxlen=None if keep_all else LAST)
        self._hash = hashlib.sha256()

    def note(self, at_ms: int, who: str, what: str) -> None:
        line = f"{at_ms / 1000:9.3f}  {who:<8}  {what}"
        self._lines.append(line)
        self._hash.update(line.encode() + b"\n")

    @property
    def lines(self) -> list[str]:
        return list(self._lines)

    @property
    def fingerprint(self) -> str:
        """The same for the same history, to the letter."""
        return self._hash.hexdigest()[:16]
