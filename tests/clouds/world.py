"""The world of one schedule: a control plane that may be down, a stand-in of a cloud, agents on its machines, and the
promises that are checked after every step."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from distributed_grid.domain.events import (
    Event,
    HeartbeatReceived,
    NodeDeclared,
    OutputsCollected,
    TimePassed,
    WallTimePassed,
    WorkerDrainRequested,
    WorkerTerminationRequested,
)
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerRules
from distributed_grid.ports import WorkerOrder
from distributed_grid.scheduling.scaling.budget import DAY_MS, HOUR_MS, MICRO, current_day
from tests.support.clouds.stand_in import CloudStandIn, Machine
from tests.support.worker_model import BEGIN_MS, GRID_ID, ControlPlaneModel

LONG_LIST_MS, IDLE_LIST_MS = 600_000, 300_000
SLICE_MS, LONG_SLICE_MS, LONG_MS = 5_000, 60_000, 400_000
StandInFactory = Callable[[Callable[[], float], Random, bool], CloudStandIn]
"""Makes a stand-in from a clock and a source of chance; whether it keeps its promises about lists."""


class BrokenPromiseError(AssertionError):
    """Something happened that must not."""


@dataclass
class Agent:
    """What runs on a machine: when it joins (None: never), and when it last reached the control plane."""

    machine: Machine
    joins_at: float | None
    heard_at: float


@dataclass
class ScheduleReport:
    """One schedule and the promise it broke, if any."""

    provider: str
    seed: int
    broken: str = ""
    history: list[str] = field(default_factory=list)
    counts: Tally[str] = field(default_factory=Tally)

    def __str__(self) -> str:
        return f"{self.provider} seed {self.seed}: {self.broken or 'every promise was kept'}"


class WatchedControlPlane(ControlPlaneModel):
    """A control plane whose every step is watched: who was ordered, and which workers it decides to end."""

    def __init__(
        self,
        rules: WorkerRules,
        stand_in: Callable[[Callable[[], float]], CloudStandIn],
        name: str,
        on_ended: Callable[[Event, Worker, list[str]], None],
    ) -> None:
        super().__init__(rules, stand_in, name)
        self.ordered: dict[str, Worker] = {}
        self._on_ended = on_ended

    def order_for(self, worker: Worker) -> WorkerOrder:
        self.ordered[worker.id] = worker
        return super().order_for(worker)

    def handle(self, event: Event) -> None:
        used = {
            worker.id: [lease.id for lease in self.ledger.leases_of(worker.node) if lease.holds]
            for worker in self.ledger.workers.values()
            if worker.state is not WorkerState.TERMINATING and self.ledger.leases_on.get(worker.node)
        }
        draining = {worker.id for worker in self.ledger.workers.values() if worker.state is WorkerState.DRAINING}
        super().handle(event)
        for worker_id, leases in used.items():
            worker = self.ledger.workers.get(worker_id)
            if not leases or worker is None or worker.state in (WorkerState.JOINED, WorkerState.BOOTING):
                continue
            if worker.state is WorkerState.TERMINATING or worker_id not in draining:
                self._on_ended(event, worker, leases)


class CloudWorld:
    """Everything that goes on in one schedule."""

    def __init__(
        self, report: ScheduleReport, rules: WorkerRules, random: Random, make: StandInFactory, *, is_promised: bool
    ) -> None:
        """`is_promised`: the cloud keeps the promises that `rules` make about its lists."""
        self.random = random
        self.rules = rules
        self.report = report
        self.is_promised = is_promised
        self.plane = WatchedControlPlane(
            rules, lambda clock: make(clock, random, is_promised), report.provider, self._check_ended
        )
        self.cloud = self.plane.stand_in
        self.join_part = random.choice([1.0, 0.9, 0.5])
        self.kills_at_worst = False
        self.is_ending = False
        self.strays: set[str] = set()
        self.foreign: set[str] = set()
        self.others: dict[str, float] = {}
        self.down_until = 0
        self._agents: dict[str, Agent] = {}
        self._listed_at = 0
        self._priced_until = self.plane.now
        self._day = current_day(self.plane.ledger, self.plane.wall_ms)
        self._cost: Tally[int] = Tally()
        self._cores: Tally[int] = Tally()

    # ------------------------------------------------------------------ time

    @property
    def is_up(self) -> bool:
        return self.plane.now >= self.down_until

    def note(self, text: str) -> None:
        self.report.history.append(f"{(self.plane.now - BEGIN_MS) / 1000:9.1f} s  {text}")

    def pass_time(self, ms: int) -> None:
        """Let time pass: the cloud and the agents go on, and the control plane does what it does in every tick."""
        end, is_long = self.plane.now + ms, ms > LONG_MS
        while True:
            self._tick(LONG_LIST_MS if is_long else self.rules.consistency_ms // 3)
            if self.plane.now >= end:
                return
            self.plane.now = min(self.plane.now + (LONG_SLICE_MS if is_long else SLICE_MS), end)

    def _tick(self, list_ms: int) -> None:
        self.plane.make_late_calls()
        self._run_agents()
        if self.is_up:
            self._run_control_plane(list_ms)
        self.check()
        if self.kills_at_worst and self.is_up and not self.is_ending and self._money_ends():
            self.kills_at_worst = False
            self.note("the control plane dies at the worst moment")
            self.restart(2_400_000)

    def _money_ends(self) -> bool:
        """Whether the money of the day, or its core-hours, last about as long as machines go on by themselves."""
        left = [self._left(self._cost, self.rules.budget_per_day_micro, lambda one: one.price_micro or 0)]
        left.append(self._left(self._cores, self._core_limit(), lambda one: one.resources.cpu_milli))
        alone_ms = self.rules.exit_ms + self.random.choice([0, 60_000, 120_000, 180_000])
        return any(0 < one <= alone_ms for one in left)

    def _left(self, used: Tally[int], limit: int | None, price: Callable[[Worker], int]) -> int:
        """For how many milliseconds a budget of the day lasts; 0 where it has no end."""
        rate = sum(price(self.plane.ordered[one.worker_id]) for one in self.existing() if self._is_ours(one))
        return 0 if limit is None or not rate else (limit * HOUR_MS - used[self._day]) // rate

    def _core_limit(self) -> int | None:
        return self.rules.core_hour_budgets.get(self.plane.name)

    def _run_control_plane(self, list_ms: int) -> None:
        plane = self.plane
        plane.handle(TimePassed())
        plane.handle(WallTimePassed(plane.wall_ms))
        for worker in list(plane.ledger.workers.values()):
            if worker.state is WorkerState.DRAINING and not plane.ledger.leases_on.get(worker.node):
                plane.handle(OutputsCollected(worker.id, plane.wall_ms))
        plane.perform()
        if plane.ledger.spending and plane.now - self._listed_at >= (list_ms if plane.ledger.workers else IDLE_LIST_MS):
            self.list_cloud()

    def list_cloud(self) -> None:
        """Compare with the provider's list; sometimes much happens between its answer and its handling."""
        self._listed_at = self.plane.now
        if self.is_ending or self.random.random() < 0.8:
            self.plane.compare()
            return

        def meanwhile() -> None:
            self.plane.want("cpu")
            self.plane.perform()

        self.plane.compare(meanwhile)

    def restart(self, down_ms: int) -> None:
        """The control plane dies, and is down for so long."""
        self.plane.restart()
        self.down_until = self.plane.now + down_ms
        self._listed_at = 0

    # ------------------------------------------------------------------ agents

    def _run_agents(self) -> None:
        """Agents join, are heard, and end their machine when they hear no control plane for too long."""
        now = self.plane.now / 1000
        existing = {one.instance: one for one in self.existing() if one.grid_id == GRID_ID}
        for instance, machine in existing.items():
            agent = self._agents.get(instance) or self._boot(machine)
            if agent.joins_at is None or now < agent.joins_at:
                if now - machine.made_at > (self.rules.launch_ms + self.rules.join_ms) / 1000:
                    self._power_off(machine)
            elif self._reaches(machine.worker_id, agent):
                self._hear(machine.worker_id)
                agent.heard_at = now
            elif now - max(agent.heard_at, agent.joins_at) > self.rules.exit_ms / 1000:
                self._power_off(machine)
        for instance in self._agents.keys() - existing.keys():
            del self._agents[instance]

    def _boot(self, machine: Machine) -> Agent:
        joins = machine.worker_id not in self.strays and self.random.random() < self.join_part
        joins_at = machine.made_at + self.random.uniform(5, 200) if joins else None
        agent = self._agents[machine.instance] = Agent(machine, joins_at, machine.made_at)
        return agent

    def _reaches(self, worker_id: str, agent: Agent) -> bool:
        """Whether an agent reaches the control plane, and is let in: some need a while after it was down."""
        worker = self.plane.ledger.workers.get(worker_id)
        if not self.is_up or worker is None or worker.state in (WorkerState.WANTED, WorkerState.TERMINATING):
            return False
        late_ms = sum(agent.machine.instance.encode()) % 20 * 1000
        return not self.down_until or self.plane.now >= self.down_until + late_ms

    def _hear(self, worker_id: str) -> None:
        has = self.plane.ledger.workers[worker_id].resources
        if worker_id not in self.plane.ledger.nodes:
            node = Node(name=worker_id, capacity=Capacity(has.cpu_milli, has.memory_bytes), host="joined")
            self.plane.handle(NodeDeclared(node))
        self.plane.handle(HeartbeatReceived(name=worker_id, usage=Usage()))

    def _power_off(self, machine: Machine) -> None:
        self.note(f"{machine.worker_id} ends itself")
        self.cloud.take_away(machine.instance)

    # ------------------------------------------------------------------ promises

    def existing(self) -> list[Machine]:
        """The machines that cost money now."""
        return [one for one in self.cloud.machines() if self._costs(one)]

    def _costs(self, machine: Machine) -> bool:
        return machine.made_at <= self.plane.now / 1000 and not self._is_over(machine)

    def _is_over(self, machine: Machine) -> bool:
        return machine.ended_at is not None and machine.ended_at <= self.plane.now / 1000

    def check(self) -> None:
        """Compare the cloud with every promise."""
        self.count_cost()
        machines = self.cloud.machines()
        self._check_others(machines)
        ours = [one for one in machines if self._is_ours(one) and self._costs(one)]
        twice = [worker_id for worker_id, count in Tally(one.worker_id for one in ours).items() if count > 1]
        self._must(not twice, f"there are two machines of {', '.join(twice)}")
        if self.is_promised:
            without = {one.worker_id for one in ours} - self.plane.ledger.workers.keys()
            self._must(not without, f"no worker stands for {sorted(without)}")
            limit = self.rules.budget_per_hour_micro
            rate = sum(self.plane.ordered[one.worker_id].price_micro or 0 for one in ours)
            self._must(limit is None or rate <= limit, f"an hour costs ${rate / MICRO:g}")
            self._check_day()
        self.plane.ledger.check()

    def _is_ours(self, machine: Machine) -> bool:
        return machine.grid_id == GRID_ID and machine.worker_id in self.plane.ordered

    def _check_others(self, machines: list[Machine]) -> None:
        """Nobody else's machine was ended, but by its own lifetime."""
        for one in machines:
            if one.ended_at is None or one.grid_id == GRID_ID:
                continue
            life = self.others.get(one.worker_id, 0.0)
            by_itself = life > 0 and one.ended_at >= one.made_at + life - 1  # also one that is ending
            self._must(by_itself, f"{one.instance} ({one.worker_id} of {one.grid_id or 'nobody'}) was ended")
        there = {one.instance for one in machines}
        self._must(self.foreign <= there, f"{sorted(self.foreign - there)} of nobody are not there any more")

    def _check_ended(self, event: Event, worker: Worker, leases: list[str]) -> None:
        """A machine that is in use may be ended where somebody forces that, its time or its money is over, or it is
        not heard any more."""
        machine = next((one for one in self.existing() if one.worker_id == worker.id), None)
        agent = self._agents.get(machine.instance) if machine is not None else None
        if machine is None or agent is None or self.plane.now / 1000 - agent.heard_at > self.rules.exit_ms / 1000:
            return
        is_forced = isinstance(event, WorkerTerminationRequested | WorkerDrainRequested) and event.force
        is_over = "budget" in worker.why or worker.notice is not None
        self._must(is_forced or is_over, f"{worker.id} with {', '.join(leases)} is {worker.state}: {worker.why}")

    def count_cost(self) -> None:
        """Real costs of the existing machines, by the day that the grid counts on."""
        plane = self.plane
        day = current_day(plane.ledger, plane.wall_ms)
        since, now = self._priced_until, plane.now
        cuts = [(since, now, day)]
        if day != self._day and (midnight := now - (plane.wall_ms - day * DAY_MS)) > since:
            cuts = [(since, min(midnight, now), self._day), (min(midnight, now), now, day)]
        for begin, end, on_day in cuts:
            for one in self.cloud.machines():
                if not self._is_ours(one):
                    continue
                worker = plane.ordered[one.worker_id]
                ended_at = end if one.ended_at is None else min(round(1000 * one.ended_at), end)
                there_ms = max(ended_at - max(round(1000 * one.made_at), begin), 0)
                self._cost[on_day] += (worker.price_micro or 0) * there_ms
                self._cores[on_day] += worker.resources.cpu_milli * there_ms
        self._day, self._priced_until = day, now

    def _check_day(self) -> None:
        limit = self.rules.budget_per_day_micro
        for day, cost in self._cost.items():
            dollars = cost / HOUR_MS / MICRO
            self._must(limit is None or cost <= limit * HOUR_MS, f"day {day} has cost ${dollars:g}")
        cores = self._core_limit()
        for day, used in self._cores.items():
            broken = f"day {day} has used {used / HOUR_MS / 1000:g} core-hours"
            self._must(cores is None or used <= cores * HOUR_MS, broken)

    def must_be_empty(self) -> None:
        """Nothing of this grid exists, and nothing is believed to."""
        ours = [one for one in self.cloud.machines() if one.grid_id == GRID_ID and not self._is_over(one)]
        left = [f"{one.worker_id} ({one.instance})" for one in ours]
        self._must(not left, f"machines are left: {', '.join(left)}")
        rows = [f"{one.id} ({one.state}, {one.problem})" for one in self.plane.ledger.workers.values()]
        self._must(not rows, f"workers are never proven gone: {', '.join(rows)}")

    def _must(self, holds: bool, broken: str) -> None:
        self.report.counts["promises checked"] += 1
        if not holds:
            self.note(f"BROKEN: {broken}")
            raise BrokenPromiseError(broken)
