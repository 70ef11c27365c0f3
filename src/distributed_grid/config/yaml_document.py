"""A file of YAML or JSON as a tree that remembers its lines.

Rule 1. Nothing in a file can make us run code, recurse without end or use memory out of proportion: there are
        no tags, and size, depth and what aliases grow to have limits.
Rule 2. A tree is only handed out when the text was sound; otherwise every problem found is raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distributed_grid.config.errors import ConfigProblem, ConfigProblems
from distributed_grid.config.kinds.scalars import Scalar, plain_scalar

LARGEST_FILE = 1024 * 1024
_TOO_LARGE = f"larger than {LARGEST_FILE // 1024} KiB, which no cluster file needs"
DEEPEST = 40
MOST_VALUES = 200_000
"""The most values a document may have once its aliases are written out."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_PLAIN_TAGS = {None, "!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and where it stands; `raw` is how a scalar was written."""

    value: Scalar | list[YamlNode] | dict[str, YamlNode]
    line: int
    raw: str = ""
    size: int = 1


@dataclass(slots=True)
class _Open:
    """A list or mapping that is still being read."""

    spot_line: int
    anchor: str | None
    is_mapping: bool
    items: list[YamlNode] = field(default_factory=list)
    entries: dict[str, YamlNode] = field(default_factory=dict)
    merged: list[YamlNode] = field(default_factory=list)
    key: str | None = None
    key_line: int = 0
    size: int = 1


def read_text(path: str | Path) -> str:
    """The text of a configuration file, refused when it is too large or not text."""
    file = str(path)
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise _refusal(file, "no such file") from None
    except IsADirectoryError:
        raise _refusal(file, "is a directory, expected a file") from None
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _refusal(file, f"cannot be read: {error}") from None
    if len(data) > LARGEST_FILE:
        raise _refusal(file, _TOO_LARGE)
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
    """The document in a text; an empty text is one value of nothing."""
    if len(text) > LARGEST_FILE:
        raise _refusal(file, _TOO_LARGE)
    if _HALF_CHARACTER.search(text):
        raise _refusal(file, "has half characters (surrogates), expected text")
    composer = _Composer(file)
    if text.lstrip()[:1] == "{":  # JSON may be indented with tabs, YAML may not
        text = "\n".join(_tabs_as_spaces(line) for line in text.split("\n"))
    try:
        for event in _events(text):
            composer.take(event)
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
    """The parser's complaint without the piece of text it would quote, which may be a secret."""
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
        self._open: list[_Open] = []
        self._anchors: dict[str, YamlNode] = {}
        self._documents = 0

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._refuse_tag(event, line)
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            self._open.append(_Open(line, event.anchor, is_mapping))
            if len(self._open) > DEEPEST:
                raise ConfigProblems([*self.problems, self._problem(line, f"nested deeper than {DEEPEST} levels")])
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._close(self._open.pop())
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event.anchor or "", line)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise ConfigProblems([*self.problems, self._problem(line, "a second document, expected only one")])

    def _problem(self, line: int, message: str, *, key: str = "", expected: str = "") -> ConfigProblem:
        return ConfigProblem(self._file, line, key, "", expected, message)

    def _refuse(self, line: int, message: str, *, key: str = "") -> None:
        self.problems.append(self._problem(line, message, key=key))

    def _refuse_tag(self, event: Any, line: int) -> None:
        if event.tag not in _PLAIN_TAGS:
            self._refuse(line, f"the YAML tag {event.tag!r} is not accepted, expected a plain value")

    def _scalar(self, event: Any, line: int) -> None:
        self._refuse_tag(event, line)
        plain = not event.style and event.tag is None
        if (parent := self._awaiting_key()) is not None:
            self._key(parent, event.value, line)
            return
        value = plain_scalar(event.value) if plain else event.value
        self._place(YamlNode(value, line, event.value), event.anchor)

    def _awaiting_key(self) -> _Open | None:
        parent = self._open[-1] if self._open else None
        return parent if parent and parent.is_mapping and parent.key is None else None

    def _key(self, parent: _Open, key: str, line: int) -> None:
        if not key:
            self._refuse(line, "a value without a key")
        elif key in parent.entries:
            first = parent.entries[key].line
            self._refuse(line, f"given twice, first on line {first}", key=key)
        parent.key, parent.key_line = key, line

    def _alias(self, anchor: str, line: int) -> None:
        if any(container.anchor == anchor for container in self._open):
            raise ConfigProblems([*self.problems, self._problem(line, f"the alias *{anchor} contains itself")])
        if anchor not in self._anchors:
            self._refuse(line, f"the alias *{anchor} has no anchor &{anchor} before it")
        self._place(self._anchors.get(anchor, YamlNode(None, line)), None)

    def _close(self, done: _Open) -> None:
        if not done.is_mapping:
            self._place(YamlNode(done.items, done.spot_line, size=done.size), done.anchor)
            return
        for source in done.merged:
            if not isinstance(source.value, dict):
                self._refuse(source.line, "`<<` merges mappings only")
                continue
            for key, spot in source.value.items():
                done.entries.setdefault(key, spot)
        self._place(YamlNode(done.entries, done.spot_line, size=done.size), done.anchor)

    def _place(self, spot: YamlNode, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = spot
        if not self._open:
            self.root = spot
            return
        parent = self._open[-1]
        parent.size += spot.size
        if parent.size > MOST_VALUES:
            raise ConfigProblems([*self.problems, self._problem(spot.line, f"more than {MOST_VALUES} values")])
        if not parent.is_mapping:
            parent.items.append(spot)
        elif parent.key is None:
            self._refuse(spot.line, "a list or mapping cannot be a key")
            parent.key, parent.key_line = "", spot.line
        elif parent.key == "<<":
            parent.merged += spot.value if isinstance(spot.value, list) else [spot]
            parent.key = None
        else:
            # The line a person looks for is that of the key.
            parent.entries[parent.key] = YamlNode(spot.value, parent.key_line, spot.raw, spot.size)
            parent.key = None


def from_plain(value: object, *, depth: int = 0) -> YamlNode:
    """Plain Python data as a tree without lines."""
    if depth > DEEPEST:
        raise ConfigProblems([ConfigProblem("", 0, "", "", "", f"nested deeper than {DEEPEST} levels")])
    if isinstance(value, dict):
        return YamlNode({str(key): from_plain(item, depth=depth + 1) for key, item in value.items()}, 0)
    if isinstance(value, list | tuple):
        return YamlNode([from_plain(item, depth=depth + 1) for item in value], 0)
    if value is None or isinstance(value, bool | int | float | str):
        huge = isinstance(value, int) and value.bit_length() > 100
        return YamlNode(value, 0, "a huge number" if huge else str(value))
    return YamlNode(str(value), 0, str(value))


def to_plain(spot: YamlNode) -> Any:
    """The tree as plain Python data."""
    if isinstance(spot.value, dict):
        return {key: to_plain(child) for key, child in spot.value.items()}
    if isinstance(spot.value, list):
        return [to_plain(child) for child in spot.value]
    return spot.value


def render(values: Mapping[str, Any]) -> str:
    """Plain data as YAML, keys in the order given."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).rstrip()
