"""What is wrong with a configuration, said so that a person can mend it.

Rule 1. One mistake is one line: file, line, key, what was found, what would be right.
Rule 2. All mistakes are told at once.
Rule 3. No value that may be a secret is ever part of a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distributed_grid.errors import BadInput

MOST_LINES = 100
"""A hopeless file is not told line by line beyond this."""


def printable(text: str) -> str:
    """The text on one line, with everything a terminal might act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One mistake in one place; line 0 means the place has no line."""

    file: str
    line: int
    key: str
    found: str
    expected: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return printable(": ".join(part for part in (where, self.key, self.message) if part))


class ConfigProblems(BadInput):
    """The configuration cannot be used; `problems` has every reason, in the order of the file."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)
        lines = [str(problem) for problem in self.problems[:MOST_LINES]]
        if len(self.problems) > MOST_LINES:
            lines.append(f"and {len(self.problems) - MOST_LINES} more problems")
        super().__init__("\n".join(lines))
