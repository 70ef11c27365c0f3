"""Blocks of a file: reserved before they are written, or returned to the disk. The size of the file stays."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_fallocate: Final = _LIBC.fallocate  # looked up here, once, before any fork
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reserve_blocks(fd: int, start: int, length: int) -> None:
    """Reserve blocks of that range, so that writing there needs no room. Raises `OSError`."""
    _change_blocks(fd, _KEEP_SIZE, start, length)


def punch_hole(fd: int, start: int, length: int) -> None:
    """Return the blocks of that range to the disk. Raises `OSError`."""
    _change_blocks(fd, _KEEP_SIZE | _PUNCH_HOLE, start, length)


def _change_blocks(fd: int, mode: int, start: int, length: int) -> None:
    if _fallocate(fd, mode, start, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
