"""Numbers straight from /proc, cheaply: reading one costs tens of microseconds, and no library is imported."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)  # user nice system, not idle iowait, irq softirq steal
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """The machine's memory, whatever control groups say; `available` is what can be had without swapping."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int


def memory(root: Path) -> MemoryInfo:
    """The machine's memory now."""
    text = contents(root / "proc/meminfo")
    free = sum(_kilobytes(text, name) or 0 for name in (b"MemFree", b"Buffers", b"Cached"))
    available = _kilobytes(text, b"MemAvailable")  # before Linux 3.14 there is none
    return MemoryInfo(
        total_bytes=1024 * (_kilobytes(text, b"MemTotal") or 0),
        available_bytes=1024 * (free if available is None else available),
        swap_total_bytes=1024 * (_kilobytes(text, b"SwapTotal") or 0),
    )


def _kilobytes(text: bytes, name: bytes) -> int | None:
    _, found, rest = (b"\n" + text).partition(b"\n%s:" % name)
    return int(rest.split(maxsplit=1)[0]) if found else None


def busy_ms(root: Path, cores: Collection[bytes]) -> int:
    """CPU time spent since boot, by anybody, on these cores (`cpu0` …)."""
    ticks = 0
    for line in contents(root / "proc/stat").splitlines():
        if not line.startswith(b"cpu"):
            break
        columns = line.split()
        if columns[0] in cores:
            ticks += sum(int(columns[at]) for at in _BUSY_COLUMNS)
    return ticks * TICK_MS


def resident_bytes() -> int:
    """Memory this process has in RAM."""
    return int(contents(Path("/proc/self/statm")).split()[1]) * PAGE_BYTES


def contents(file: Path) -> bytes:
    """All of a file of the kernel's; `OSError` when it cannot be read."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, _CHUNK):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)
