"""Campaign of wrong wall clocks: each decision that depends on time, under jumps of an hour, 40 days and a year.

A jump comes while the machine is on, or while it is off. Nothing is deleted, lost or refused for good by it, and when
the clock is right again all is as before. Really old rows still go.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509

from distributed_grid.adapters.clock import AgeClock, Anchor, GridClock
from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.adapters.stores.minute_store import MinuteStore
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.adapters.stores.task_history import KEPT_MS, TaskHistory
from distributed_grid.agent.files.attempt_files import remove_expired
from distributed_grid.agent.files.job_dir import CONTROL, EXIT, NOTICE, make_root
from distributed_grid.agent.files.job_signals import give_notice
from distributed_grid.api.answers.common import Viewer
from distributed_grid.control.grid import KEEP_HISTORY_MS, Grid
from distributed_grid.domain.clock_jumps import DAY_MS, HOUR_MS
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Spending, Worker, WorkerResources, WorkerRules
from distributed_grid.ports import Batch, EventRow
from distributed_grid.prediction.task_runs import TaskRun
from distributed_grid.prediction.warm_pool import SLOT_MS, WarmPool
from distributed_grid.scheduling.scaling.budget import budget_state, settle
from distributed_grid.server.access.tls import make_certificate
from distributed_grid.server.access.tokens import TokenStore, UserToken, bearer_text, hash_of
from distributed_grid.server.services.jobs import trim_content_forever
from distributed_grid.trees.content_store import ContentStore

JUMPS = [sign * size for size in (HOUR_MS, 40 * DAY_MS, 365 * DAY_MS) for sign in (1, -1)]
NOON_MS = 20_000 * DAY_MS + 12 * HOUR_MS
DOLLAR = 1_000_000
pytestmark = pytest.mark.parametrize("by_ms", JUMPS)


class Machine:
    """The clocks of one machine, and those of a control plane on it, which start anew with each boot."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.wall, self.boot, self.boots = NOON_MS, HOUR_MS, 0
        self._anchor: Anchor | None = None
        self._start()

    def _start(self) -> None:
        def wall() -> int:
            return self.wall

        def boottime() -> int:
            return self.boot

        def boot_id() -> str:
            return f"boot-{self.boots}"

        self.clock = GridClock(self._anchor, wall=wall, boottime=boottime, boot_id=boot_id)
        self.ages = AgeClock(self._folder / "age.json", wall=wall, boottime=boottime, boot_id=boot_id)
        self.ages.cutoff_ms(self.clock.now_ms(), 0)

    def passes(self, duration_ms: int) -> None:
        self.wall += duration_ms
        self.boot += duration_ms

    def reboots(self, off_ms: int, wrong_by_ms: int = 0) -> None:
        self._anchor = self.clock.anchor()
        self.ages.save()
        self.boots, self.boot = self.boots + 1, 30_000
        self.wall += off_ms + self.boot + wrong_by_ms
        self._start()

    def wrong_clocks(self, by_ms: int) -> Iterator[str]:
        """Each situation in which something is decided: after the clock was wrong while on, and while off."""
        self.wall += by_ms
        yield "the clock is wrong"
        self.passes(20_000)
        self.wall -= by_ms
        yield "it is right again"
        self.reboots(HOUR_MS, by_ms)
        yield "a boot under a wrong clock"
        self.passes(60_000)
        self.wall -= by_ms
        yield "it was set right"
        self.passes(12 * HOUR_MS)
        yield "half a day later"
        self.reboots(HOUR_MS)
        yield "a boot under the right clock"

    def cutoff_ms(self, keep_ms: int) -> int:
        return self.ages.cutoff_ms(self.clock.now_ms(), keep_ms)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_output_of_a_job_is_deleted_until_a_month_has_passed(machine: Machine, by_ms: int, tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    make_root(str(root))
    for path in (root / "job.1", root / CONTROL / "job.1"):
        path.mkdir()
    (root / "job.1" / "stdout").write_text("kept")
    (root / CONTROL / "job.1" / EXIT).write_text("{}")

    def sweep() -> None:
        if machine.ages.may_delete():
            remove_expired(root, age_ms=machine.ages.state.age_ms)

    sweep()
    for situation in machine.wrong_clocks(by_ms):
        sweep()
        assert (root / "job.1" / "stdout").exists(), situation
    machine.passes(31 * DAY_MS)
    sweep()
    assert not (root / "job.1").exists()


def test_no_row_of_the_history_is_folded_until_a_month_has_passed(machine: Machine, by_ms: int, tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "grid.db")) as store:
        store.commit(Batch(events=[EventRow(1, machine.clock.now_ms(), "granted", "ana", "l1", "", "", b"{}")]))
        for situation in machine.wrong_clocks(by_ms):
            assert store.summarise(before_ms=machine.cutoff_ms(KEEP_HISTORY_MS)) == 0, situation
        machine.passes(31 * DAY_MS)
        assert store.summarise(before_ms=machine.cutoff_ms(KEEP_HISTORY_MS)) == 1


def test_no_run_is_forgotten_by_the_predictor_until_ninety_days_have_passed(
    machine: Machine, by_ms: int, tmp_path: Path
) -> None:
    with closing(TaskHistory(tmp_path / "predictions.db")) as history:
        run = TaskRun(
            task_id="task-1",
            attempt=1,
            user="ana",
            key="sleep #",
            features=(),
            memory_bytes=5,
            ended_at_ms=machine.clock.now_ms(),
        )
        assert history.record([run]) == [run]
        for situation in machine.wrong_clocks(by_ms):
            assert history.fold(machine.cutoff_ms(KEPT_MS)) == 0, situation
        assert history.runs("ana", "sleep #", 9) == [run]
        machine.passes(91 * DAY_MS)
        assert history.fold(machine.cutoff_ms(KEPT_MS)) == 1


def test_no_minute_of_usage_is_deleted_until_a_day_has_passed(machine: Machine, by_ms: int, tmp_path: Path) -> None:
    store = MinuteStore(tmp_path / "history.db", row_bytes=1)
    with closing(store):
        began_ms = machine.clock.now_ms()
        store.write([(began_ms, "gpu1", b"x")], before_ms=0)
        for situation in machine.wrong_clocks(by_ms):
            if situation == "half a day later":
                break
            store.write([], before_ms=machine.cutoff_ms(DAY_MS + machine.boots * DAY_MS))
            assert store.load(began_ms, began_ms) == [("gpu1", b"x")], situation
        machine.passes(3 * DAY_MS)
        store.write([], before_ms=machine.cutoff_ms(DAY_MS))
        assert store.load(began_ms, began_ms) == []


def test_the_learning_of_the_load_goes_on(machine: Machine, by_ms: int) -> None:
    pool, learned = WarmPool(), 0
    for _ in machine.wrong_clocks(by_ms):
        for _ in range(3):
            machine.passes(SLOT_MS)
            learned += pool.observe(machine.clock.now_ms(), 1000, 1) is not None
    assert learned >= 15, "each slot ends one"


def test_a_budget_neither_refuses_for_good_nor_pays_twice(machine: Machine, by_ms: int) -> None:
    rules = WorkerRules(budget_per_day_micro=40 * DOLLAR)  # a boot a year later cannot tell how long the worker ran
    worker = Worker(
        id="w1",
        provider="aws",
        worker_type="cpu",
        resources=WorkerResources(2000, 1 << 30),
        created_at_ms=NOON_MS,
        price_micro=DOLLAR,
        state=WorkerState.JOINED,
        booted_at_ms=NOON_MS,
        joined_at_ms=NOON_MS,
    )
    ledger = Ledger(
        [rules, Spending(provider="aws", day=NOON_MS // DAY_MS, spent_micro=5 * DOLLAR, as_of_ms=NOON_MS), worker]
    )
    for situation in machine.wrong_clocks(by_ms):
        if situation == "half a day later":
            break
        ledger.apply([settle(ledger, "aws", machine.clock.now_ms(), machine.wall)])
        state = budget_state(ledger, machine.clock.now_ms(), machine.wall)
        assert (
            state.refusal(
                Worker(
                    id="w2",
                    provider="aws",
                    worker_type="cpu",
                    resources=WorkerResources(),
                    created_at_ms=NOON_MS,
                    price_micro=DOLLAR // 100,
                )
            )
            is None
        ), situation
        if not situation.startswith("a boot"):
            assert state.spent_micro >= 5 * DOLLAR, f"{situation}: what was spent today is spent"
        assert state.until_midnight_ms <= 2 * DAY_MS
    assert state.day == NOON_MS // DAY_MS
    machine.passes(2 * DAY_MS)
    after = budget_state(ledger, machine.clock.now_ms(), machine.wall)
    assert after.day == machine.wall // DAY_MS
    assert after.spent_micro < 24 * DOLLAR


def test_a_token_that_is_valid_works_when_the_clock_is_right(machine: Machine, by_ms: int, tmp_path: Path) -> None:
    tokens = TokenStore(tmp_path, lambda: machine.wall)
    tokens.add(UserToken(id="0123456789ab", hash=hash_of("secret"), user="ana", expires_ms=machine.wall + 5 * DAY_MS))
    for number, situation in enumerate(machine.wrong_clocks(by_ms)):
        tokens.add(UserToken(id=f"00000000000{number}", hash=hash_of("other"), user="bo"))  # each write sweeps
        if "wrong" not in situation:
            assert tokens.user_of(bearer_text("0123456789ab", "secret")) is not None, situation


def test_a_certificate_made_under_any_clock_is_valid_under_any_other(machine: Machine, by_ms: int) -> None:
    made = x509.load_pem_x509_certificate(make_certificate("grid", ()).certificate)
    for _ in machine.wrong_clocks(by_ms):
        now = datetime.fromtimestamp(machine.wall / 1000, UTC)
        assert made.not_valid_before_utc < now < made.not_valid_after_utc


def test_a_second_notice_leaves_the_time_of_the_first(by_ms: int, tmp_path: Path) -> None:
    make_root(str(tmp_path))
    (tmp_path / "job.1").mkdir()
    assert give_notice(str(tmp_path), "job.1", "the owner is back", 60_000) == 60_000
    path = tmp_path / "job.1" / NOTICE
    notice = json.loads(path.read_bytes())
    path.write_text(json.dumps(notice | {"deadline": notice["deadline"] - by_ms / 1000}))  # as the clock now sees it
    assert 50_000 < give_notice(str(tmp_path), "job.1", "the owner is back", 120_000) <= 60_000


def test_shipped_contents_are_not_trimmed_while_the_clock_may_be_wrong(
    machine: Machine, by_ms: int, tmp_path: Path
) -> None:
    machine.wall += by_ms
    content, asked = ContentStore(tmp_path / "content"), asyncio.Event()

    def may_delete() -> bool:
        asked.set()
        return machine.ages.may_delete()

    async def story() -> None:
        grid = Grid(InMemoryStore(), machine.clock)  # not started: a question would wait for ever
        trimming = asyncio.create_task(trim_content_forever(grid, content, may_delete))
        await asked.wait()
        trimming.cancel()
        await grid.stop()

    asyncio.run(story())
    assert not machine.ages.may_delete()


def test_the_grids_time_never_jumps_while_on_and_time_off_counts_afterwards(machine: Machine, by_ms: int) -> None:
    began_ms, situations = machine.clock.now_ms(), machine.wrong_clocks(by_ms)
    for situation in situations:
        if situation == "a boot under a wrong clock":
            break
        assert machine.clock.now_ms() - began_ms <= 20_000, situation
    for _ in situations:
        before_ms, boots = machine.clock.now_ms(), machine.boots
    last_ms = machine.clock.now_ms()
    machine.reboots(HOUR_MS)
    passed_ms = machine.clock.now_ms() - last_ms
    assert HOUR_MS <= passed_ms < HOUR_MS + 60_000, "a clock that was ahead once does not end the counting of time off"
    assert before_ms <= last_ms
    assert boots == 2


def test_times_are_shown_as_they_were(machine: Machine, by_ms: int) -> None:
    row_ms, was = machine.clock.now_ms(), datetime.fromtimestamp(machine.wall / 1000, UTC)
    machine.passes(60_000)
    for situation in machine.wrong_clocks(by_ms):
        if "wrong" in situation:
            continue
        steps = [(step.until_ms, step.offset_ms) for step in machine.clock.steps]
        shown = Viewer(machine.clock.wall_offset_ms(), earlier=steps).time(row_ms)
        assert shown is not None
        assert abs((datetime.fromisoformat(shown) - was).total_seconds()) < 61, situation
