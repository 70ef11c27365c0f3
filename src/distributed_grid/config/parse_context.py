"""Parse context of one configuration document: problems, warnings, and which line set which key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from distributed_grid.config.yaml_document import ConfigProblem, ConfigProblems, YamlNode, printable

_SECRET_KEYS = re.compile(
    r"secret|password|token|credential|webhook|access_key|api_key|^providers\.[^.]*$", re.IGNORECASE
)
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")
MAX_QUOTE_LENGTH = 60


class KeyPath(Struct, frozen=True):
    """The path of a key, as the user spells it (`nodes[1].cpu_count`) and in the normal form."""

    spelled: str = ""
    normal: str = ""

    def child(self, spelled: str, normal: str) -> KeyPath:
        spelled = (
            spelled if spelled.isprintable() and len(spelled) <= MAX_QUOTE_LENGTH else printable(spelled[:40]) + "…"
        )
        joint = "" if spelled.startswith("[") or not self.spelled else "."
        dot = "." if self.normal and normal else ""
        return KeyPath(f"{self.spelled}{joint}{spelled}", f"{self.normal}{dot}{normal}")


class InvalidValue(Exception):
    """A value does not fit its kind; the caller, who knows the key, reports it."""

    def __init__(self, expected: str, *, found: str | None = None, hint: str = "") -> None:
        super().__init__(expected)
        self.expected, self.found, self.hint = expected, found, hint


class Unexpanded(Exception):
    """A value has a variable in it, and variables are not expanded here."""


class ParseContext(Struct):
    """Problems, warnings and lines of one document; with `env` None variables are not expanded."""

    file: str
    env: Mapping[str, str] | None
    problems: list[ConfigProblem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    known_paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The paths at which each key name is known."""

    def record(self, path: KeyPath, node: YamlNode) -> None:
        self.lines[path.normal] = (path.spelled, node.line)

    def report_invalid(self, path: KeyPath, node: YamlNode, invalid: InvalidValue) -> None:
        found = invalid.found or describe(node, path)
        message = f"found {found}, expected {invalid.expected}" + (f" ({invalid.hint})" if invalid.hint else "")
        self.problems.append(ConfigProblem(self.file, node.line, path.spelled, found, invalid.expected, message))

    def report(self, path: KeyPath, line: int, message: str, *, found: str = "", expected: str = "") -> None:
        self.problems.append(ConfigProblem(self.file, line, path.spelled, found, expected, message))

    def report_at(self, normal: str, message: str, *, expected: str = "") -> None:
        """Report a problem between values at the normal path of the one to blame."""
        spelled, line = self._position_of(normal)
        self.problems.append(ConfigProblem(self.file, line, spelled, "", expected, message))

    def warn_at(self, normal: str, message: str) -> None:
        self.warn(self._position_of(normal)[0], message)

    def _position_of(self, normal: str) -> tuple[str, int]:
        while normal and normal not in self.lines:
            normal = normal.rpartition(".")[0]
        return self.lines.get(normal, ("", 0))

    def warn(self, spelled: str, message: str) -> None:
        self.warnings.append(printable(f"{spelled}: {message}" if spelled else message))

    def raise_problems(self) -> None:
        """Raise all problems, in the order of the file."""
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


class ValueKind(Struct, frozen=True):
    """What one key may hold."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
        """The value in the normal form; raises `InvalidValue`."""
        raise NotImplementedError

    def show(self, value: Any) -> Any:
        """The value as a user would write it; reading it again gives the same value."""
        return value


def describe(node: YamlNode, path: KeyPath) -> str:
    """The value found, short, on one line, and never a secret."""
    value = node.value
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if _SECRET_KEYS.search(path.spelled):
        return "a value (not shown)"
    raw = node.raw if len(node.raw) <= MAX_QUOTE_LENGTH else node.raw[:MAX_QUOTE_LENGTH] + "…"
    if isinstance(value, str):
        return repr(raw)
    return f"the boolean {raw}" if isinstance(value, bool) else f"the number {raw}"
