"""Boot clock and boot id: pids, holds and measurements are valid within one boot."""

from __future__ import annotations

import time


def boot_ms() -> int:
    """Milliseconds since the machine started, time asleep included."""
    return boot_ns() // 1_000_000


def boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Identity of this boot of the machine: a pid and start time mean nothing in another."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
