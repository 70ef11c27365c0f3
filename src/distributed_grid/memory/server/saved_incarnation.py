"""A life of the memory that ended empty, kept for the next server: nothing was lost with it.

Blocks are made when they are first used, so some that were granted may not have been there yet when a server that held
nothing went away. They are as good as before under the next one, if that is the same life.

Rule 1. A life is kept only by a server that holds nothing in memory and is about to end, and taken once.
Rule 2. It is of no use after the machine was started anew.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Final

from distributed_grid.memory.server.copy_file import boot_id_bytes

FILE: Final = "life.json"


def keep_life(folder: Path, incarnation: str, key: bytes) -> None:
    """Leave this life to the next server; where that does not work, the next one begins its own."""
    content = json.dumps({"incarnation": incarnation, "key": key.hex(), "boot": boot_id_bytes().hex()}).encode()
    path = folder / FILE
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)


def take_life(folder: Path) -> tuple[str, bytes] | None:
    """The life that was left, which is then left no more; None where there is none."""
    path = folder / FILE
    try:
        found = json.loads(path.read_bytes())
        path.unlink()
        if bytes.fromhex(found["boot"]) != boot_id_bytes():
            return None
        return str(found["incarnation"]), bytes.fromhex(found["key"])
    except (OSError, ValueError, KeyError, TypeError):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None
