"""YAML or JSON document as a tree that keeps its line numbers.

Nothing in a file can make the reader run code, recurse without end or use memory out of proportion: there are no tags,
and size, depth and the expansion of aliases have limits. All problems of a document are raised at once, each on one
line, with file, line, key, value and expectation; no value that may be a secret is part of a line.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from distributed_grid.errors import BadInput

MAX_FILE_BYTES = 1024 * 1024
TOO_LARGE = f"larger than {MAX_FILE_BYTES // 1024} KiB, which no cluster file needs"
MAX_DEPTH = 40
MAX_VALUES = 200_000  # limit of the values of a document once its aliases are written out
MAX_LINES = 100  # limit of the problems of one file that are printed; the rest is counted
MAX_DIGITS = 30

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
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_TAGS = {None, "!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


def printable(text: str) -> str:
    """The text on one line, with everything a terminal might act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConfigProblem(Struct, frozen=True, kw_only=True):
    file: str = ""
    line: int = 0  # 0: unknown
    key: str = ""
    found: str = ""
    expected: str = ""
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return printable(": ".join(part for part in (place, self.key, self.message) if part))


class ConfigProblems(BadInput):
    """The configuration cannot be used; `problems` has every reason, in the order of the file."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)
        lines = [str(problem) for problem in self.problems[:MAX_LINES]]
        if len(self.problems) > MAX_LINES:
            lines.append(f"and {len(self.problems) - MAX_LINES} more problems")
        super().__init__("\n".join(lines))


def refusal(file: str, message: str) -> ConfigProblems:
    """The single problem of a file that is refused as a whole."""
    return ConfigProblems(
        [ConfigProblem(file=file, found=message, expected="a text file of YAML or JSON", message=message)]
    )


class YamlNode(Struct, frozen=True):
    """A value and its line."""

    value: Scalar | list[YamlNode] | dict[str, YamlNode]
    line: int
    raw: str = ""  # spelling of a scalar
    size: int = 1  # values in it, itself included


def read_content(path: str | Path) -> bytes:
    """The bytes of a configuration file; a file that is too large, or that a read might wait for, is refused."""
    file = str(path)
    try:
        # A pipe would wait for its other end.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
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


def decode_content(data: bytes, file: str) -> str:
    if b"\0" in data:
        raise refusal(file, "is not text (it has zero bytes), expected YAML or JSON in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise refusal(file, f"is not UTF-8 (line {line}), expected YAML or JSON in UTF-8") from None


def plain_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar.

    YAML 1.1, which most people's files are written for, less its two traps: `010` is not eight and `1:30` is not
    ninety; both stay text, and so are refused where a number is expected. A number of JSON is one here, too.
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


def parse(text: str, file: str) -> YamlNode:
    """The document in a text; an empty text is a null value."""
    import yaml  # slow to load, and the grid of one machine has no file

    if len(text) > MAX_FILE_BYTES:
        raise refusal(file, TOO_LARGE)
    if _SURROGATE.search(text):
        raise refusal(file, "has half characters (surrogates), expected text")
    if text.lstrip()[:1] == "{":  # JSON may be indented with tabs, YAML may not
        lines = ((line, line.lstrip("\t ")) for line in text.split("\n"))
        text = "\n".join(" " * (len(line) - len(rest)) + rest for line, rest in lines)
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    composer = _Composer(yaml.parse(text, loader), file)
    try:
        root = composer.document()
    except yaml.YAMLError as error:
        # The parser's message without the text it would quote, which may be a secret.
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read")
        line = mark.line + 1 if mark else 0
        if not mark and isinstance(position := getattr(error, "position", None), int):
            line = text.count("\n", 0, position) + 1
        syntax = ConfigProblem(
            file=file, line=line, found=problem, expected="YAML or JSON", message=f"not YAML: {problem}"
        )
        raise ConfigProblems([*composer.problems, syntax]) from None
    if composer.problems:
        raise ConfigProblems(composer.problems)
    return root or YamlNode(None, 1)


class _Composer:
    """Builds the tree of a document from the parser's events. `yaml.compose` would recurse as deep as the text says,
    and stop at the first duplicate anchor."""

    def __init__(self, events: Iterator[Any], file: str) -> None:
        self.problems: list[ConfigProblem] = []
        self._events = events
        self._file = file
        self._open: list[str | None] = []  # anchors of the containers around the current value
        self._anchors: dict[str, YamlNode] = {}

    def document(self) -> YamlNode | None:
        root, count = None, 0
        for event in self._events:
            name = type(event).__name__
            if name == "DocumentStartEvent":
                count += 1
                if count > 1:
                    self._stop(event.start_mark.line + 1, "a second document, expected only one")
            elif name not in ("StreamStartEvent", "StreamEndEvent", "DocumentEndEvent"):
                root = self._compose(event)
        return root

    def _report(self, line: int, message: str, key: str = "") -> None:
        self.problems.append(ConfigProblem(file=self._file, line=line, key=key, message=message))

    def _stop(self, line: int, message: str) -> None:
        self._report(line, message)
        raise ConfigProblems(self.problems)

    def _compose(self, event: Any) -> YamlNode:
        line, kind = event.start_mark.line + 1, type(event).__name__
        if kind == "AliasEvent":
            if event.anchor in self._open:
                self._stop(line, f"the alias *{event.anchor} contains itself")
            if event.anchor not in self._anchors:
                self._report(line, f"the alias *{event.anchor} has no anchor &{event.anchor} before it")
            return self._anchors.get(event.anchor, YamlNode(None, line))
        if event.tag not in _PLAIN_TAGS:
            self._report(line, f"the YAML tag {event.tag!r} is not accepted, expected a plain value")
        if kind == "ScalarEvent":
            is_plain = not event.style and event.tag is None
            node = YamlNode(plain_scalar(event.value) if is_plain else event.value, line, event.value)
        else:
            self._open.append(event.anchor)
            if len(self._open) > MAX_DEPTH:
                self._stop(line, f"nested deeper than {MAX_DEPTH} levels")
            if kind == "SequenceStartEvent":
                items, size = list[YamlNode](), 1
                while type(item := next(self._events)).__name__ != "SequenceEndEvent":
                    items.append(self._compose(item))
                    size = self._grown(size, items[-1])
                node = YamlNode(items, line, size=size)
            else:
                node = self._mapping(line)
            self._open.pop()
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _grown(self, size: int, node: YamlNode) -> int:
        if size + node.size > MAX_VALUES:
            self._stop(node.line, f"more than {MAX_VALUES} values")
        return size + node.size

    def _mapping(self, line: int) -> YamlNode:
        entries, merged, size = dict[str, YamlNode](), list[YamlNode](), 1
        while type(event := next(self._events)).__name__ != "MappingEndEvent":
            key, key_line = self._key(event, entries)
            node = self._compose(next(self._events))
            size = self._grown(size, node)
            if key == "<<":
                merged += node.value if isinstance(node.value, list) else [node]
            else:
                # Problems are reported on the line of the key.
                entries[key] = YamlNode(node.value, key_line, node.raw, node.size)
        for source in merged:
            if not isinstance(source.value, dict):
                self._report(source.line, "`<<` merges mappings only")
                continue
            for key, node in source.value.items():
                entries.setdefault(key, node)
        return YamlNode(entries, line, size=size)

    def _key(self, event: Any, entries: Mapping[str, YamlNode]) -> tuple[str, int]:
        line = event.start_mark.line + 1
        if type(event).__name__ != "ScalarEvent":
            line = self._compose(event).line
            self._report(line, "a list or mapping cannot be a key")
            return "", line
        if event.tag not in _PLAIN_TAGS:
            self._report(line, f"the YAML tag {event.tag!r} is not accepted, expected a plain value")
        if not event.value:
            self._report(line, "a value without a key")
        elif event.value in entries:
            self._report(line, f"given twice, first on line {entries[event.value].line}", event.value)
        return event.value, line


def from_plain(value: object, *, depth: int = 0) -> YamlNode:
    """Plain Python data as a tree without lines."""
    if depth > MAX_DEPTH:
        raise ConfigProblems([ConfigProblem(message=f"nested deeper than {MAX_DEPTH} levels")])
    if isinstance(value, dict):
        return YamlNode({str(key): from_plain(item, depth=depth + 1) for key, item in value.items()}, 0)
    if isinstance(value, list | tuple):
        return YamlNode([from_plain(item, depth=depth + 1) for item in value], 0)
    if value is None or isinstance(value, bool | int | float | str):
        is_huge = isinstance(value, int) and value.bit_length() > 100
        return YamlNode(value, 0, "a huge number" if is_huge else str(value))
    return YamlNode(str(value), 0, str(value))


def to_plain(node: YamlNode) -> Any:
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child) for child in node.value]
    return node.value


def render(values: Mapping[str, Any]) -> str:
    """Plain data as YAML, keys in the order given."""
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).rstrip()
