"""A `bytes` object that is filled while nobody else can see it.

Python's own ways to get `bytes` from a socket copy once more: for a block of a gigabyte that is a second gigabyte and
a third of the time. The C API allows what is needed for exactly this case: an object with one owner may be written
until it is given to somebody. The memory is asked for in huge pages, where the kernel gives them on request, because
otherwise every 4 KiB of a fresh buffer cost a fault; and it is asked for ahead of the bytes, by a thread, because on a
virtual machine a page may have to come from the host first.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Final

HUGE: Final = 2 * 1024 * 1024
_AHEAD: Final = 4 * HUGE
_ALONE: Final = 2  # references to what nobody but the thread holds: its own, and that of the call that counts them
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_make = ctypes.pythonapi.PyBytes_FromStringAndSize
_make.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_make.restype = ctypes.py_object
_address = ctypes.pythonapi.PyBytes_AsString
_address.argtypes = [ctypes.py_object]
_address.restype = ctypes.c_void_p
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fresh_bytes(size: int) -> tuple[bytes, memoryview]:
    """New bytes of this size, of any content, and a view to fill them through.

    The view must not be used once the bytes are given away. Small objects may be shared by the interpreter, so those
    have to be made in another way: `size` is at least 2.
    """
    if size < 2:
        raise ValueError("bytes of fewer than two are shared objects")
    made: bytes = _make(None, size)
    address = _address(made)
    start, end = _whole_pages(address, size)
    if end > start:
        _madvise(start, end - start, _MADV_HUGEPAGE)
        make_ready(made, address, size)
    view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return made, view


def make_ready(owner: object, address: int, size: int) -> None:
    """Have the pages of new memory found aside while its first bytes are still on their way, as long as anybody else
    holds its owner. What the memory holds does not change."""
    start, end = _whole_pages(address, size)
    if end > start:
        threading.Thread(target=_populate, args=(_Held(owner), start, end), daemon=True).start()


class _Held:
    """The only reference to an owner that a thread has."""

    def __init__(self, owner: object) -> None:
        self.owner = owner


def _populate(held: _Held, start: int, end: int) -> None:
    for at in range(start, end, _AHEAD):
        if sys.getrefcount(held.owner) <= _ALONE:
            return  # whoever wanted to read has given up
        if _madvise(at, min(_AHEAD, end - at), _MADV_POPULATE_WRITE) != 0:
            return  # a kernel that does not know how: then each page is found when it is written


def _whole_pages(address: int, size: int) -> tuple[int, int]:
    """From where to where there are huge pages in this range; an empty range where that is not worth it."""
    if size < 2 * HUGE:
        return 0, 0
    return -(-address // HUGE) * HUGE, (address + size) // HUGE * HUGE
