"""File names that travel: relative, normalised, and any bytes a file system allows.

Inside this package a path is bytes, as the kernel has it; at its border it is text, where bytes that are not UTF-8
stand as surrogates (as in the rest of Python). Neither form depends on the locale.
"""

from __future__ import annotations

from distributed_grid.errors import ProtocolError

MAX_PATH_BYTES = 4095
MAX_NAME_BYTES = 255
MAX_DEPTH = 100  # a descent holds one descriptor for each directory on the way


def to_bytes(path: str) -> bytes:
    """The path as the kernel has it."""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{path!a} cannot be a file name") from error


def to_text(path: bytes) -> str:
    """The path as text; `to_bytes` gives the same bytes again."""
    return path.decode("utf-8", "surrogateescape")


def shown(path: str | bytes) -> str:
    """The path for a person: what cannot be printed is escaped."""
    raw = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    text = raw.decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def components(path: bytes) -> tuple[bytes, ...]:
    """The names a relative, normalised path is made of; any other path is a `ProtocolError`."""
    parts = tuple(path.split(b"/"))
    if problem := _problem(path, parts):
        raise ProtocolError(f"the path '{shown(path[:200])}' {problem}")
    return parts


def _problem(path: bytes, parts: tuple[bytes, ...]) -> str:
    if not path:
        return "is empty"
    if path.startswith(b"/"):
        return "is absolute"
    if b"\0" in path:
        return "holds a NUL byte"
    if b".." in parts:
        return "leads out of the directory"
    if b"" in parts or b"." in parts:
        return "is not in its simplest form"
    if len(path) > MAX_PATH_BYTES or max(map(len, parts)) > MAX_NAME_BYTES:
        return "is too long"
    if len(parts) > MAX_DEPTH:
        return f"is more than {MAX_DEPTH} directories deep"
    return ""
