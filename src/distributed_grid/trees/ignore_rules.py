"""Ignore rules of a directory: `.gitignore`, `.gridignore`, and what is ignored by default.

- As in git, the last matching pattern of the deepest ignore file that has one decides, and nothing below an ignored
  directory can be brought back.
- `.gridignore` outranks everything, and alone can bring back always ignored paths (`ALWAYS_IGNORED`, the grid's own
  state). An explicit `!` line of it also allows a file that looks like a secret (`secret_files`).
- In a git work tree the `.gitignore` files above the directory apply too, unless they ignore the directory itself:
  a user who works there wants it shipped.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable

from msgspec import Struct

from distributed_grid.errors import BadInput
from distributed_grid.trees.paths import display_path, escape_pattern, pattern_regex

GITIGNORE, GRIDIGNORE = b".gitignore", b".gridignore"
ALWAYS_IGNORED = b".git\n.hg/\n__pycache__/\n.venv/\nnode_modules/\n.distributed_grid/\n"
MAX_IGNORE_BYTES = 1 << 20
MAX_LEVELS_ABOVE = 64

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class IgnoreRules:
    """The patterns of one ignore file."""

    def __init__(self, content: bytes) -> None:
        self._negated: list[bool] = []
        self._explicit: list[bool] = []  # the pattern's last name is more than wildcards
        parts: dict[tuple[bool, bool], list[tuple[int, bytes]]] = {}  # (by path, of a directory) → which, expression
        for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
            line = line.removesuffix(b"\r")
            kept = line.rstrip(b" ")
            backslashes = len(kept) - len(kept.rstrip(b"\\"))
            line = line[: len(kept) + 1] if backslashes % 2 and len(kept) < len(line) else kept
            if not line or line.startswith(b"#"):
                continue
            pattern = line.removeprefix(b"!")
            of_directories = pattern.endswith(b"/")
            pattern = pattern.removesuffix(b"/")
            by_path = b"/" in pattern
            pattern = pattern.removeprefix(b"/")
            if not pattern:
                continue
            number = len(self._negated)
            self._negated.append(line.startswith(b"!"))
            self._explicit.append(bool(pattern.rpartition(b"/")[2].strip(b"*?.")))
            for is_directory in (True,) if of_directories else (True, False):
                parts.setdefault((by_path, is_directory), []).append((number, pattern_regex(pattern)))
        self._matchers = {kind: _LastMatch(numbered) for kind, numbered in parts.items()}

    def verdict(self, path: bytes, *, is_directory: bool) -> bool | None:
        """True if this path (relative to the ignore file) is ignored; None when no pattern matches."""
        last = self._last(path, is_directory)
        return None if last < 0 else not self._negated[last]

    def allows_secret(self, path: bytes, *, is_directory: bool) -> bool | None:
        """True if the last matching pattern is an explicit `!` line; None when no pattern matches."""
        last = self._last(path, is_directory)
        return None if last < 0 else self._negated[last] and self._explicit[last]

    def _last(self, path: bytes, is_directory: bool) -> int:
        last = -1
        if matcher := self._matchers.get((False, is_directory)):
            last = matcher.last(path.rpartition(b"/")[2])
        if matcher := self._matchers.get((True, is_directory)):
            last = max(last, matcher.last(path))
        return last


class _LastMatch:
    """The last of several patterns that matches: one expression, the later patterns tried first."""

    def __init__(self, numbered: list[tuple[int, bytes]]) -> None:
        newest_first = numbered[::-1]
        self._numbers = [number for number, _ in newest_first]
        self._pattern = re.compile(b"|".join(b"(" + pattern + b")" for _, pattern in newest_first), re.DOTALL)

    def last(self, path: bytes) -> int:
        match = self._pattern.fullmatch(path)
        return -1 if match is None or match.lastindex is None else self._numbers[match.lastindex - 1]


class _Layer(Struct, frozen=True):
    """Rules of one ignore file: paths lose `cut` bytes, or gain `prefix`, to be relative to it."""

    rules: IgnoreRules
    cut: int = 0
    prefix: bytes = b""

    def verdict(self, path: bytes, is_directory: bool) -> bool | None:
        return self.rules.verdict(self.prefix + path[self.cut :], is_directory=is_directory)

    def allows_secret(self, path: bytes, is_directory: bool) -> bool | None:
        return self.rules.allows_secret(self.prefix + path[self.cut :], is_directory=is_directory)


class IgnoreMatcher(Struct, frozen=True):
    """All rules that apply in one directory, the strongest first."""

    grid: tuple[_Layer, ...] = ()
    always: tuple[_Layer, ...] = ()
    git: tuple[_Layer, ...] = ()

    def ignores(self, path: bytes, *, is_directory: bool) -> bool:
        """True if `path`, relative to the top of the tree, is ignored; its parents are not checked."""
        for layer in (*self.grid, *self.always, *self.git):
            verdict = layer.verdict(path, is_directory)
            if verdict is not None:
                return verdict
        return False

    def allows_secret(self, path: bytes, *, is_directory: bool) -> bool:
        """True if `.gridignore` files bring back `path`, which looks like a secret, by an explicit `!` line."""
        verdicts = (layer.allows_secret(path, is_directory) for layer in self.grid)
        return next((verdict for verdict in verdicts if verdict is not None), False)

    def inside(self, folder: int, path: bytes) -> IgnoreMatcher:
        """The rules inside the open directory at `path` (b"" is the top): these, and its own ignore files."""
        git, grid = _read_ignore_file(folder, GITIGNORE, path), _read_ignore_file(folder, GRIDIGNORE, path)
        if git is None and grid is None:
            return self
        cut = len(path) + 1 if path else 0
        own_git = () if git is None else (_Layer(IgnoreRules(git), cut),)
        own_grid = () if grid is None else (_Layer(IgnoreRules(grid), cut),)
        return IgnoreMatcher(grid=own_grid + self.grid, always=self.always, git=own_git + self.git)


class GridIgnoreMatcher(IgnoreMatcher, frozen=True):
    """The rules of `.gridignore` files alone: nothing else is ignored."""

    def inside(self, folder: int, path: bytes) -> GridIgnoreMatcher:
        content = _read_ignore_file(folder, GRIDIGNORE, path)
        if content is None:
            return self
        return GridIgnoreMatcher(grid=(_Layer(IgnoreRules(content), len(path) + 1 if path else 0), *self.grid))


def rules_for(root: bytes, *, own_dirs: Iterable[bytes] = ()) -> IgnoreMatcher:
    """The rules at the top of `root`, before its own ignore files; `own_dirs` are the grid's own. Paths are real."""
    top = root.rstrip(b"/") + b"/"
    inside = [escape_pattern(directory[len(top) :]) for directory in own_dirs if directory.startswith(top)]
    always = ALWAYS_IGNORED + b"".join(b"/" + path + b"/\n" for path in inside)
    return IgnoreMatcher(always=(_Layer(IgnoreRules(always)),), git=_rules_above(root))


def _rules_above(root: bytes) -> tuple[_Layer, ...]:
    """The rules of the git work tree around `root`, the nearest first."""
    layers: list[_Layer] = []
    here, below = root, b""
    for _ in range(MAX_LEVELS_ABOVE):
        if os.path.lexists(os.path.join(here, b".git")):
            ignored = below and _ignores_directory(layers, below.rstrip(b"/"))
            return () if ignored else tuple(layers)
        here, name = os.path.split(here)
        if not name:
            return ()
        below = name + b"/" + below
        try:
            folder = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return ()
        try:
            content = _read_ignore_file(folder, GITIGNORE, here)
        finally:
            os.close(folder)
        if content is not None:
            layers.append(_Layer(IgnoreRules(content), prefix=below))
    return ()


def _ignores_directory(layers: list[_Layer], path: bytes) -> bool:
    """True if the rules ignore the directory at `path` below the work tree's top, or a parent of it."""
    names = path.split(b"/")
    for depth in range(1, len(names) + 1):
        for layer in layers:
            above = len(names) - layer.prefix.count(b"/")  # how deep below the top the ignore file is
            if above < depth:
                verdict = layer.rules.verdict(b"/".join(names[above:depth]), is_directory=True)
                if verdict:
                    return True
                if verdict is False:
                    break
    return False


def _read_ignore_file(folder: int, name: bytes, path: bytes) -> bytes | None:
    """An ignore file's content; None where there is no readable one."""
    try:
        fd = os.open(name, _READ, dir_fd=folder)
    except OSError:
        return None
    content = b""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        while len(content) <= MAX_IGNORE_BYTES and (part := os.read(fd, MAX_IGNORE_BYTES + 1)):
            content += part
    finally:
        os.close(fd)
    if len(content) > MAX_IGNORE_BYTES:
        shown = display_path(os.path.join(path, name))
        raise BadInput(f"{shown}: is larger than {MAX_IGNORE_BYTES >> 20} MB, too large for an ignore file")
    return content
