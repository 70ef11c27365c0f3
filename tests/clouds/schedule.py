"""Seeded schedules: what people want and what goes wrong, drawn from a seed.

Lost answers, machines that are listed late, no capacity, throttling, terminations that fail or take long, machines that
never join or are taken away, a control plane that dies between any two steps and stays down, a wall clock that is set,
machines of others and of other grids beside. At the end everything is asked to end, nothing goes wrong any more, and
ten minutes later nothing may exist.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from distributed_grid.domain.events import (
    Event,
    LeaseAsked,
    LeaseReleased,
    WorkerDrainRequested,
    WorkerTerminationRequested,
)
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import WorkerRules
from distributed_grid.errors import GridError
from distributed_grid.ports import WorkerOrder
from distributed_grid.scheduling.scaling.budget import HOUR_MS
from tests.clouds.stand_ins import STAND_INS
from tests.clouds.world import BrokenPromiseError, CloudWorld, ScheduleReport
from tests.support.worker_model import GRID_ID

OTHER_GRIDS = (f"{GRID_ID}1", "grid-2", "grid-")
NO_FAULTS = ("", "", "", "", "")
CREATE_FAULTS = (
    *NO_FAULTS,
    *("lose_before", "lose_after", "lose_after", "throttle", "no_capacity", "quota", "refuse", "fail", "late", "late"),
)
OTHER_FAULTS = (*NO_FAULTS, "lose_before", "lose_after", "throttle", "fail")
STEPS, END_MS = 40, 600_000


class CloudSchedule:
    """One schedule: the same seed of the same provider is the same schedule."""

    def __init__(self, provider: str, seed: int) -> None:
        self.random = Random(f"{provider} {seed}")
        self.is_long = self.random.random() < 0.4
        self.rules = self._draw_rules(provider)
        report, is_promised = ScheduleReport(provider, seed), self.random.random() < 0.85
        self.world = CloudWorld(report, self.rules, self.random, STAND_INS[provider], is_promised=is_promised)
        self.world.kills_at_worst = self.is_long and self.random.random() < 0.6
        self.world.plane.wall_offset_ms = self.random.choice([0, 0, -1, 1, -8]) * HOUR_MS
        self._set_lags()
        self._leases = 0

    def _draw_rules(self, provider: str) -> WorkerRules:
        """Budgets and times; those of long schedules are short of money."""
        choose = self.random.choice
        days = [300_000, 500_000, 900_000] if self.is_long else [None, 500_000, 1_500_000, 4_000_000]
        cores = choose([6_000, 12_000, 24_000]) if self.random.random() < 0.4 else None
        return WorkerRules(
            budget_per_hour_micro=choose([None, 250_000, 1_300_000]),
            budget_per_day_micro=choose([*days, None]) if cores else choose(days),
            consistency_ms=choose([30_000, 60_000]),
            core_hour_budgets={provider: cores} if cores else {},
        )

    def run(self) -> ScheduleReport:
        """Carry the schedule out."""
        world = self.world
        try:
            for _ in range(STEPS):
                self._step()
            self._end()
        except BrokenPromiseError as broken:
            world.report.broken = str(broken)
        finally:
            world.report.counts["machines"] = len(world.cloud.machines())
            world.report.counts["calls"] = len(world.cloud.faults.calls)
            world.cloud.close()
        return world.report

    def _step(self) -> None:
        acts: list[tuple[int, int, Callable[[], None]]] = [
            (8, 8, self._want),
            (4, 2, self._script_faults),
            (4, 2, self._lease),
            (2, 1, self._release),
            (3, 1, self._ask_to_end),
            (3, 2, self._kill_control_plane),
            (2, 1, self._take_away),
            (1, 1, self._set_wall_clock),
            (1, 1, self._set_lags),
            (1, 1, self._add_other),
            (1, 1, self._add_stray),
            (6, 8, self._wait),
        ]
        drawn = [act for usual, long, act in acts for _ in range(long if self.is_long else usual)]
        act = self.random.choice(drawn)
        self.world.report.counts[act.__name__.strip("_").replace("_", " ")] += 1
        act()
        self.world.pass_time(self.random.choice([0, 1_000, 5_000]))

    def _end(self) -> None:
        """Everything is asked to end, nothing goes wrong any more: ten minutes later nothing may exist."""
        world = self.world
        world.note("the end: everything is asked to end")
        world.cloud.faults.clear()
        world.is_ending, world.down_until = True, min(world.down_until, world.plane.now)
        for worker_id in list(world.plane.ledger.workers):
            world.plane.terminate(worker_id)
        world.pass_time(END_MS // 2)
        world.pass_time(END_MS - END_MS // 2)
        world.must_be_empty()

    # ------------------------------------------------------------------ what people do

    def _want(self) -> None:
        plane = self.world.plane
        kind, count = self.random.choice(["cpu", "cpu", "cpu", "gpu"]), self.random.choice([1, 1, 2, 4])
        if self.world.is_up:
            made = [plane.want(kind) for _ in range(count)]
            self.world.note(f"want {count} {kind}: {', '.join(one for one in made if one in plane.ledger.workers)}")

    def _lease(self) -> None:
        """Somebody gets a lease on a worker that has joined."""
        plane = self.world.plane
        joined = [one for one in plane.ledger.workers.values() if one.state is WorkerState.JOINED]
        if not joined or not self.world.is_up:
            return
        node = self.random.choice(joined).node
        self._leases += 1
        request = Request(id=f"lease-{self._leases}", user="ada", ask=Amounts(500, 1 << 28), require=(node,), wait_ms=0)
        self._try(LeaseAsked(request), f"{request.id} on {node}")

    def _release(self) -> None:
        if self.world.is_up and self.world.plane.ledger.leases:
            lease = self.random.choice(list(self.world.plane.ledger.leases))
            self._try(LeaseReleased(lease, "ada"), f"{lease} released")

    def _ask_to_end(self) -> None:
        """Somebody ends a worker, as `grid workers terminate` does; with leases that is refused unless it is forced."""
        plane = self.world.plane
        if not self.world.is_up or not plane.ledger.workers:
            return
        worker = self.random.choice(list(plane.ledger.workers.values()))
        force = self.random.random() < 0.3
        event: Event = WorkerTerminationRequested(worker.id, "ada", "asked", plane.wall_ms, force=force)
        if worker.state in (WorkerState.JOINED, WorkerState.DRAINING) and not force:
            event = WorkerDrainRequested(worker.id, "ada", "asked")
        self._try(event, f"{'force the' if force else 'ask for the'} end of {worker.id}")

    def _try(self, event: Event, text: str) -> None:
        try:
            self.world.plane.handle(event)
        except GridError as refusal:
            text = f"{text}: refused, {refusal}"
        self.world.note(text)

    # ------------------------------------------------------------------ what goes wrong

    def _script_faults(self) -> None:
        choose, count = self.random.choice, self.random.randint
        faults = {"create": [choose(CREATE_FAULTS) for _ in range(count(0, 4))]}
        for method in ("terminate", "describe", "list", "offers"):
            faults[method] = [choose(OTHER_FAULTS) for _ in range(count(0, 2))]
        self.world.cloud.faults.waiting = faults
        self.world.report.counts.update(fault for found in faults.values() for fault in found if fault)
        self.world.note(f"faults: {faults}")

    def _kill_control_plane(self) -> None:
        """The control plane dies: in a call, after a list, or anywhere; and may stay down."""
        world = self.world
        if not world.is_up:
            return
        way = self.random.choice(["recorded", "called", "listed", "anywhere"])
        down_ms = self.random.choice([0, 0, 0, 20_000, 120_000, 900_000, 2_400_000])
        world.note(f"the control plane dies ({way}) for {down_ms / 1000:g} s")
        if way in ("recorded", "called"):
            world.plane.perform(dies_at=way)
        elif way == "listed":
            world.list_cloud()
        world.restart(down_ms)
        world.check()

    def _take_away(self) -> None:
        """The cloud ends a machine by itself, as it does with spot ones."""
        alive = [one for one in self.world.existing() if one.worker_id in self.world.plane.ordered]
        if alive:
            one = self.random.choice(alive)
            self.world.note(f"{one.worker_id} is taken away")
            self.world.cloud.take_away(one.instance)

    def _set_wall_clock(self) -> None:
        self.world.count_cost()
        hours = self.random.choice([-26, -2, 1, 3, 25])
        self.world.plane.wall_offset_ms += hours * HOUR_MS
        self.world.note(f"the wall clock is set by {hours} h")

    def _set_lags(self) -> None:
        """For how long machines are not listed, and how long they take to end; sometimes longer than was promised."""
        longest = self.rules.consistency_ms / 1000 - 1 if self.world.is_promised else 60
        cloud = self.world.cloud
        cloud.visible_after = max(self.random.choice([0, 0, 5, longest / 2, longest]), 0)
        cloud.stops_in = self.random.choice([0, 0, 20, 100, 200])
        self.world.note(f"listed after {cloud.visible_after:g} s, ended in {cloud.stops_in:g} s")

    def _add_other(self) -> None:
        """A machine that is nobody's, or of a grid whose id is nearly ours."""
        if self.random.random() < 0.5:
            self.world.foreign.add(self.world.cloud.add_foreign())
            return
        worker_id = f"worker-other-{len(self.world.others) + 1}"
        self.world.others[worker_id] = 0.0
        self.world.others[worker_id] = self._order_directly(worker_id, self.random.choice(OTHER_GRIDS))

    def _add_stray(self) -> None:
        """A machine of this grid that no row stands for: one that was made before the ledger was lost."""
        if not self.world.plane.ledger.spending:
            return  # a provider that was never used is not listed
        worker_id = f"worker-stray-{len(self.world.strays) + 1}"
        self.world.strays.add(worker_id)
        self._order_directly(worker_id, GRID_ID)

    def _order_directly(self, worker_id: str, grid_id: str) -> float:
        """Make a machine without the control plane; for how long it lives."""
        faults = self.world.cloud.faults
        waiting, faults.waiting = faults.waiting, {}
        try:
            provider = self.world.cloud.provider()
            offer = next(one for one in provider.offers() if not one.unavailable)
            order = WorkerOrder(worker_id, grid_id, offer, offer.resources, {"GRID_JOIN": f"token-of-{worker_id}"})
            provider.create(order)
        finally:
            faults.waiting = waiting
        self.world.note(f"{worker_id} of {grid_id} is there")
        return offer.lifetime_seconds

    def _wait(self) -> None:
        choices = [10_000, 35_000, 70_000, 70_000, 320_000, 1_000_000, HOUR_MS, 3 * HOUR_MS]
        if self.is_long:
            choices = [70_000, 1_200_000, HOUR_MS, 2 * HOUR_MS, 4 * HOUR_MS, 8 * HOUR_MS]
        self.world.pass_time(self.random.choice(choices))
