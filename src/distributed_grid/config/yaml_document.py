"""YAML or JSON document as a tree that keeps its line numbers.

Nothing in a file can make the reader run code, recurse without end or use memory out of proportion: there are no tags,
and size, depth and the expansion of aliases have limits. All problems of a document are raised at once, each on
one line, with file, line, key, what was found and what is expected; no value that may be a secret is part of a line.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distributed_grid.errors import BadInput

MAX_FILE_BYTES = 1024 * 1024
_TOO_LARGE = f"larger than {MAX_FILE_BYTES // 1024} KiB, which no cluster file needs"
MAX_DEPTH = 40
MAX_VALUES = 200_000
"""The most values a document may have once its aliases are written out."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_TAGS = {None, "!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


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


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and its line; `raw` is how a scalar was written."""

    value: Scalar | list[YamlNode] | dict[str, YamlNode]
    line: int
    raw: str = ""
    size: int = 1


@dataclass(slots=True)
class _OpenContainer:
    """A list or mapping that is still being read."""

    line: int
    anchor: str | None
    is_mapping: bool
    items: list[YamlNode] = field(default_factory=list)
    entries: dict[str, YamlNode] = field(default_factory=dict)
    merged: list[YamlNode] = field(default_factory=list)
    key: str | None = None
    key_line: int = 0
    size: int = 1


def read_content(path: str | Path) -> bytes:
    """The bytes of a configuration file; one that is too large, or that reading might wait for, is refused."""
    file = str(path)
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise _refusal(file, "is no regular file, expected one")
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _refusal(file, "no such file") from None
    except IsADirectoryError:
        raise _refusal(file, "is a directory, expected a file") from None
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _refusal(file, f"cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(file, _TOO_LARGE)
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its other end


def decode_content(data: bytes, file: str) -> str:
    """The text in these bytes, refused when it is none."""
    if b"\0" in data:
        raise _refusal(file, "is not text (it has zero bytes), expected YAML or JSON in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refusal(file, f"is not UTF-8 (line {line}), expected YAML or JSON in UTF-8") from None


def _refusal(file: str, message: str) -> ConfigProblems:
    return ConfigProblems([ConfigProblem(file, 0, "", message, "a text file of YAML or JSON", message)])


def parse(text: str, file: str) -> YamlNode:
    """The document in a text; an empty text is a null value."""
    if len(text) > MAX_FILE_BYTES:
        raise _refusal(file, _TOO_LARGE)
    if _SURROGATE.search(text):
        raise _refusal(file, "has half characters (surrogates), expected text")
    composer = _Composer(file)
    if text.lstrip()[:1] == "{":  # JSON may be indented with tabs, YAML may not
        text = "\n".join(_tabs_as_spaces(line) for line in text.split("\n"))
    try:
        for event in _events(text):
            composer.handle(event)
    except yaml.YAMLError as error:
        raise ConfigProblems([*composer.problems, _syntax_problem(error, text, file)]) from None
    if composer.problems:
        raise ConfigProblems(composer.problems)
    return composer.root or YamlNode(None, 1)


def _tabs_as_spaces(line: str) -> str:
    rest = line.lstrip("\t ")
    return " " * (len(line) - len(rest)) + rest


def _events(text: str) -> Iterator[Any]:
    loader = _Loader(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()


def _syntax_problem(error: yaml.YAMLError, text: str, file: str) -> ConfigProblem:
    """The parser's message without the text it would quote, which may be a secret."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    line = mark.line + 1 if mark else 0
    if not mark and isinstance(position := getattr(error, "position", None), int):
        line = text.count("\n", 0, position) + 1
    return ConfigProblem(file, line, "", str(what), "YAML or JSON", f"not YAML: {what}")


class _Composer:
    """Builds the tree from the parser's events, without recursion."""

    def __init__(self, file: str) -> None:
        self.problems: list[ConfigProblem] = []
        self.root: YamlNode | None = None
        self._file = file
        self._open: list[_OpenContainer] = []
        self._anchors: dict[str, YamlNode] = {}
        self._documents = 0

    def handle(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.ScalarEvent):
            self._add_scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._check_tag(event, line)
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            self._open.append(_OpenContainer(line, event.anchor, is_mapping))
            if len(self._open) > MAX_DEPTH:
                raise ConfigProblems([*self.problems, self._problem(line, f"nested deeper than {MAX_DEPTH} levels")])
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._close(self._open.pop())
        elif isinstance(event, yaml.AliasEvent):
            self._add_alias(event.anchor or "", line)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise ConfigProblems([*self.problems, self._problem(line, "a second document, expected only one")])

    def _problem(self, line: int, message: str, *, key: str = "", expected: str = "") -> ConfigProblem:
        return ConfigProblem(self._file, line, key, "", expected, message)

    def _report(self, line: int, message: str, *, key: str = "") -> None:
        self.problems.append(self._problem(line, message, key=key))

    def _check_tag(self, event: Any, line: int) -> None:
        if event.tag not in _PLAIN_TAGS:
            self._report(line, f"the YAML tag {event.tag!r} is not accepted, expected a plain value")

    def _add_scalar(self, event: Any, line: int) -> None:
        self._check_tag(event, line)
        plain = not event.style and event.tag is None
        if (parent := self._awaiting_key()) is not None:
            self._begin_entry(parent, event.value, line)
            return
        value = plain_scalar(event.value) if plain else event.value
        self._add_node(YamlNode(value, line, event.value), event.anchor)

    def _awaiting_key(self) -> _OpenContainer | None:
        parent = self._open[-1] if self._open else None
        return parent if parent and parent.is_mapping and parent.key is None else None

    def _begin_entry(self, parent: _OpenContainer, key: str, line: int) -> None:
        if not key:
            self._report(line, "a value without a key")
        elif key in parent.entries:
            first = parent.entries[key].line
            self._report(line, f"given twice, first on line {first}", key=key)
        parent.key, parent.key_line = key, line

    def _add_alias(self, anchor: str, line: int) -> None:
        if any(container.anchor == anchor for container in self._open):
            raise ConfigProblems([*self.problems, self._problem(line, f"the alias *{anchor} contains itself")])
        if anchor not in self._anchors:
            self._report(line, f"the alias *{anchor} has no anchor &{anchor} before it")
        self._add_node(self._anchors.get(anchor, YamlNode(None, line)), None)

    def _close(self, done: _OpenContainer) -> None:
        if not done.is_mapping:
            self._add_node(YamlNode(done.items, done.line, size=done.size), done.anchor)
            return
        for source in done.merged:
            if not isinstance(source.value, dict):
                self._report(source.line, "`<<` merges mappings only")
                continue
            for key, node in source.value.items():
                done.entries.setdefault(key, node)
        self._add_node(YamlNode(done.entries, done.line, size=done.size), done.anchor)

    def _add_node(self, node: YamlNode, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        parent.size += node.size
        if parent.size > MAX_VALUES:
            raise ConfigProblems([*self.problems, self._problem(node.line, f"more than {MAX_VALUES} values")])
        if not parent.is_mapping:
            parent.items.append(node)
        elif parent.key is None:
            self._report(node.line, "a list or mapping cannot be a key")
            parent.key, parent.key_line = "", node.line
        elif parent.key == "<<":
            parent.merged += node.value if isinstance(node.value, list) else [node]
            parent.key = None
        else:
            # The line a user looks for is that of the key.
            parent.entries[parent.key] = YamlNode(node.value, parent.key_line, node.raw, node.size)
            parent.key = None


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


def render(values: Mapping[str, Any]) -> str:
    """Plain data as YAML, keys in the order given."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).rstrip()
