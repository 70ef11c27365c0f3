"""Timers on the boot clock and the signals of spawner and shims.

The boot clock continues while the machine sleeps; waiting on it costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_prctl: Final = _LIBC.prctl  # looked up here, once, before any fork
_timerfd_create: Final = _LIBC.timerfd_create  # in `os` only since Python 3.13
_timerfd_settime: Final = _LIBC.timerfd_settime
_Setting: Final = ctypes.c_long * 4  # struct itimerspec
_TFD_ABSTIME: Final = 1
KILL_SIGNAL: Final = signal.SIGRTMIN + 3
"""Signal at the end of a stop's grace."""
STOP_SIGNALS: Final = {  # no number has another meaning for older shims
    ("cancelled", False): signal.SIGRTMIN,
    ("preempted", False): signal.SIGRTMIN + 1,
    ("reclaimed", False): signal.SIGRTMIN + 2,
    ("over_limit", True): signal.SIGRTMIN + 4,
    ("over_limit", False): signal.SIGRTMIN + 5,
}
"""Signals by ending and `is_disk_overrun` that stop an attempt without a file, so that a full disk changes nothing."""
HANDLED_SIGNALS: Final = frozenset(
    (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, *STOP_SIGNALS.values(), KILL_SIGNAL)
)
IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def become_subreaper() -> None:
    """Make orphans below this process its own children, so that their deaths wake it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_parent_death(signum: int) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def install_signal_handlers() -> None:
    """Handle the signals of a shim, and reset every other one to its default.

    Done once in the spawner and inherited: in a fresh fork it would cost a good part of a millisecond.
    """
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *IGNORED_BY_PYTHON}:
        # The number of a handled signal arrives through the wake-up descriptor.
        signal.signal(signum, (lambda *_: None) if signum in HANDLED_SIGNALS else signal.SIG_DFL)


class DeadlineTimer:
    """Waits for a signal, a child, or a time; the time continues while the machine sleeps."""

    def __init__(self) -> None:
        self.received: set[int] = set()
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._timer = -1
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def wait(self, until_boot_ms: int, at_most_ms: int | None = None) -> None:
        """Wait until that time (0: no limit), a signal or a child; and no longer than `at_most_ms` of being awake."""
        if until_boot_ms or self._timer >= 0:
            if self._timer < 0:
                self._timer = _timerfd_create(time.CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC)
                self._poll.register(self._timer, select.POLLIN)
            seconds, rest = divmod(until_boot_ms, 1000)
            _timerfd_settime(self._timer, _TFD_ABSTIME, _Setting(0, 0, seconds, rest * 1_000_000), None)
        for fd, _ in self._poll.poll(at_most_ms):
            if fd == self._woken:
                self.received.update(os.read(fd, 512))
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 8)

    def has_received(self, signum: int) -> bool:
        """True if that signal has come since the beginning; forgets every signal that has."""
        with contextlib.suppress(BlockingIOError):
            self.received.update(os.read(self._woken, 512))
        came = signum in self.received
        self.received.clear()
        return came
