"""YAML or JSON document as a tree that keeps its line numbers; `yaml_parser` makes one of a text.

All problems of a document are raised at once, each on one line, with file, line, key, what was found and what is
expected; no value that may be a secret is part of a line.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from distributed_grid.errors import BadInput

MAX_FILE_BYTES = 1024 * 1024
TOO_LARGE = f"larger than {MAX_FILE_BYTES // 1024} KiB, which no cluster file needs"
MAX_DEPTH = 40


Scalar = None | bool | int | float | str

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {
    spelling: word in ("yes", "on", "true")
    for word in ("yes", "on", "true", "no", "off", "false")
    for spelling in (word, word.capitalize(), word.upper())
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
MAX_DIGITS = 30
MAX_LINES = 100
"""Beyond this, the problems of a hopeless file are only counted."""


def printable(text: str) -> str:
    """The text on one line, with everything a terminal might act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConfigProblem(Struct, frozen=True):
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


def plain_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar.

    YAML 1.1, which most people's files are written for, less its two traps: `010` is not eight and `1:30` is not
    ninety; both stay text, and so are refused where a number is expected. What JSON calls a number is one here.
    """
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) <= MAX_DIGITS and _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text) and not _OCTAL.fullmatch(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class YamlNode(Struct, frozen=True):
    """A value and its line; `raw` is how a scalar was written."""

    value: Scalar | list[YamlNode] | dict[str, YamlNode]
    line: int
    raw: str = ""
    size: int = 1


def read_content(path: str | Path) -> bytes:
    """The bytes of a configuration file; one that is too large, or that reading might wait for, is refused."""
    file = str(path)
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise refusal(file, "is no regular file, expected one")
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise refusal(file, "no such file") from None
    except IsADirectoryError:
        raise refusal(file, "is a directory, expected a file") from None
    except OSError as error:
        raise refusal(file, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise refusal(file, f"cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise refusal(file, TOO_LARGE)
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its other end


def decode_content(data: bytes, file: str) -> str:
    """The text in these bytes, refused when it is none."""
    if b"\0" in data:
        raise refusal(file, "is not text (it has zero bytes), expected YAML or JSON in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise refusal(file, f"is not UTF-8 (line {line}), expected YAML or JSON in UTF-8") from None


def refusal(file: str, message: str) -> ConfigProblems:
    """The one problem of a file that is not read at all."""
    return ConfigProblems([ConfigProblem(file, 0, "", message, "a text file of YAML or JSON", message)])


def from_plain(value: object, *, depth: int = 0) -> YamlNode:
    """Plain Python data as a tree without lines."""
    if depth > MAX_DEPTH:
        raise ConfigProblems([ConfigProblem("", 0, "", "", "", f"nested deeper than {MAX_DEPTH} levels")])
    if isinstance(value, dict):
        return YamlNode({str(key): from_plain(item, depth=depth + 1) for key, item in value.items()}, 0)
    if isinstance(value, list | tuple):
        return YamlNode([from_plain(item, depth=depth + 1) for item in value], 0)
    if value is None or isinstance(value, bool | int | float | str):
        huge = isinstance(value, int) and value.bit_length() > 100
        return YamlNode(value, 0, "a huge number" if huge else str(value))
    return YamlNode(str(value), 0, str(value))


def to_plain(node: YamlNode) -> Any:
    """The tree as plain Python data."""
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child) for child in node.value]
    return node.value
