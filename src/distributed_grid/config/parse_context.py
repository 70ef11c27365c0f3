"""Where a document is read: collects every problem and warning, remembers which line said what."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributed_grid.config.errors import ConfigProblem, ConfigProblems, printable
from distributed_grid.config.yaml_document import YamlNode

_SECRETIVE = re.compile(
    r"secret|password|token|credential|webhook|access_key|api_key|^providers\.[^.]*$", re.IGNORECASE
)
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")
_LONGEST_QUOTE = 60


@dataclass(frozen=True, slots=True)
class KeyPath:
    """A position twice over: as the user spells it (`nodes[1].cpu_count`) and in the normal form."""

    spelled: str = ""
    normal: str = ""

    def down(self, spelled: str, normal: str) -> KeyPath:
        spelled = spelled if spelled.isprintable() and len(spelled) <= _LONGEST_QUOTE else printable(spelled[:40]) + "…"
        joint = "" if spelled.startswith("[") or not self.spelled else "."
        dot = "." if self.normal and normal else ""
        return KeyPath(f"{self.spelled}{joint}{spelled}", f"{self.normal}{dot}{normal}")


class InvalidValue(Exception):
    """A value that does not fit its kind; whoever holds the place turns it into a problem."""

    def __init__(self, expected: str, *, found: str | None = None, hint: str = "") -> None:
        super().__init__(expected)
        self.expected, self.found, self.hint = expected, found, hint


class Unexpanded(Exception):
    """A value with a variable in it, read where variables are left alone."""


@dataclass(slots=True)
class ParseContext:
    """One reading of one document; `env` None leaves every `${NAME}` as it is."""

    file: str
    env: Mapping[str, str] | None
    problems: list[ConfigProblem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    homes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Where a name that is unknown in one place is known."""

    def note(self, place: KeyPath, spot: YamlNode) -> None:
        self.lines[place.normal] = (place.spelled, spot.line)

    def refuse(self, place: KeyPath, spot: YamlNode, slip: InvalidValue) -> None:
        found = slip.found or describe(spot, place)
        message = f"found {found}, expected {slip.expected}" + (f" ({slip.hint})" if slip.hint else "")
        self.problems.append(ConfigProblem(self.file, spot.line, place.spelled, found, slip.expected, message))

    def say(self, place: KeyPath, line: int, message: str, *, found: str = "", expected: str = "") -> None:
        self.problems.append(ConfigProblem(self.file, line, place.spelled, found, expected, message))

    def refuse_normal(self, normal: str, message: str, *, expected: str = "") -> None:
        """Report a problem between values by the normal name of the one to blame."""
        spelled, line = self._said_at(normal)
        self.problems.append(ConfigProblem(self.file, line, spelled, "", expected, message))

    def warn_normal(self, normal: str, message: str) -> None:
        self.warn(self._said_at(normal)[0], message)

    def _said_at(self, normal: str) -> tuple[str, int]:
        while normal and normal not in self.lines:
            normal = normal.rpartition(".")[0]
        return self.lines.get(normal, ("", 0))

    def warn(self, spelled: str, message: str) -> None:
        self.warnings.append(printable(f"{spelled}: {message}" if spelled else message))

    def finish(self) -> None:
        """Raise what was found wrong, in the order of the file."""
        if self.problems:
            raise ConfigProblems(sorted(dict.fromkeys(self.problems), key=lambda problem: problem.line))

    def expand(self, text: str) -> str:
        """The text with each `${NAME}` replaced by its variable; `$${` stands for a plain `${`."""
        if "${" not in text:
            return text
        if self.env is None:
            raise Unexpanded(text)
        env, parts, end = self.env, [], 0
        for match in _VARIABLE.finditer(text):
            name = match[1]
            parts.append(text[end : match.start()])
            end = match.end()
            if match[0] == "$${":
                parts.append("${")
            elif name is None:
                raise InvalidValue("a variable written ${NAME}, or $${ for a plain ${", found="an unfinished ${")
            elif name not in env:
                raise InvalidValue(f"the environment variable {name} to be set", found=f"${{{name}}}")
            else:
                parts.append(env[name])
        return "".join([*parts, text[end:]])


class ValueKind(Protocol):
    """What one key may hold."""

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> Any:
        """The value in the normal form, or a `InvalidValue`."""

    def show(self, value: Any) -> Any:
        """The value as a user would write it; reading it again gives the same value."""


def describe(spot: YamlNode, place: KeyPath) -> str:
    """What stands there, short, on one line, and never a secret."""
    value = spot.value
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if _SECRETIVE.search(place.spelled):
        return "a value (not shown)"
    raw = spot.raw if len(spot.raw) <= _LONGEST_QUOTE else spot.raw[:_LONGEST_QUOTE] + "…"
    if isinstance(value, str):
        return repr(raw)
    return f"the truth value {raw}" if isinstance(value, bool) else f"the number {raw}"
