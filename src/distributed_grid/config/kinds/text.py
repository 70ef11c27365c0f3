"""Kinds of text: names, addresses, choices, truths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import SecretStr

from distributed_grid.config.kinds.scalars import plain_scalar
from distributed_grid.config.parse_context import InvalidValue, KeyPath, ParseContext
from distributed_grid.config.yaml_document import YamlNode

MASK = "***"
_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Text:
    """Text on one line; `pattern` says which, `expected` says it in words."""

    expected: str = "text on one line"
    pattern: re.Pattern[str] | None = None
    lower: bool = False

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> str:
        if not isinstance(spot.value, str):
            quotable = spot.value is not None and not isinstance(spot.value, list | dict)
            raise InvalidValue(self.expected, hint="for text put it in quotes" if quotable else "")
        text = desk.expand(spot.value).strip()
        if not text or len(text) > _LONGEST or not text.isprintable():
            raise InvalidValue(self.expected)
        if self.pattern is not None and not self.pattern.fullmatch(text):
            raise InvalidValue(self.expected)
        return text.lower() if self.lower else text

    def show(self, value: str) -> str:
        return value.replace("${", "$${")


@dataclass(frozen=True, slots=True)
class Hidden:
    """Text that is never shown."""

    expected: str = "text on one line"
    pattern: re.Pattern[str] | None = None

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> SecretStr:
        try:
            return SecretStr(Text(self.expected, self.pattern).read(spot, place, desk))
        except InvalidValue as slip:
            raise InvalidValue(slip.expected, found=slip.found or "a value (not shown)", hint=slip.hint) from None

    def show(self, value: SecretStr) -> str:
        return MASK


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> bool:
        value = spot.value
        if isinstance(value, str) and "${" in value:
            value = plain_scalar(desk.expand(value).strip())
        if not isinstance(value, bool):
            raise InvalidValue("true or false")
        return value

    def show(self, value: bool) -> bool:
        return value


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """One of a few words, whatever its case; some have a second spelling."""

    words: tuple[str, ...]
    also: Mapping[str, str] = field(default_factory=dict)

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> str:
        expected = "one of " + ", ".join(self.words)
        if not isinstance(spot.value, str):
            raise InvalidValue(expected)
        word = desk.expand(spot.value).strip().lower().replace("-", "_")
        word = self.also.get(word, word)
        if word not in self.words:
            raise InvalidValue(expected)
        return word

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class HostText:
    """An address that SSH knows, or `local` for an agent on this machine."""

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> str:
        host = Text("a host name or address, or local").read(spot, place, desk)
        if "@" in host:
            raise InvalidValue("a host name or address alone", hint="the part before @ goes into user:")
        if re.fullmatch(r"[^:]+:[0-9]+", host):
            raise InvalidValue("a host name or address alone", hint="the number after : goes into port:")
        if not re.fullmatch(r"[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*", host):
            raise InvalidValue("a host name or address, or local")
        return "local" if host.lower() == "local" else host

    def show(self, value: str) -> str:
        return value


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    name = host.strip("[]").lower()
    return name in ("local", "localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", name) is not None


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
NODE_NAME = Text(
    "a name of letters, digits, - _ and . that starts with a letter or digit, at most 63 long",
    re.compile(NAME_PATTERN),
)
CUSTOM_NAME = Text(
    "a resource name such as tpu (letters, digits, - _ and ., not cpu, gpu or memory)",
    re.compile(r"(?!(?:cpu|gpu|memory)$)[a-z][a-z0-9_.-]{0,62}", re.ASCII | re.IGNORECASE),
    lower=True,
)
LOGIN = Text("a login name", re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@$-]{0,63}", re.ASCII))
_JUMP = r"(?:[A-Za-z0-9_][A-Za-z0-9_.@$-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*"
JUMPS = Text("hosts such as ana@gate:22, or names of nodes, with commas between", re.compile(rf"{_JUMP}(, *{_JUMP})*"))
WEB_ADDRESS = Hidden("an address that starts with http:// or https://", re.compile(r"https?://[^\s/]+\S*"))
TEXT = Text()
PATH = Text("a path")
COMMAND = Text("a command")
FLAG = Flag()
