"""New `bytes` objects that are filled in place, and memory whose pages are populated ahead of the data.

Python's own ways to get `bytes` from a socket copy once more: for a block of a gigabyte that is a second gigabyte and a
third of the time. The C API allows to write an object with one owner until it is given to somebody. The memory is asked
for in huge pages, because otherwise every 4 KiB of a new buffer cost a fault; and a thread populates it ahead of the
data, because on a virtual machine a page may have to come from the host first. All of this relies on CPython's
reference counts: elsewhere, free-threaded builds included, data are received into a `bytearray` and copied.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import threading
from typing import Final

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
FILLS_IN_PLACE: Final = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
_AHEAD_BYTES: Final = 4 * HUGE_PAGE_BYTES
_OWN_REFERENCES: Final = 2  # of the populating thread: its own, and that of the call that counts them
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if FILLS_IN_PLACE:
    _make = ctypes.pythonapi.PyBytes_FromStringAndSize
    _make.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
    _make.restype = ctypes.py_object
    _address = ctypes.pythonapi.PyBytes_AsString
    _address.argtypes = [ctypes.py_object]
    _address.restype = ctypes.c_void_p


class ReadBuffer:
    """Room for the data of a read, which then become `bytes`."""

    __slots__ = ("_data", "view")

    def __init__(self, size: int) -> None:
        self._data: bytes | bytearray
        if not FILLS_IN_PLACE or size < 2:  # shorter `bytes` are shared objects
            self._data = bytearray(size)
            self.view = memoryview(self._data)
            return
        self._data = _make(None, size)
        address = _address(self._data)
        start, end = _huge_pages(address, size)
        if end > start:
            _madvise(start, end - start, _MADV_HUGEPAGE)
            populate_pages(self._data, address, size)
        self.view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def to_bytes(self) -> bytes:
        """The data; the view must not be written to any more."""
        return bytes(self._data)  # of `bytes` no copy


def populate_pages(owner: object, address: int, size: int) -> None:
    """Have the pages of new memory populated in a thread, as long as anybody else holds its owner. What the memory
    holds does not change."""
    start, end = _huge_pages(address, size)
    if end > start and FILLS_IN_PLACE:
        threading.Thread(target=_populate, args=(_OwnerReference(owner), start, end), daemon=True).start()


class _OwnerReference:
    """The only reference to an owner that the populating thread has."""

    def __init__(self, owner: object) -> None:
        self.owner = owner


def _populate(reference: _OwnerReference, start: int, end: int) -> None:
    for at in range(start, end, _AHEAD_BYTES):
        if sys.getrefcount(reference.owner) <= _OWN_REFERENCES:
            return  # the reader has given up
        if _madvise(at, min(_AHEAD_BYTES, end - at), _MADV_POPULATE_WRITE) != 0:
            return  # a kernel that does not know how: then each page is found when it is written


def _huge_pages(address: int, size: int) -> tuple[int, int]:
    """From where to where there are huge pages in this range; an empty range where that is not worth it."""
    if size < 2 * HUGE_PAGE_BYTES:
        return 0, 0
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, (address + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
