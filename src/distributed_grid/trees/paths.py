"""Paths that travel, and walks over directories: the two forms of names, their limits, glob patterns, and errors.

Inside this package a path is bytes, as the kernel has it; at its border it is text, where bytes that are not UTF-8 are
surrogates (as in the rest of Python). Neither form depends on the locale.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import string
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from distributed_grid.errors import ProtocolError, Refused, StoreFailed

MAX_PATH_BYTES = 4095
MAX_NAME_BYTES = 255
MAX_DEPTH = 100  # a directory walker holds one descriptor per level


def to_bytes(path: str) -> bytes:
    """The path as the kernel has it."""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{path!a} cannot be a file name") from error


def to_text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def display_path(path: str | bytes) -> str:
    """Path for a message: unprintable characters are escaped."""
    raw = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    text = raw.decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def split_path(path: bytes) -> tuple[bytes, ...]:
    """The names a relative, normalised path is made of; any other path is a `ProtocolError`."""
    parts = tuple(path.split(b"/"))
    if problem := _path_problem(path, parts):
        raise ProtocolError(f"the path '{display_path(path[:200])}' {problem}")
    return parts


def _path_problem(path: bytes, parts: tuple[bytes, ...]) -> str:
    if not path:
        return "is empty"
    if path.startswith(b"/"):
        return "is absolute"
    if b"\0" in path:
        return "holds a NUL byte"
    if b".." in parts:
        return "leads outside the directory"
    if b"" in parts or b"." in parts:
        return "is not in its simplest form"
    if len(path) > MAX_PATH_BYTES or max(map(len, parts)) > MAX_NAME_BYTES:
        return "is too long"
    if len(parts) > MAX_DEPTH:
        return f"is more than {MAX_DEPTH} directories deep"
    return ""


TRANSIENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@contextmanager
def translate_os_errors(path: str | bytes, action: str) -> Iterator[None]:
    """Raise an `OSError` of the body as `StoreFailed` where it may pass (a full disk), else as `Refused`."""
    try:
        yield
    except OSError as error:
        shown, reason = display_path(path), error.strerror or str(error)
        if isinstance(error.filename, (str, bytes)):
            named = display_path(error.filename)
            if os.path.basename(named) != os.path.basename(shown):
                reason = f"{named}: {reason}"
        problem = f"{shown}: could not {action}: {reason}"
        raise (StoreFailed if error.errno in TRANSIENT_ERRNOS else Refused)(problem) from error


_STAR, _STARS, _SLASH = b"*", b"**", b"/"  # marks among the tokens; every other token matches one byte
_NEVER = b"(?!)"
_CLASSES = {
    "alnum": string.ascii_letters + string.digits,
    "alpha": string.ascii_letters,
    "blank": " \t",
    "cntrl": "".join(map(chr, [*range(32), 127])),
    "digit": string.digits,
    "graph": "".join(map(chr, range(33, 127))),
    "lower": string.ascii_lowercase,
    "print": "".join(map(chr, range(32, 127))),
    "punct": string.punctuation,
    "space": " \t\n\r\f\v",
    "upper": string.ascii_uppercase,
    "xdigit": string.hexdigits,
}


def pattern_regex(pattern: bytes) -> bytes:
    """The regular expression (for `fullmatch`, with DOTALL) of a glob pattern, read as git reads it.

    `*` and `?` and `[…]` stay within one name; a name that is just `**` stands for any number of directories, and at
    the end for everything below. A malformed pattern never matches. All but the last `*` of a name, and all but the
    last `**`, match at the first position that fits and never another (the rest of the path is then longest, so nothing
    is missed): no pattern takes exponential time.
    """
    tokens = _tokens(pattern)
    if tokens is None:
        return _NEVER
    runs: list[list[bytes]] = [[]]  # the names between one `**` and the next
    for name in _split(tokens, _SLASH):
        if name == [_STARS]:
            runs.append([])
            continue
        pieces = [b"".join(piece) for piece in _split([_STAR if token == _STARS else token for token in name], _STAR)]
        head, *tail = pieces
        lazy = b"".join(b"(?>[^/]*?" + piece + b")" for piece in tail[:-1])
        runs[-1].append(head + lazy + b"[^/]*" + tail[-1] if tail else head)
    first, *rest = (b"/".join(run) for run in runs)
    if not rest:
        return first
    *middle, last = rest
    regex = first + b"/" if runs[0] else b""
    regex += b"".join(b"(?>(?:[^/]+/)*?" + run + b"/)" for run in middle if run)
    return regex + (b"(?:[^/]+/)*" + last if runs[-1] else b".+")


def is_malformed(pattern: bytes) -> bool:
    return _tokens(pattern) is None


def escape_pattern(path: bytes) -> bytes:
    return re.sub(rb"([\\*?\[\]!# ])", rb"\\\1", path)


def _split(tokens: list[bytes], mark: bytes) -> list[list[bytes]]:
    parts: list[list[bytes]] = [[]]
    for token in tokens:
        if token == mark:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _tokens(pattern: bytes) -> list[bytes] | None:
    tokens: list[bytes] = []
    position = 0
    while position < len(pattern):
        byte = pattern[position : position + 1]
        position += 1
        if byte == b"*":
            end = position + len(pattern[position:]) - len(pattern[position:].lstrip(b"*"))
            tokens.append(_STAR if end == position else _STARS)
            position = end
        elif byte == b"?":
            tokens.append(b"[^/]")
        elif byte == b"[":
            chosen = _bracket_regex(pattern, position)
            if chosen is None:
                return None
            token, position = chosen
            tokens.append(token)
        elif byte == b"\\":
            if position == len(pattern):
                return None
            tokens.append(re.escape(pattern[position : position + 1]))
            position += 1
        else:
            tokens.append(re.escape(byte))
    return tokens


def _bracket_regex(pattern: bytes, at: int) -> tuple[bytes, int] | None:
    """The regular expression of the bracket that begins before `at`, and its end; None when it is malformed."""
    inverted = pattern[at : at + 1] in (b"!", b"^")
    at += inverted
    chosen: set[int] = set()
    previous: int | None = None
    first = True
    while at < len(pattern):
        byte = pattern[at]
        if byte == ord("]") and not first:
            members = (set(range(256)) - chosen if inverted else chosen) - {ord("/")}
            listed = b"".join(b"\\x%02x" % member for member in sorted(members))
            return (b"[" + listed + b"]" if members else _NEVER), at + 1
        first = False
        named = re.compile(rb"\[:([^\]]*):\]").match(pattern, at)
        if named:
            name = named[1].decode("latin-1")
            if name not in _CLASSES:
                return None
            chosen.update(map(ord, _CLASSES[name]))
            previous, at = None, named.end()
        elif byte == ord("-") and previous is not None and pattern[at + 1 : at + 2] not in (b"", b"]"):
            at += 1 + (pattern[at + 1] == ord("\\"))
            if at >= len(pattern):
                return None
            chosen.update(range(previous, pattern[at] + 1))
            previous, at = None, at + 1
        else:
            at += byte == ord("\\")
            if at >= len(pattern):
                return None
            previous = pattern[at]
            chosen.add(previous)
            at += 1
    return None


DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MAX_HOPS = 40  # as many links as the kernel follows


class DirectoryWalker:
    """A position below a root that the caller keeps open; moving to a sibling opens only what differs."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._open: list[tuple[bytes, int]] = []

    def __enter__(self) -> DirectoryWalker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, names: tuple[bytes, ...], *, make: int | None = None, exact: bool = False) -> int:
        """The directory at `names` as a descriptor that is valid until the next call.

        With `make` (a mode) missing directories are made; if `exact`, regardless of this process's umask. A link or
        a file on the path is a `NotADirectoryError`.
        """
        shared = 0
        while shared < min(len(names), len(self._open)) and self._open[shared][0] == names[shared]:
            shared += 1
        self._close_below(shared)
        for name in names[shared:]:
            self._open.append((name, self._open_child(name, names, make, exact=exact)))
        return self._here

    def close(self) -> None:
        self._close_below(0)

    @property
    def _here(self) -> int:
        return self._open[-1][1] if self._open else self._root

    def _close_below(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])

    def _open_child(self, name: bytes, names: tuple[bytes, ...], make: int | None, *, exact: bool) -> int:
        try:
            return os.open(name, DIRECTORY_FLAGS, dir_fd=self._here)
        except FileNotFoundError:
            if make is None:
                raise
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            path = display_path(b"/".join(names[: len(self._open) + 1]))
            raise NotADirectoryError(errno.ENOTDIR, describe_file_type(name, self._here), path) from error
        try:
            os.mkdir(name, make, dir_fd=self._here)
        except FileExistsError:
            exact = False  # made by another process meanwhile
        fd = os.open(name, DIRECTORY_FLAGS, dir_fd=self._here)
        if exact:
            os.fchmod(fd, make)
        return fd


def describe_file_type(name: bytes, folder: int) -> str:
    """The type of the file of that name, in words for a message."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except OSError:
        return "is gone"
    if stat.S_ISLNK(mode):
        return "is a link, and links are not followed"
    if stat.S_ISDIR(mode):
        return "is a directory"
    return "is a file" if stat.S_ISREG(mode) else "is not a regular file"


def open_root(root: str | bytes | os.PathLike[str]) -> int:
    """Root directory as the user named it: this one name may be a link."""
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


Tree = int | str | os.PathLike[str]
"""An open directory, or the path of one."""


def tree_name(tree: Tree) -> str:
    return f"descriptor {tree}" if isinstance(tree, int) else os.fspath(tree)


@contextmanager
def open_tree(tree: Tree, name: str, action: str) -> Iterator[int]:
    """A descriptor of the directory for the block; an `OSError` of the block is translated."""
    with translate_os_errors(name, action):
        fd = os.dup(tree) if isinstance(tree, int) else open_root(tree)
        try:
            yield fd
        finally:
            os.close(fd)


def open_inside(root: int, path: bytes) -> int:
    """Regular file at `path` for reading; links are followed, and one that leads outside is a `PermissionError`."""
    with DirectoryWalker(root) as walker:

        def link_target(names: list[bytes]) -> bytes | None:
            folder = walker.enter(tuple(names[:-1]))
            try:
                return os.readlink(names[-1], dir_fd=folder)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return None
                raise

        names = _resolve(path, link_target)
        return open_regular(names[-1], walker.enter(tuple(names[:-1])))


def _resolve(path: bytes, link_target: Callable[[list[bytes]], bytes | None]) -> list[bytes]:
    """The names from the root to what `path` leads to, all links followed as the kernel would follow them.

    Above the root is a `PermissionError`, the end in a directory an `IsADirectoryError`.
    """
    here: list[bytes] = []
    ahead, name, hops = deque(path.split(b"/")), b"", 0
    while ahead:
        name = ahead.popleft()
        if name in (b"", b"."):
            continue
        if name == b"..":
            if not here:
                raise PermissionError(errno.EACCES, "leads outside the directory", display_path(path))
            here.pop()
            continue
        here.append(name)
        target = link_target(here)
        if target is None:
            continue
        if target.startswith(b"/"):
            raise PermissionError(errno.EACCES, "leads outside the directory", display_path(path))
        hops += 1
        if hops > MAX_HOPS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), display_path(path))
        here.pop()
        ahead.extendleft(reversed(target.split(b"/")))
    if name in (b"", b".", b".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), display_path(path))
    return here


def open_regular(name: bytes, folder: int) -> int:
    """The regular file of that name for reading, without ever blocking; `OSError` when it is anything else."""
    fd = os.open(name, READ_FLAGS, dir_fd=folder)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), display_path(name))
    raise OSError(errno.EINVAL, "is not a regular file", display_path(name))


def leads_outside(path: bytes, links: Mapping[bytes, bytes]) -> bool:
    """True if following the link at `path` goes above the root; `links` are all links of the tree, path to target.

    Links are followed as the kernel would: `a/b/c/up -> ../../../x` stays inside, and so, read by itself, does
    `a/b/c/out -> up/../..`; together they lead above the root. A cycle leads nowhere, and so not outside.
    """
    try:
        _resolve(path, lambda names: links.get(b"/".join(names)))
    except OSError as error:
        return isinstance(error, PermissionError)
    return False
