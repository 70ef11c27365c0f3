"""Whoever makes the grid write a line again and again neither fills the disk nor hides other lines."""

from __future__ import annotations

import io
import logging

from distributed_grid.log_rate_limit import BURST, REFILL_SECONDS, LogRateLimit


class Log:
    """A log with the limit, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.written = io.StringIO()
        handler = logging.StreamHandler(self.written)
        handler.addFilter(LogRateLimit(lambda: self.now))
        self._logger = logging.getLogger(__name__)
        self._logger.handlers, self._logger.propagate = [handler], False

    def refuse(self, node: str) -> None:
        self._logger.warning("a message of %s was refused", node)

    def stop(self) -> None:
        self._logger.warning("stopped")

    def lines(self) -> list[str]:
        return self.written.getvalue().splitlines()


def test_lines_of_one_statement_are_bounded_and_others_are_not_affected() -> None:
    log = Log()
    for n in range(10 * BURST):
        log.refuse(f"n{n}")
    log.stop()
    assert log.lines() == [*(f"a message of n{n} was refused" for n in range(BURST)), "stopped"]


def test_how_many_were_left_out_is_said_with_the_next_one() -> None:
    log = Log()
    for _ in range(BURST + 7):
        log.refuse("liar")
    log.now += REFILL_SECONDS
    log.refuse("gpu1")
    log.refuse("gpu1")
    assert log.lines()[BURST:] == ["a message of gpu1 was refused (7 such lines before it were left out)"]


def test_a_pause_makes_room_again() -> None:
    log = Log()
    for _ in range(BURST):
        log.refuse("gpu1")
    log.now += BURST * REFILL_SECONDS
    for _ in range(BURST):
        log.refuse("gpu1")
    assert len(log.lines()) == 2 * BURST
