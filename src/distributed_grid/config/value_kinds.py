"""Value kinds of a cluster file: the accepted spellings of one key's value, and the base unit in which it is stored.

A kind reads a node of the document in a `ParseContext`, which collects problems, warnings and the line of each key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from distributed_grid.config.yaml_document import ConfigProblem, ConfigProblems, YamlNode, plain_scalar, printable
from distributed_grid.domain.resources import MAX_AMOUNT

GIB = 1024**3
MIB = 1024**2
MASK = "***"
MAX_SECONDS = 10 * 366 * 24 * 3600
MAX_TEXT_LENGTH = 4096
MAX_QUOTE_LENGTH = 60

_SECRET_KEYS = re.compile(
    r"secret|password|token|credential|webhook|access_key|api_key|^providers\.[^.]*$", re.IGNORECASE
)
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")


class KeyPath(Struct, frozen=True):
    """The path of a key."""

    spelled: str = ""  # as the user writes it: `nodes[1].cpu_count`
    normal: str = ""  # in the normal form: `nodes.1.cpu_milli`

    def child(self, spelled: str, normal: str) -> KeyPath:
        if not spelled.isprintable() or len(spelled) > MAX_QUOTE_LENGTH:
            spelled = printable(spelled[:40]) + "…"
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
    """Spelling and line of each key, by its normal path."""
    known_paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The paths at which each key name is known."""

    def record(self, path: KeyPath, node: YamlNode) -> None:
        self.lines[path.normal] = (path.spelled, node.line)

    def report(self, path: KeyPath, line: int, message: str, *, found: str = "", expected: str = "") -> None:
        self.problems.append(
            ConfigProblem(file=self.file, line=line, key=path.spelled, found=found, expected=expected, message=message)
        )

    def report_invalid(self, path: KeyPath, node: YamlNode, invalid: InvalidValue) -> None:
        found = invalid.found or describe(node, path)
        message = f"found {found}, expected {invalid.expected}" + (f" ({invalid.hint})" if invalid.hint else "")
        self.report(path, node.line, message, found=found, expected=invalid.expected)

    def report_at(self, normal: str, message: str, *, expected: str = "") -> None:
        """Report a problem between values at the normal path of the key to blame."""
        spelled, line = self._position_of(normal)
        self.problems.append(ConfigProblem(file=self.file, line=line, key=spelled, expected=expected, message=message))

    def warn_at(self, normal: str, message: str) -> None:
        self.warn(self._position_of(normal)[0], message)

    def _position_of(self, normal: str) -> tuple[str, int]:
        while normal and normal not in self.lines:
            normal = normal.rpartition(".")[0]
        return self.lines.get(normal, ("", 0))

    def warn(self, spelled: str, message: str) -> None:
        self.warnings.append(printable(f"{spelled}: {message}" if spelled else message))

    def raise_problems(self) -> None:
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


def describe(node: YamlNode, path: KeyPath) -> str:
    """The value of a node, short, on one line, and never a secret."""
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


class ValueKind(Struct, frozen=True):
    """The kind of one key's value."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
        """The value in the normal form; raises `InvalidValue`."""
        raise NotImplementedError

    def show(self, value: Any) -> Any:
        """The value as a user would write it; reading it again gives the same value."""
        return value


def _read_number(node: YamlNode, context: ParseContext, expected: str) -> float:
    value = node.value
    if isinstance(value, str) and "${" in value:
        value = plain_scalar(context.expand(value).strip())
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValue(expected, found=f"{node.raw} set to something else")
    if isinstance(value, str) and not isinstance(plain_scalar(value.strip()), str | None):
        raise InvalidValue(expected, hint="without quotes")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValue(expected)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidValue(expected)
    return value


def _shortest(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)


class Count(ValueKind, frozen=True):
    """A whole number within bounds."""

    low: int = 0
    high: int = 10**9
    what: str = "a whole number"

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> int:
        expected = f"{self.what} {self.low}-{self.high}" if self.high < 10**9 else f"{self.what}, {self.low} or more"
        value = _read_number(node, context, expected)
        if not self.low <= value <= self.high or value != int(value):
            raise InvalidValue(expected)
        return int(value)


class Amount(ValueKind, frozen=True):
    """A decimal amount, stored as a whole number of a smaller unit."""

    scale: int
    what: str = "a number"
    above_zero: bool = False

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> int:
        expected = f"{self.what}, {'more than 0' if self.above_zero else '0 or more'}"
        value = _read_number(node, context, expected)
        if value < 0 or value > MAX_AMOUNT / self.scale:
            raise InvalidValue(expected)
        scaled = round(value * self.scale)
        if scaled == 0 and (value > 0 or self.above_zero):
            raise InvalidValue(expected)
        return scaled

    def show(self, value: int) -> float | int:
        for digits in range(18):
            shown = round(value / self.scale, digits)
            if round(shown * self.scale) == value:
                return _shortest(shown)
        return value / self.scale


class PlainNumber(ValueKind, frozen=True):
    """A number without a unit, such as a weight or a price."""

    what: str = "a number"
    above_zero: bool = False
    high: float = 1e12

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> float:
        expected = f"{self.what}, {'more than 0' if self.above_zero else '0 or more'}"
        value = _read_number(node, context, expected)
        if value < 0 or value > self.high or (self.above_zero and value == 0):
            raise InvalidValue(expected)
        return float(value)

    def show(self, value: float) -> float | int:
        return _shortest(value)


class Ratio(ValueKind, frozen=True):
    """A ratio from 0 to 1."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> float:
        expected = "a ratio from 0 to 1"
        value = _read_number(node, context, expected)
        if 1 < value <= 100:
            raise InvalidValue(expected, hint=f"it looks like a percent: write {_shortest(round(value / 100, 12))}")
        if not 0 <= value <= 1:
            raise InvalidValue(expected)
        return float(value)


class Percent(ValueKind, frozen=True):
    """A percentage, stored as a ratio."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> float:
        expected = "a percentage from 0 to 100"
        value = _read_number(node, context, expected)
        if not 0 <= value <= 100:
            raise InvalidValue(expected)
        if 0 < value <= 1:
            shown, guess = _shortest(value), _shortest(round(value * 100, 9))
            context.warn(path.spelled, f"{shown} means {shown} %; if {guess} % is meant, write {guess}")
        return value / 100

    def show(self, value: float) -> float:
        return round(value * 100, 12)


class Seconds(ValueKind, frozen=True):
    """A duration, stored in seconds."""

    low: float = 0.0
    unit: int = 1  # seconds in the user's unit
    unit_name: str = "seconds"

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> float:
        bound = f"at least {_shortest(self.low / self.unit)}" if self.low else "0 or more"
        expected = f"a number of {self.unit_name}, {bound}"
        value = _read_number(node, context, expected)
        if value > MAX_SECONDS / self.unit:
            raise InvalidValue(expected + " and at most ten years")
        if value * self.unit < self.low or value < 0:
            raise InvalidValue(expected)
        return float(value * self.unit)

    def show(self, value: float) -> float | int:
        return _shortest(value / self.unit)


_SLURM_TIME = re.compile(r"(?:(\d{1,4})-(\d{1,2})(?::(\d{2})(?::(\d{2}))?)?|(\d{1,4}):(\d{2}):(\d{2}))", re.ASCII)


class SlurmTime(ValueKind, frozen=True):
    """A duration as Slurm writes it, such as 4:00:00 or 1-12:00:00, stored in seconds. A bare number, and two with one
    colon, mean different things in different programs: they are refused."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> float:
        expected = "a time of Slurm's, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS, a minute or more"
        if not isinstance(node.value, str):
            raise InvalidValue(expected)
        match = _SLURM_TIME.fullmatch(context.expand(node.value).strip())
        if match is None:
            raise InvalidValue(expected)
        days, *long, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        if match[1] is not None:
            hours, minutes, seconds = long
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        if not 60 <= total <= MAX_SECONDS:
            raise InvalidValue(expected)
        return float(total)

    def show(self, value: float) -> str:
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt])(?:i?b)?", re.IGNORECASE)


class MemorySize(ValueKind, frozen=True):
    """Memory written with its unit, such as 16g, stored in bytes."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> int:
        expected = "an amount of memory with its unit, such as 16g or 512m"
        if not isinstance(node.value, str):
            raise InvalidValue(expected)
        match = _SIZE.fullmatch(context.expand(node.value).strip())
        if match is None or len(match[1]) > 20:
            raise InvalidValue(expected)
        size: int = round(float(match[1]) * 1024 ** ("kmgt".index(match[2].lower()) + 1))
        if not 0 < size <= MAX_AMOUNT:
            raise InvalidValue(expected)
        return size

    def show(self, value: int) -> str:
        for power, letter in ((3, "g"), (2, "m")):
            if value % 1024**power == 0:
                return f"{value // 1024**power}{letter}"
        return f"{Amount(1024).show(value)}k"


class Text(ValueKind, frozen=True):
    """Text on one line that fits the pattern; `expected` is the pattern in words."""

    expected: str = "text on one line"
    pattern: re.Pattern[str] | None = None
    lower: bool = False

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
        if not isinstance(node.value, str):
            quotable = node.value is not None and not isinstance(node.value, list | dict)
            raise InvalidValue(self.expected, hint="for text put it in quotes" if quotable else "")
        text = context.expand(node.value).strip()
        if not text or len(text) > MAX_TEXT_LENGTH or not text.isprintable():
            raise InvalidValue(self.expected)
        if self.pattern is not None and not self.pattern.fullmatch(text):
            raise InvalidValue(self.expected)
        return text.lower() if self.lower else text

    def show(self, value: Any) -> str:
        return str(value).replace("${", "$${")


class Secret:
    """A text that can be compared and is never shown; `reveal` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return f"Secret('{self}')"

    def __str__(self) -> str:
        return "**********"


class SecretText(Text, frozen=True):
    """Text that is never shown."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Secret:
        try:
            return Secret(Text.read(self, node, path, context))
        except InvalidValue as invalid:
            found = invalid.found or "a value (not shown)"
            raise InvalidValue(invalid.expected, found=found, hint=invalid.hint) from None

    def show(self, value: Any) -> str:
        return MASK


class Flag(ValueKind, frozen=True):
    """True or false."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> bool:
        value = node.value
        if isinstance(value, str) and "${" in value:
            value = plain_scalar(context.expand(value).strip())
        if not isinstance(value, bool):
            raise InvalidValue("true or false")
        return value


class OneOf(ValueKind, frozen=True):
    """One of a few words, in any case; some have a second spelling."""

    words: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> str:
        expected = "one of " + ", ".join(self.words)
        if not isinstance(node.value, str):
            raise InvalidValue(expected)
        word = context.expand(node.value).strip().lower().replace("-", "_")
        word = self.aliases.get(word, word)
        if word not in self.words:
            raise InvalidValue(expected)
        return word

    def show(self, value: Any) -> str:
        return str(value)  # an enum's member is a word, too, but YAML does not know it


class HostAddress(ValueKind, frozen=True):
    """An address that SSH knows, or `local` for an agent on this machine."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> str:
        host: str = Text("a host name or address, or local").read(node, path, context)
        if "@" in host:
            raise InvalidValue("a host name or address alone", hint="the part before @ goes into user:")
        if re.fullmatch(r"[^:]+:[0-9]+", host):
            raise InvalidValue("a host name or address alone", hint="the number after : goes into port:")
        if not re.fullmatch(r"[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*", host):
            raise InvalidValue("a host name or address, or local")
        return "local" if host.lower() == "local" else host


def is_loopback(host: str) -> bool:
    """True if a listener at this address is reachable from this machine only."""
    name = host.strip("[]").lower()
    return name in ("local", "localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", name) is not None


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z"
NODE_NAME = Text(
    "a name such as gpu-1, of letters, digits, - _ and . that starts with a letter or digit, at most 63 long",
    re.compile(NAME_PATTERN),
)
CUSTOM_NAME = Text(
    "a resource name such as tpu (letters, digits, - _ and ., not cpu, gpu or memory)",
    re.compile(r"(?!(?:cpu|gpu|memory)$)[a-z][a-z0-9_.-]{0,62}", re.ASCII | re.IGNORECASE),
    lower=True,
)
LOGIN = Text("a login name such as ana", re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@$-]{0,63}", re.ASCII))
_JUMP = r"(?:[A-Za-z0-9_][A-Za-z0-9_.@$-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*"
JUMPS = Text("hosts such as ana@gate:22, or names of nodes, with commas between", re.compile(rf"{_JUMP}(, *{_JUMP})*"))
WEB_ADDRESS = SecretText("an address that starts with http:// or https://", re.compile(r"https?://[^\s/]+\S*"))
TEXT, PATH, COMMAND, SECRET = Text(), Text("a path"), Text("a command"), SecretText()
FLAG, RATIO, PERCENT, HOST = Flag(), Ratio(), Percent(), HostAddress()
CORES, SOME_CORES = Amount(1000, "a number of CPU cores"), Amount(1000, "a number of CPU cores", above_zero=True)
GIGABYTES = Amount(GIB, "an amount of memory in GB")
DISK_GIGABYTES = Amount(GIB, "an amount of disk space in GB")
SOME_GIGABYTES = Amount(GIB, "an amount of memory in GB", above_zero=True)
DEVICES = Count(0, 1024, "a whole number of GPUs")
PORT = Count(1, 65535, "a port number")
