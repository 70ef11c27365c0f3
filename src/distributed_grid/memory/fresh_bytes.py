"""A `bytes` object that is filled while nobody else can see it.

Python's own ways to get `bytes` from a socket copy once more: for a block of a gigabyte that is a second gigabyte and
a third of the time. The C API allows what is needed for exactly this case: an object with one owner may be written
until it is given to somebody. The memory is asked for in huge pages, where the kernel gives them on request, because
otherwise every 4 KiB of a fresh buffer cost a fault.
"""

from __future__ import annotations

import ctypes
from typing import Final

HUGE: Final = 2 * 1024 * 1024
_MADV_HUGEPAGE: Final = 14
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
    if size >= 2 * HUGE:
        start = -(-address // HUGE) * HUGE
        _madvise(start, (address + size) // HUGE * HUGE - start, _MADV_HUGEPAGE)
    view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return made, view
