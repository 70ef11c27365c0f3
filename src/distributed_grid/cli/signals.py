"""Signals of long commands: handlers for a while, and the hang-up of the terminal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from distributed_grid.cli.standard_streams import HungUp

SignalHandler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def handled_signals(handler: SignalHandler, *numbers: int) -> Iterator[None]:
    """Handle signals meanwhile. One that is ignored stays ignored: `nohup`, or a background job of a script."""
    before = {}
    try:
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def raise_keyboard_interrupt(number: int, stack: FrameType | None) -> None:
    """Handler that treats a signal as Ctrl-C."""
    raise KeyboardInterrupt


class HangupWatch:
    """SIGHUP during a command that has a job: noted while the job is submitted, which is not cut short, and raised as
    HungUp within `may_leave`."""

    def __init__(self) -> None:
        self._came = False
        self._raises = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with handled_signals(self._on_hangup, signal.SIGHUP):
            yield

    @contextlib.contextmanager
    def may_leave(self) -> Iterator[None]:
        """Raise HungUp in the body, once; at its beginning where the signal has come before."""
        self._raises = True
        try:
            if self._came:
                raise HungUp
            yield
        finally:
            self._raises = False

    def _on_hangup(self, number: int, stack: FrameType | None) -> None:
        self._came = True
        if self._raises:
            self._raises = False
            raise HungUp
