"""What the file system complains about, in the grid's own errors.

Rule 1. What may pass (a full disk, too many open files) is `StoreFailed`: worth trying again.
Rule 2. Anything else about files is `Refused`, and names the file: a person has to look.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from distributed_grid.adapters.workdir.paths import shown
from distributed_grid.errors import Refused, StoreFailed

PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@contextmanager
def translated(place: str | bytes, deed: str) -> Iterator[None]:
    """Run the body; an `OSError` in it comes out as a `GridError` that says where and why."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        named = error.filename
        if isinstance(named, (str, bytes)) and os.path.basename(shown(named)) != os.path.basename(shown(place)):
            reason = f"{shown(named)}: {reason}"
        problem = f"{shown(place)}: could not {deed}: {reason}"
        raise (StoreFailed if error.errno in PASSING else Refused)(problem) from error
