"""Trust in a file that was found and not named: who owns it and its folder, and who else may write there.

Imports only the standard library, and little of it: every command loads this module.
"""

from __future__ import annotations

import os
import stat


def distrust_of(path: str) -> str | None:
    """Why a file that nobody named must not be used, or None: somebody else could have written what is in it.

    File and folder must belong to the caller or to root and be writable by nobody else; where they are reached by a
    symbolic link, that must, too. The caller's private group, with nobody else in it, is nobody else.
    """
    folder = os.path.dirname(path) or "."
    try:
        for place, name in ((folder, "its folder"), (path, "it")):
            for found in (os.lstat(place), os.stat(place)):
                reason = _distrust(found, name)
                if reason is not None:
                    return reason
    except OSError as failure:
        return f"it cannot be examined: {failure.strerror}"
    return None


def _distrust(found: os.stat_result, name: str) -> str | None:
    if found.st_uid not in (0, os.geteuid()):
        return f"{name} belongs to uid {found.st_uid}, not to you"
    if stat.S_ISLNK(found.st_mode):  # its mode means nothing
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"everybody may write to {name}"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return f"the group {found.st_gid} may write to {name}"
    return None


def _is_private_group(gid: int) -> bool:
    """Whether a group is the caller's own and nobody else's, as systems make one for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
