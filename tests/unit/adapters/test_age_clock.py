"""The age clock survives restarts, and a file that is lost or damaged makes nothing old."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from distributed_grid.adapters.clock import AgeClock
from distributed_grid.domain.clock_jumps import CONFIRM_MS, DAY_MS, HOUR_MS

MONTH_MS = 30 * DAY_MS


class Machine:
    """The clocks of a machine and its file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "age.json"
        self.wall, self.boot, self.boots = 20_000 * DAY_MS, 500, 0

    def clock(self) -> AgeClock:
        return AgeClock(
            self.path,
            wall=lambda: self.wall,
            boottime=lambda: self.boot,
            boot_id=lambda: f"boot-{self.boots}",
        )

    def passes(self, duration_ms: int) -> None:
        self.wall += duration_ms
        self.boot += duration_ms


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_restart_continues_the_age_also_while_nothing_ran(machine: Machine) -> None:
    machine.clock()
    assert stat.S_IMODE(machine.path.stat().st_mode) == 0o600
    machine.passes(3 * DAY_MS)
    assert machine.clock().state.age_ms == 3 * DAY_MS


def test_a_pending_jump_survives_a_restart(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    clock = machine.clock()
    machine.wall += 40 * DAY_MS
    assert not clock.may_delete()
    assert [record.message for record in caplog.records if "jumped by +40 d" in record.message]
    machine.passes(60_000)
    again = machine.clock()
    assert not again.may_delete()
    machine.passes(CONFIRM_MS)
    assert again.may_delete()


def test_a_jump_while_nothing_ran_is_seen_by_the_next_start(machine: Machine) -> None:
    machine.clock()
    machine.wall += 40 * DAY_MS
    machine.passes(60_000)
    assert not machine.clock().may_delete()


def test_confirming_ends_the_wait_at_once_and_for_good(machine: Machine) -> None:
    clock = machine.clock()
    assert clock.confirm() is None
    machine.wall += 40 * DAY_MS
    clock.look()
    jump = clock.confirm()
    assert jump is not None
    assert jump.by_ms == 40 * DAY_MS
    assert clock.may_delete()
    assert machine.clock().may_delete()


@pytest.mark.parametrize("damage", ["lost", "empty", "cut", "changed", "garbage"])
def test_a_damaged_file_begins_anew_and_makes_nothing_old(machine: Machine, damage: str) -> None:
    clock = machine.clock()
    clock.cutoff_ms(machine.wall, MONTH_MS)
    machine.passes(50 * DAY_MS)
    assert clock.cutoff_ms(machine.wall, MONTH_MS) == machine.wall - MONTH_MS
    clock.save()
    content = machine.path.read_bytes()
    if damage == "lost":
        machine.path.unlink()
    else:
        spoilt = {
            "empty": b"",
            "cut": content[: len(content) // 2],
            "changed": content.replace(b'"age_ms":4', b'"age_ms":9'),
            "garbage": b"\x00" * 200,
        }[damage]
        assert spoilt != content
        machine.path.write_bytes(spoilt)
    again = machine.clock()
    assert again.state.age_ms == 0
    assert again.cutoff_ms(machine.wall, MONTH_MS) == 0
    machine.passes(MONTH_MS)
    assert again.cutoff_ms(machine.wall, MONTH_MS) <= machine.wall - MONTH_MS


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS, 40 * DAY_MS, -40 * DAY_MS, 365 * DAY_MS, -365 * DAY_MS])
def test_no_cutoff_follows_a_reboot_under_a_wrong_clock(machine: Machine, by_ms: int) -> None:
    """The grid's time steps forward with the wall clock; a row of yesterday stays a row of yesterday."""
    clock = machine.clock()
    clock.cutoff_ms(machine.wall, MONTH_MS)
    machine.passes(DAY_MS)
    row_ms = machine.wall
    machine.passes(HOUR_MS)
    clock.save()
    known_ms = machine.wall
    machine.boots, machine.boot, machine.wall = machine.boots + 1, 60_000, machine.wall + by_ms
    again = machine.clock()
    grid_ms = max(machine.wall, known_ms)
    for _ in range(20):
        assert again.cutoff_ms(grid_ms, MONTH_MS) <= row_ms
        machine.passes(DAY_MS)
        grid_ms += DAY_MS
    for _ in range(15):
        machine.passes(DAY_MS)
        grid_ms += DAY_MS
        cutoff_ms = again.cutoff_ms(grid_ms, MONTH_MS)
    assert row_ms < cutoff_ms <= grid_ms - MONTH_MS, "after a month it may go"


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "nowhere")
    clock = machine.clock()
    machine.passes(DAY_MS)
    clock.save()
    assert clock.look().age_ms == DAY_MS
