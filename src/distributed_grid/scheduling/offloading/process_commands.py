"""Shape of a process's command, for which a user consents.

A shape is the program, its script or subcommand, and the names of options without values. Programs of the system are
named without their folder, others by their path. Two runs that differ only in values have one shape: `python train.py
--epochs 3 --lr 0.1` and `python train.py --lr=0.2 --epochs 9` are both `python train.py --epochs --lr`. Code that is
given on the command line (`-c`) is part of the shape by its digest: a consent for one piece of code is none for
another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from posixpath import basename, normpath

from distributed_grid.scheduling.offloading.obstacles import one_line

MAX_SHAPE_CHARS = 500
_VERSION = re.compile(r"^(python|pypy|node|ruby|perl|lua|php|java|julia)[\d.]*$")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "ash"})
_INTERPRETERS = frozenset({"python", "pypy", "node", "ruby", "perl", "lua", "php", "julia", "Rscript", *_SHELLS})
_CODE_OPTIONS = {"node": ("-e", "--eval", "-p"), "ruby": ("-e",), "perl": ("-e", "-E"), "lua": ("-e",), "php": ("-r",)}
_WITH_VALUE = {
    "python": frozenset({"-W", "-X"}),
    "node": frozenset({"-r", "--require"}),
    "ruby": frozenset({"-r", "-I"}),
}
_LAUNCHERS = frozenset({"nohup", "setsid", "nice", "ionice", "time", "stdbuf", "env", "chrt", "taskset", "timeout"})
_SYSTEM_BIN = ("/usr/", "/bin/", "/sbin/", "/opt/")
_SUBCOMMAND = re.compile(r"^[a-z][a-z0-9_-]{0,30}$")
_OPTION = re.compile(r"^(--?[A-Za-z][\w.-]*)")


def command_shape(argv: Sequence[str], cwd: str = "") -> str:
    """The shape of a command; paths below its working directory are relative to it. Empty for no command."""
    words = list(argv)
    if not words:
        return ""
    program = _program(words[0])
    is_of_system = "/" not in words[0] or words[0].startswith(_SYSTEM_BIN)
    parts = [program if is_of_system or program in _INTERPRETERS or program == "java" else _relative(words[0], cwd)]
    rest = words[1:]
    if program in _INTERPRETERS:
        script, rest = _script(program, rest, cwd)
        parts += script
    elif program == "java":
        script, rest = _jar(rest, cwd)
        parts += script
    elif program in _LAUNCHERS:  # what it launches is what matters, and it is not always told where that begins
        return _cut(" ".join([program, _digest(" ".join(rest))]))
    elif rest and _SUBCOMMAND.match(rest[0]):
        parts.append(rest[0])
        rest = rest[1:]
    return _cut(" ".join([*parts, *_option_names(rest)]))


def _program(word: str) -> str:
    name = basename(word.lstrip("-")) or word
    version = _VERSION.match(name)
    return version[1] if version is not None else name


def _script(program: str, words: list[str], cwd: str) -> tuple[list[str], list[str]]:
    """The script, module or code that an interpreter runs, and the words after it."""
    code = ("-c",) if program in ("python", "pypy", *_SHELLS) else _CODE_OPTIONS.get(program, ())
    takes_value = _WITH_VALUE.get(program, frozenset())
    at = 0
    while at < len(words):
        word = words[at]
        if word in code or (program in _SHELLS and re.fullmatch(r"-[a-z]*c", word)):
            return ["-c", _digest(words[at + 1] if at + 1 < len(words) else "")], words[at + 2 :]
        if word == "-m" and program in ("python", "pypy"):
            return ["-m", *words[at + 1 : at + 2]], words[at + 2 :]
        if word in takes_value:
            at += 2
        elif word.startswith(("-", "+")):
            at += 1
        else:
            return [_relative(word, cwd)], words[at + 1 :]
    return [], words


def _jar(words: list[str], cwd: str) -> tuple[list[str], list[str]]:
    for at, word in enumerate(words):
        if word == "-jar":
            return ["-jar", *(_relative(path, cwd) for path in words[at + 1 : at + 2])], words[at + 2 :]
        if not word.startswith("-") and (not at or words[at - 1] not in ("-cp", "-classpath", "--class-path")):
            return [word], words[at + 1 :]
    return [], words


def _relative(path: str, cwd: str) -> str:
    whole = normpath(path if path.startswith("/") or not cwd else f"{cwd}/{path}")
    return whole[len(cwd) + 1 :] if cwd and whole.startswith(cwd + "/") else whole


def _option_names(words: Sequence[str]) -> list[str]:
    """Each option once, sorted: the order in which they are given does not matter."""
    found = set()
    for word in words:
        if word == "--":
            break
        name = _OPTION.match(word.partition("=")[0])
        if name is not None:
            found.add(name[1] if word.startswith("--") else name[1].rstrip("0123456789."))
    return sorted(found)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]


def _cut(shape: str) -> str:
    """A shape that can be shown and stored; one that had to be changed for that is told apart by its digest."""
    shown = one_line(shape)
    if shown == shape and len(shape) <= MAX_SHAPE_CHARS:
        return shape
    return f"{shown[: MAX_SHAPE_CHARS - 13]} {_digest(shape)}"
