"""Parser of YAML and JSON texts; imported where a text is parsed, because its library takes long to load.

Nothing in a file can make the reader run code, recurse without end or use memory out of proportion: there are no tags,
and size, depth and the expansion of aliases have limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from msgspec import Struct, field

from distributed_grid.config.yaml_document import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    TOO_LARGE,
    ConfigProblem,
    ConfigProblems,
    YamlNode,
    plain_scalar,
    refusal,
)

MAX_VALUES = 200_000
"""The most values a document may have once its aliases are written out."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_TAGS = {None, "!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class _OpenContainer(Struct):
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


def parse(text: str, file: str) -> YamlNode:
    """The document in a text; an empty text is a null value."""
    if len(text) > MAX_FILE_BYTES:
        raise refusal(file, TOO_LARGE)
    if _SURROGATE.search(text):
        raise refusal(file, "has half characters (surrogates), expected text")
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


def render(values: Mapping[str, Any]) -> str:
    """Plain data as YAML, keys in the order given."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).rstrip()
