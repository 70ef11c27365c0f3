"""Shape of a command: what its runs have in common, and the numbers in which they differ.

Two commands of one shape are the same program or script with the same options. File names and other values do not
count; numbers are features of the run; secrets are masked first. A shape is a short text that a person recognises:

    python3 train.py --epochs 10 --data /data/a.csv      python train.py --data … --epochs #
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from distributed_grid.masking.command_line import mask_secrets

MAX_FEATURES: Final = 4
"""The numbers of a command that count: the first ones, those of options in the order of their names."""
MAX_KEY_CHARS: Final = 200
MAX_WORDS: Final = 200  # words of a command that are looked at
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_VERSION = re.compile(r"[-.]?[0-9][0-9.]*$")
_SUBCOMMAND = re.compile(r"[a-z][a-z-]{1,19}")
_OPTION = re.compile(r"--?[A-Za-z@][A-Za-z0-9_.-]*")
_WRAPPER_WORD = re.compile(r"-|[0-9]|[A-Za-z_][A-Za-z0-9_]*=")
"""Options, numbers and variables of a program that only runs another one."""
_SHORT_WITH_NUMBER = re.compile(r"(-[A-Za-z])([0-9]+)")
_UNITS: Final = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SCRIPT_RUNNERS: Final = frozenset(
    {"bash", "dash", "julia", "node", "perl", "php", "python", "pypy", "r", "rscript", "ruby", "sh", "zsh"}
)
_WRAPPERS: Final = frozenset({"env", "nice", "nohup", "stdbuf", "time", "timeout"})


class TaskShape(Struct, frozen=True):
    """The key under which runs are remembered, and the numbers of this one, at the same places in every run."""

    key: str
    features: tuple[float, ...] = ()


def task_shape(argv: Sequence[str]) -> TaskShape:
    words = list(mask_secrets(argv[:MAX_WORDS])[0])
    return _ShapeReader(words).read() if words else TaskShape("")


BATCH_SIZE: Final = "batch_size"
_KINDS: Final = (
    "model",
    "model_name",
    "model_type",
    "model_family",
    "precision",
    "dtype",
    "device",
    "hardware",
    "backend",
)
"""Parameters whose words make a type of its own; of other words only the names count."""


def typed_task_shape(task_type: str, parameters: Mapping[str, float | str]) -> TaskShape:
    """The shape of a task that is a type with parameters instead of a command; the batch size is the first number."""
    numbers = {name: float(value) for name, value in parameters.items() if not isinstance(value, str)}
    numbers = {name: value for name, value in numbers.items() if math.isfinite(value) and value >= 0}
    order = sorted(numbers, key=lambda name: (name != BATCH_SIZE, name))[:MAX_FEATURES]
    kinds = [f"{name}={parameters[name]}" for name in _KINDS if isinstance(parameters.get(name), str)]
    key = " ".join([f"type:{task_type}", *kinds, *(f"{name}=#" for name in order)])
    return TaskShape(_shortened(key), tuple(numbers[name] for name in order))


PULL_ORIGIN: Final = "pull:"


def pulled_shape(shape: TaskShape) -> TaskShape:
    """The shape of a task as its pull worker reports it, with a history apart from that of jobs, which the grid
    measures itself. A task that is a type is run by pull workers only."""
    if not shape.key or shape.key.startswith("type:"):
        return shape
    return TaskShape(_shortened(f"{PULL_ORIGIN} {shape.key}"), shape.features)


class _ShapeReader:
    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._at = 0
        self._options: dict[str, str] = {}
        self._values: list[str] = []
        self._code_numbers: list[float] = []
        self._numbers: dict[str, float] = {}

    def read(self) -> TaskShape:
        program = self._program()
        while self._at < len(self._words):
            self._read_word()
        named = sorted(self._options)
        parts = [*program, *(" ".join(filter(None, (name, self._options[name]))) for name in named), *self._values]
        order = [*named, *(f"{i}" for i in range(len(self._values)))]
        numbers = [*self._code_numbers, *(self._numbers[name] for name in order if name in self._numbers)]
        return TaskShape(_shortened(" ".join(parts)), tuple(numbers[:MAX_FEATURES]))

    def _program(self) -> list[str]:
        """The program, and the script or subcommand it runs."""
        words = self._words
        while self._at < len(words) - 1 and _name_of(words[self._at]) in _WRAPPERS:
            self._at += 1
            while self._at < len(words) - 1 and _WRAPPER_WORD.match(words[self._at]):
                self._at += 1
        program = _name_of(words[self._at])
        self._at += 1
        if program not in _SCRIPT_RUNNERS:
            if self._at < len(words) and _SUBCOMMAND.fullmatch(words[self._at]):
                self._at += 1
                return [program, words[self._at - 1]]
            return [program]
        return [program, *self._script()]

    def _script(self) -> list[str]:
        """The script of an interpreter, its module, or the digest of the code on its command line."""
        words = self._words
        while self._at < len(words) and words[self._at].startswith("-") and len(words[self._at]) > 1:
            flag = words[self._at]
            self._at += 1
            if flag in ("-m", "-jar") and self._at < len(words):
                self._at += 1
                return [flag, posixpath.basename(words[self._at - 1])]
            if not flag.startswith("--") and flag.endswith(("c", "e")) and self._at < len(words):
                self._at += 1
                code = words[self._at - 1]  # by its digest without numbers, which are features
                self._code_numbers = [float(number) for number in _NUMBER.findall(code)[:MAX_FEATURES]]
                digest = hashlib.sha256(_NUMBER.sub("#", code).encode("utf-8", "replace")).hexdigest()[:8]
                return [flag, f"code:{digest}"]
        if self._at < len(words):
            self._at += 1
            return [posixpath.basename(words[self._at - 1]) or "…"]
        return []

    def _read_word(self) -> None:
        word = self._words[self._at]
        self._at += 1
        name, equals, value = word.partition("=")
        if not _OPTION.fullmatch(name):
            shown = self._value(f"{len(self._values)}", word)
            if not (self._values and shown == "…" and self._values[-1] == "…"):  # the files of a pattern are one value
                self._values.append(shown)
            return
        if not equals and (short := _SHORT_WITH_NUMBER.fullmatch(word)):
            name, value = short.groups()
        elif not equals and self._at < len(self._words) and not _OPTION.match(self._words[self._at]):
            value = self._words[self._at]
            self._at += 1
        self._options[name] = self._value(name, value) if value else ""

    def _value(self, name: str, word: str) -> str:
        number = number_of(word)
        if number is None:
            self._numbers.pop(name, None)
            return "…"
        self._numbers[name] = number
        return "#"


def number_of(word: str) -> float | None:
    """The number that a word is, with or without a unit of bytes (`64`, `0.5`, `16G`); None where it is none."""
    unit = _UNITS.get(word[-1:].lower(), 1)
    digits = word[:-1] if unit > 1 else word
    number = float(digits) * unit if _NUMBER.fullmatch(digits) else math.inf
    return number if math.isfinite(number) else None


def _name_of(word: str) -> str:
    """Name of a program without its folder and version."""
    name = posixpath.basename(word)
    return (_VERSION.sub("", name) or name).lower() or "…"


def _shortened(key: str) -> str:
    """A key of bounded length: a long one ends in a digest of the whole."""
    key = "".join(c if c.isprintable() else "?" for c in key)
    if len(key) <= MAX_KEY_CHARS:
        return key
    digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{key[: MAX_KEY_CHARS - 9]}~{digest}"
