"""The end of a machine on the machine itself: the earliest announced end, notices, stops in time, reports."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from distributed_grid.agent.machine_end import CONTROL_PLANE, METADATA, SIGNAL, MachineEnd
from distributed_grid.wire import AnnouncedEnd


@dataclass
class Command:
    attempt_id: str
    grace_ms: int = 5_000
    stopping: bool = False


@dataclass
class Work:
    """Attempts in virtual time, and what was done to them."""

    now: int = 1_000_000
    commands: list[Command] = field(default_factory=list)
    notices: dict[str, tuple[str, int]] = field(default_factory=dict)
    stopped: dict[str, tuple[int, int]] = field(default_factory=dict)
    failing: int = 0

    def running(self) -> list[Command]:
        return self.commands

    def give_notice(self, attempt_id: str, why: str, in_ms: int) -> None:
        assert attempt_id not in self.notices or self.notices[attempt_id][1] > self.now + in_ms, "told once"
        self.notices[attempt_id] = (why, self.now + in_ms)

    def withdraw_notice(self, attempt_id: str) -> None:
        self.notices.pop(attempt_id, None)

    async def stop(self, attempt_id: str, why: str, grace_ms: int) -> None:
        if self.failing:
            self.failing -= 1
            raise OSError("no")
        self.stopped[attempt_id] = (self.now, grace_ms)
        next(one for one in self.commands if one.attempt_id == attempt_id).stopping = True


class Machine:
    def __init__(self, *commands: Command) -> None:
        self.work = Work(commands=list(commands))
        self.changes = 0
        self.end = MachineEnd(self.work, lambda: self.work.now, self._changed)
        self.begun = self.work.now

    def _changed(self) -> None:
        self.changes += 1

    def run(self, seconds: float) -> None:
        """What its loop does in so many seconds."""
        for _ in range(round(2 * seconds)):
            asyncio.run(self.end.check())
            self.work.now += 500

    def after(self, ms: int) -> int:
        return self.begun + ms


def test_attempts_are_told_at_once_and_stopped_so_that_their_grace_is_over_in_time() -> None:
    machine = Machine(Command("quick"), Command("slow", grace_ms=60_000), Command("endless", grace_ms=10**9))
    machine.end.announce(METADATA, AnnouncedEnd("spot notice", 120_000))
    machine.run(1)
    why = "this machine is taken away: spot notice"
    assert machine.work.notices["quick"] == (why, machine.after(85_000))
    assert machine.work.notices["slow"] == (why, machine.after(30_000))
    assert machine.work.stopped == {"endless": (machine.after(0), 90_000)}
    machine.run(100)
    assert machine.work.stopped["slow"] == (machine.after(30_000), 60_000)
    assert machine.work.stopped["quick"] == (machine.after(85_000), 5_000)


def test_what_starts_later_is_told_too() -> None:
    machine = Machine()
    machine.end.announce(SIGNAL, AnnouncedEnd("SIGTERM", 60_000))
    machine.run(10)
    machine.work.commands.append(Command("late"))
    machine.run(1)
    assert machine.work.notices["late"][1] == machine.after(40_000)


def test_the_earliest_end_counts_and_later_words_of_one_source_change_nothing() -> None:
    machine = Machine(Command("job"))
    machine.end.announce(CONTROL_PLANE, AnnouncedEnd("lifetime", 600_000))
    machine.end.announce(METADATA, AnnouncedEnd("spot notice", 120_000))
    machine.run(1)
    assert machine.end.end is not None
    assert machine.end.end.why == "spot notice"
    changes = machine.changes
    for ms in (119_000, 118_500, 300_000):
        machine.end.announce(METADATA, AnnouncedEnd("spot notice", ms))
    assert machine.changes == changes
    machine.end.announce(METADATA, AnnouncedEnd("spot notice", 20_000))
    machine.run(1)
    assert machine.work.notices["job"][1] == machine.after(1000 + 20_000 - 5_000 - 5_000)


def test_every_heartbeat_says_how_much_time_is_left() -> None:
    machine = Machine()
    assert machine.end.reported() is None
    machine.end.announce(METADATA, AnnouncedEnd("spot notice", 120_000))
    machine.work.now += 60_000
    assert machine.end.reported() == AnnouncedEnd("spot notice", 60_000)
    machine.work.now += 600_000
    assert machine.end.reported() == AnnouncedEnd("spot notice", 0)


def test_what_the_control_plane_says_is_not_said_back() -> None:
    machine = Machine()
    machine.end.announce(CONTROL_PLANE, AnnouncedEnd("lifetime", 600_000))
    assert machine.end.reported() is None
    assert machine.end.is_known_to(CONTROL_PLANE)
    machine.end.announce(CONTROL_PLANE, AnnouncedEnd("lifetime", 1_200_000))
    assert machine.end.end is not None
    assert machine.end.end.ends_at_ms == machine.after(1_200_000), "it may give more time"


def test_a_recommendation_tells_no_attempt() -> None:
    machine = Machine(Command("job"))
    machine.end.announce(METADATA, AnnouncedEnd("rebalance"))
    machine.run(600)
    assert (machine.work.notices, machine.work.stopped) == ({}, {})
    assert machine.end.reported() == AnnouncedEnd("rebalance")
    machine.end.announce(METADATA, AnnouncedEnd("spot notice", 120_000))
    assert machine.end.reported() == AnnouncedEnd("spot notice", 120_000)


def test_a_notice_that_is_withdrawn_is_taken_back_from_the_attempts() -> None:
    machine = Machine(Command("job"))
    machine.end.announce(METADATA, None)
    assert machine.changes == 0
    machine.end.announce(METADATA, AnnouncedEnd("maintenance", 55_000))
    machine.run(2)
    assert "job" in machine.work.notices
    machine.end.announce(METADATA, None)
    machine.run(100)
    assert (machine.work.notices, machine.work.stopped) == ({}, {})
    said = machine.end.reported()
    assert said is not None
    assert (said.withdrawn, said.why) == (True, "the notice was withdrawn: maintenance")


def test_a_stop_that_fails_is_tried_again() -> None:
    machine = Machine(Command("job", grace_ms=10**9))
    machine.work.failing = 1
    machine.end.announce(SIGNAL, AnnouncedEnd("SIGTERM", 60_000))
    with pytest.raises(OSError, match="no"):
        machine.run(0.5)
    machine.run(1)
    assert "job" in machine.work.stopped


def test_the_agent_leaves_shortly_before_the_machine_ends() -> None:
    machine = Machine()
    machine.end.announce(SIGNAL, AnnouncedEnd("SIGTERM", 10_000))
    assert machine.end.end is not None
    assert machine.end.end.exit_at_ms == machine.after(9_000)
