"""File names that travel: their two forms, their limits, glob patterns over them, and errors about them.

Inside this package a path is bytes, as the kernel has it; at its border it is text, where bytes that are not UTF-8 are
surrogates (as in the rest of Python). Neither form depends on the locale.
"""

from __future__ import annotations

import errno
import os
import re
import string
from collections.abc import Iterator
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
    """The path as text; `to_bytes` gives the same bytes again."""
    return path.decode("utf-8", "surrogateescape")


def display_path(path: str | bytes) -> str:
    """The path for a message: what cannot be printed is escaped."""
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
        else:
            runs[-1].append(_name_regex(name))
    first, *rest = (b"/".join(run) for run in runs)
    if not rest:
        return first
    *middle, last = rest
    found = first + b"/" if runs[0] else b""
    found += b"".join(b"(?>(?:[^/]+/)*?" + run + b"/)" for run in middle if run)
    return found + (b"(?:[^/]+/)*" + last if runs[-1] else b".+")


def is_malformed(pattern: bytes) -> bool:
    """True if a glob pattern has a bracket or a backslash without its end: it would never match."""
    return _tokens(pattern) is None


def escape_pattern(path: bytes) -> bytes:
    """The pattern that means exactly this path."""
    return re.sub(rb"([\\*?\[\]!# ])", rb"\\\1", path)


def _name_regex(tokens: list[bytes]) -> bytes:
    pieces = [b"".join(piece) for piece in _split([_STAR if token == _STARS else token for token in tokens], _STAR)]
    if len(pieces) == 1:
        return pieces[0]
    first, *middle, last = pieces
    return first + b"".join(b"(?>[^/]*?" + piece + b")" for piece in middle) + b"[^/]*" + last


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
    at = 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        at += 1
        if byte == b"*":
            end = at + len(pattern[at:]) - len(pattern[at:].lstrip(b"*"))
            tokens.append(_STAR if end == at else _STARS)
            at = end
        elif byte == b"?":
            tokens.append(b"[^/]")
        elif byte == b"[":
            chosen = _bracket_regex(pattern, at)
            if chosen is None:
                return None
            token, at = chosen
            tokens.append(token)
        elif byte == b"\\":
            if at == len(pattern):
                return None
            tokens.append(re.escape(pattern[at : at + 1]))
            at += 1
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
