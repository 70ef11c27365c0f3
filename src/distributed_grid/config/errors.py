"""Problems of a configuration: each on one line, with file, line, key, what was found and what is expected.

No value that may be a secret is ever part of a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distributed_grid.errors import BadInput

MAX_LINES = 100
"""Beyond this, the problems of a hopeless file are only counted."""


def printable(text: str) -> str:
    """The text on one line, with everything a terminal might act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One mistake; line 0 means that no line is known."""

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
        lines = [str(problem) for problem in self.problems[:MAX_LINES]]
        if len(self.problems) > MAX_LINES:
            lines.append(f"and {len(self.problems) - MAX_LINES} more problems")
        super().__init__("\n".join(lines))
