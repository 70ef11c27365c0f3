"""Home directory of the user: the one in the environment, and the one in the user database."""

from __future__ import annotations

import os
import pwd


def holds_home(directory: str | os.PathLike[str]) -> bool:
    """True if a directory is the user's home directory or above it, by whatever name it was reached."""
    try:
        found = os.stat(directory)
    except OSError:
        return False
    return any(_is_at_or_above(found, home) for home in home_directories())


def home_directories() -> tuple[str, ...]:
    """The user's home directories, as real paths: `$HOME` and that of the user database, each once."""
    named = [os.environ.get("HOME", "")]
    try:
        named.append(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a user that the database does not have
        pass
    return tuple(dict.fromkeys(os.path.realpath(home) for home in named if os.path.isabs(home)))


def _is_at_or_above(directory: os.stat_result, home: str) -> bool:
    while True:
        try:
            if os.path.samestat(os.stat(home), directory):
                return True
        except OSError:  # a home that does not exist: its parents may
            pass
        above = os.path.dirname(home)
        if above == home:
            return False
        home = above
