"""The grid's time moves on evenly, whatever the wall clock does."""

import asyncio
import time
from contextlib import closing
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.adapters.clock import Anchor, GridClock, last_stored_ms, load_anchor, save_anchor_forever
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.ports import Batch, EventRow
from distributed_grid.state_dir import StateDir


class Machine:
    """A wall clock that can be set, a boot that grows older, and reboots."""

    def __init__(self, wall: int = 1_000_000) -> None:
        self.wall, self.boot, self.boots = wall, 500, 0

    def clock(self, anchor: Anchor | None = None, known_ms: int = 0) -> GridClock:
        return GridClock(
            anchor,
            known_ms=known_ms,
            wall=lambda: self.wall,
            boottime=lambda: self.boot,
            boot_id=lambda: f"boot-{self.boots}",
        )

    def passes(self, ms: int) -> None:
        self.wall += ms
        self.boot += ms

    def reboots(self) -> None:
        self.boots, self.boot = self.boots + 1, 0


def test_a_new_clock_begins_at_the_wall_clock() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.passes(250)
    assert clock.now_ms() == 1_000_250
    assert clock.wall_offset_ms() == 0


def test_setting_the_wall_clock_does_not_show() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall -= 900_000
    machine.passes(10)
    assert clock.now_ms() == 1_000_010
    assert clock.wall_offset_ms() == -900_000
    machine.wall += 5_000_000
    assert clock.now_ms() == 1_000_010
    assert clock.wall_offset_ms() == 4_100_000


def test_a_restart_on_the_same_boot_continues_the_line() -> None:
    machine = Machine()
    anchor = machine.clock().anchor()
    machine.wall = 7
    machine.passes(3000)
    assert machine.clock(anchor).now_ms() == 1_003_000
    assert machine.clock(machine.clock(anchor).anchor()).now_ms() == 1_003_000


def test_after_a_reboot_the_later_of_wall_and_last_known_holds() -> None:
    machine = Machine()
    anchor = machine.clock().anchor()
    machine.reboots()
    machine.wall = 999
    assert machine.clock(anchor).now_ms() == 1_000_000
    machine.wall = 2_000_000
    assert machine.clock(anchor).now_ms() == 2_000_000


def test_after_a_power_failure_time_does_not_go_back_behind_what_was_stored(tmp_path: Path) -> None:
    machine = Machine()
    clock = machine.clock()
    saved = clock.anchor()  # at the start; there was no orderly end
    machine.passes(20_000)
    with closing(SqliteStore(tmp_path / "grid.db")) as store:
        assert last_stored_ms(store) == 0
        store.commit(Batch(events=[EventRow(1, clock.now_ms(), "granted", "", "", "", "", b"{}")]))
        machine.reboots()
        machine.wall = 999
        assert machine.clock(saved, known_ms=last_stored_ms(store)).now_ms() == 1_020_000


def test_the_anchor_is_saved_again_and_again(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path)
    state_dir.create()

    async def story() -> None:
        saving = asyncio.create_task(save_anchor_forever(state_dir, GridClock(), seconds=0.01))
        async with asyncio.timeout(30):
            first = None
            while first is None:
                await asyncio.sleep(0.01)
                first = load_anchor(state_dir)
            while load_anchor(state_dir) == first:
                await asyncio.sleep(0.01)
        saving.cancel()

    asyncio.run(story())


def test_a_boot_younger_than_its_anchor_counts_as_a_new_one() -> None:
    machine = Machine()
    anchor = machine.clock().anchor()
    machine.boot = 3
    assert machine.clock(anchor).now_ms() == 1_000_000


deeds = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(0, 10**6)),
        st.tuples(st.just("set"), st.integers(0, 10**7)),
        st.tuples(st.sampled_from(["restart", "reboot"]), st.just(0)),
    )
)


@given(deeds)
def test_time_never_goes_back_and_passes_evenly_within_a_boot(deeds: list[tuple[str, int]]) -> None:
    machine = Machine()
    clock = machine.clock()
    for deed, amount in deeds:
        before = clock.now_ms()
        if deed == "pass":
            machine.passes(amount)
            assert clock.now_ms() == before + amount
        elif deed == "set":
            machine.wall = amount
            assert clock.now_ms() == before
        else:
            anchor = clock.anchor()
            if deed == "reboot":
                machine.reboots()
            clock = machine.clock(anchor)
            assert clock.now_ms() >= before
            assert deed == "reboot" or clock.now_ms() == before


def test_the_real_clock_is_close_to_the_wall_and_moves() -> None:
    clock = GridClock()
    first = clock.now_ms()
    time.sleep(0.02)
    assert 20 <= clock.now_ms() - first < 5000
    assert abs(clock.wall_offset_ms()) < 1000
    again = GridClock(clock.anchor())
    assert 0 <= again.now_ms() - first < 5000
