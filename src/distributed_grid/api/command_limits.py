"""Limits of a command: sizes beyond those of `execve` or of a message to an agent are refused at once.

Only the standard library is imported here: every command that submits a job imports this file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MAX_STRING_BYTES = 128 * 1024 - 1
"""Of one argument or variable: MAX_ARG_STRLEN of Linux, without the NUL at its end."""
MAX_COMMAND_BYTES = 2 * 1024 * 1024 - 128 * 1024
"""Of all arguments and variables: a quarter of the usual stack, less the additions of a node."""
_POINTER_BYTES = 8


def command_problem(argv: Collection[str], env: Mapping[str, str], given: Collection[str] = ()) -> str | None:
    """Reason why no node can start this command, in one line, or None."""
    total = sum(len(name) for name in given)
    for number, word in enumerate(argv):
        size = _size(word)
        if size > MAX_STRING_BYTES:
            what = f"argument {number}" if number else "the name of the command"
            return f"{what} has {size:,} bytes, and a program can be given {MAX_STRING_BYTES:,} in one: use a file"
        total += size + 1 + _POINTER_BYTES
    for name, value in env.items():
        size = _size(name) + 1 + _size(value)
        if size > MAX_STRING_BYTES:
            short = name if len(name) <= 40 else f"{name[:40]}…"
            return f"the variable {short} has {size:,} bytes, and one can have {MAX_STRING_BYTES:,}: use a file"
        total += size + 1 + _POINTER_BYTES
    if total > MAX_COMMAND_BYTES:
        return (
            f"the command and its variables take {total:,} bytes, and a program can be started with "
            f"{MAX_COMMAND_BYTES:,}: put long lists into a file"
        )
    return None


def _size(word: str) -> int:
    return len(word) if word.isascii() else len(word.encode("utf-8", "surrogateescape"))
