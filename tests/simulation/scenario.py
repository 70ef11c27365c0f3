"""Scenario of a seed: which nodes there are, what users request, and what goes wrong.

All of it is drawn before anything happens, so that faults do not change what is requested.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.events import (
    BlockAsked,
    BlockReleased,
    Event,
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseExtended,
    LeaseReleased,
)
from distributed_grid.domain.jobs import MAX_RERUNS, JobEstimate
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Caps, Node, OfferThresholds
from distributed_grid.domain.rebalancing import SHARING_POLICIES, RebalanceRules, SharingMode
from distributed_grid.domain.resources import Amounts, Capacity, GpuDevice, Priority
from distributed_grid.domain.scheduling_policy import HOUR_MS, Quota, SchedulingPolicy, Strategy
from tests.simulation.faults import Fault, draw_faults, draw_loads
from tests.simulation.machine import ScriptedJob
from tests.simulation.simulated_moves import (
    PlannedMove,
    PlannedOriginal,
    draw_moves,
    draw_originals,
    with_change,
)

GB = 1024**3
ASKS = (
    Amounts(1000),
    Amounts(1000, GB),
    Amounts(2000, 2 * GB),
    Amounts(500, 6 * GB),
    Amounts(3000),
    Amounts(0, 10 * GB),
    Amounts(500, 0, 300),
    Amounts(1000, GB, 500, 2 * GB),
    Amounts(1000, 0, 1000),
    Amounts(1000, 0, 1000, gpu_models=("L4",)),
    Amounts(0, 0, 2000),
    Amounts(1000, custom=(("fpga", 1),)),
)
TEAMS = {"ada": "green", "bob": "green", "cyd": ""}
ZONES = ("north", "south")
PRIORITIES = (Priority.LOW, Priority.MEDIUM, Priority.MEDIUM, Priority.HIGH, Priority.URGENT)
STRATEGIES = (None, None, *(one for one in Strategy if one is not Strategy.NODE_SPECIFIC))
WAITS_MS = (0, 20_000, 300_000, 300_000, 3_600_000)
DEADLINES_MS = (0, 0, 0, 0, 20_000, 120_000)
GRACES_MS = (500, 5_000, 5_000, 120_000)
NAMES = ("ash", "birch", "cedar", "dogwood", "elm", "fir")
THRESHOLDS = OfferThresholds(
    cpu_busy_max_milli=500,
    cpu_min_milli=500,
    memory_used_max_milli=600,
    memory_min_bytes=GB,
    gpu_busy_max_milli=500,
    gpu_memory_min_bytes=GB,
    dwell_ms=60_000,
)


class UserRequest(Struct, frozen=True):
    """Something a user wants at a moment."""

    at_ms: int
    event: Event
    deadline_in_ms: int = 0

    def event_at(self, at_ms: int) -> Event:
        """The event as it is told when its moment comes."""
        if not self.deadline_in_ms or not isinstance(self.event, JobSubmitted | LeaseAsked):
            return self.event
        return replace(self.event, request=replace(self.event.request, deadline_ms=at_ms + self.deadline_in_ms))

    @property
    def uid(self) -> str:
        """Whom it is about; empty where it is not a request."""
        return self.event.request.id if isinstance(self.event, JobSubmitted | LeaseAsked) else ""

    @property
    def lasts_ms(self) -> int:
        """How long it may keep the grid busy, run as often as it may be."""
        if isinstance(self.event, JobSubmitted):
            return (ScriptedJob.of(self.event.command).run_ms + 10_000) * (1 + self.event.retries)
        return self.event.request.duration_ms + 10_000 if isinstance(self.event, LeaseAsked) else 0


class Scenario(Struct, frozen=True):
    """Everything that is decided before the first moment; times are milliseconds from the beginning."""

    seed: int
    nodes: tuple[Node, ...]
    local: str
    policy: SchedulingPolicy
    rules: RebalanceRules | None
    requests: list[UserRequest]
    faults: list[Fault]
    quiet_ms: int
    originals: list[PlannedOriginal] = []
    moves: list[PlannedMove] = []

    @property
    def random(self) -> Random:
        """Chances of the run itself: delays, crash points, losses of a power failure."""
        return Random(f"{self.seed}/run")


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed: always the same, whatever machine or process draws it."""
    random = Random(f"{seed}/scenario")
    names = NAMES[: random.randint(2, len(NAMES))]
    local = names[0] if random.random() < 0.4 else ""
    hold_ms = random.choice((8_000, 20_000, 20_000, 60_000))
    nodes = tuple(_node(random, name, 0 if name == local else hold_ms) for name in names)
    busy_ms = random.randint(60_000, 600_000)
    jobs = random.randint(8, 25 * len(names))
    requests = draw_requests(random, names, jobs=jobs, leases=random.randint(0, 12), until_ms=busy_ms)
    faults = draw_faults(random, names, local, count=random.randint(0, 30), until_ms=busy_ms)
    requests = [_with_target(Random(f"{seed}/target/{one.uid}"), one, names) for one in requests]
    requests = [_with_restart(Random(f"{seed}/restart/{one.uid}"), one) for one in requests]
    requests = [_with_learned_size(Random(f"{seed}/learned/{one.uid}"), one) for one in requests]
    jobs_drawn = [one.uid for one in requests if isinstance(one.event, JobSubmitted)]
    moving = Random(f"{seed}/moves")
    originals = draw_originals(moving, names, until_ms=busy_ms)
    moves = draw_moves(moving, names, originals, jobs_drawn, until_ms=busy_ms)
    moves = [with_change(Random(f"{seed}/change/{one.id}"), one) for one in moves]
    requests += draw_blocks(Random(f"{seed}/blocks"), names, until_ms=busy_ms)
    faults += draw_loads(Random(f"{seed}/loads"), names, local, until_ms=busy_ms)
    quiet_ms = max([busy_ms, *(fault.at_ms + fault.lasts_ms for fault in faults)])
    policy, rules = _policy(random), _rules(random)
    return Scenario(seed, nodes, local, policy, rules, requests, faults, quiet_ms, originals, moves)


def _node(random: Random, name: str, hold_ms: int) -> Node:
    """A machine of some size; some lend only a part, some watch their owner."""
    cores, memory = random.choice(((2, 8), (4, 16), (4, 16), (8, 32)))
    devices = tuple(
        GpuDevice(index, 16 * GB, "L4", exclusive=random.random() < 0.3) for index in range(random.choice((0, 0, 1, 2)))
    )
    custom = (("fpga", 2),) if random.random() < 0.3 else ()
    caps = Caps(cpu_milli=1000 * cores - 1000, memory_bytes=memory * GB // 2) if random.random() < 0.2 else Caps()
    return Node(
        name=name,
        capacity=Capacity(1000 * cores, memory * GB, devices, custom),
        caps=caps,
        thresholds=THRESHOLDS if random.random() < 0.25 else None,
        rank=random.choice((1000, 1000, 2000)),
        labels=(("zone", random.choice(ZONES)),),
        speed_milli=random.choice((500, 1000, 1000, 2000)),
        cost_milli=random.choice((0, 0, 700)),
        host=name if hold_ms else "local",
        hold_ms=hold_ms,
        wanted=True,
    )


def _policy(random: Random) -> SchedulingPolicy:
    """What holds for everybody: some have more weight, some may not hold much at once, some are never displaced."""
    return SchedulingPolicy(
        strategy=random.choice([one for one in Strategy if one is not Strategy.NODE_SPECIFIC]),
        half_life_ms=random.choice((0, 60_000, 24 * HOUR_MS)),
        weights=random.choice(((), (("ada", 3000), ("bob", 500)), (("green", 2000),))),
        quotas=random.choice(
            ((), (), (Quota(name="bob", leases=2),), (Quota(name="green", cpu_milli=4000, gpu_milli=1000),))
        ),
        reserve_after_ms=random.choice((5_000, 30_000)),
        starvation_ms=random.choice((60_000, 6 * HOUR_MS)),
        preemptions_max=random.choice((0, 1, 3)),
    )


def _rules(random: Random) -> RebalanceRules | None:
    """Some grids are balanced by themselves."""
    if random.random() < 0.6:
        return None
    return RebalanceRules(
        mode=random.choice([*SharingMode]),
        policy=random.choice([*SHARING_POLICIES.values()]),
        interval_ms=random.choice((2_000, 5_000, 15_000)),
    )


def draw_requests(
    random: Random, nodes: tuple[str, ...], *, jobs: int, leases: int, until_ms: int
) -> list[UserRequest]:
    """A seeded load: jobs of all sizes and tempers, plain leases, and second thoughts about both."""
    requests = []
    for number in range(jobs):
        at = random.randrange(until_ms)
        request = _request(random, f"job{number}", nodes)
        work = ScriptedJob(
            run_ms=round(random.choice((300, 3_000, 15_000, 60_000)) * random.uniform(0.2, 1.5)),
            exit_code=random.choice((0, 0, 0, 1)),
            heeds=random.random() < 0.7,
            exists=random.random() < 0.95,
            workdir=random.random() < 0.3,
            marks_ms=random.choice((0, 0, 2_000, 12_000)),
        )
        command = work.command(grace_ms=random.choice(GRACES_MS))
        submitted = JobSubmitted(
            id=f"{request.id}-name", command=command, request=request, retries=random.choice((0, 0, 1, 2))
        )
        requests.append(UserRequest(at, submitted, random.choice(DEADLINES_MS)))
        if random.random() < 0.2:
            requests.append(UserRequest(at + random.randrange(40_000), JobCancelled(request.id, request.user)))
    for number in range(leases):
        at = random.randrange(until_ms)
        request = _request(random, f"lease{number}", nodes, duration_ms=random.randint(5_000, 90_000))
        if random.random() < 0.2:
            request = replace(request, target=random.choice(nodes))
        requests.append(UserRequest(at, LeaseAsked(request)))
        if random.random() < 0.3:
            requests.append(UserRequest(at + random.randrange(20_000), LeaseReleased(request.id, request.user)))
        if random.random() < 0.2:
            longer = LeaseExtended(request.id, request.user, 10_000, f"{request.id}-longer")
            requests.append(UserRequest(at + random.randrange(5_000), longer))
    return requests


def _with_target(random: Random, request: UserRequest, nodes: tuple[str, ...]) -> UserRequest:
    """Some jobs are work of a node, and use what it has borrowed."""
    if not isinstance(request.event, JobSubmitted) or random.random() < 0.6:
        return request
    asked = replace(request.event.request, target=random.choice(nodes))
    return replace(request, event=replace(request.event, request=asked))


def _with_restart(random: Random, request: UserRequest) -> UserRequest:
    """Some jobs may be started again from their beginning."""
    if not isinstance(request.event, JobSubmitted) or random.random() < 0.7:
        return request
    return replace(request, event=replace(request.event, restartable=True))


def _with_learned_size(random: Random, request: UserRequest) -> UserRequest:
    """Some jobs state no memory and get what earlier runs have used; half of those hold more than that."""
    event = request.event
    if not isinstance(event, JobSubmitted) or event.request.ask.memory_bytes or random.random() < 0.5:
        return request
    first = random.choice((GB // 2, GB, 3 * GB))
    estimate = JobEstimate(
        memory_limits=tuple(first << at for at in range(1 + MAX_RERUNS)), tier="statistics", samples=7
    )
    work = replace(ScriptedJob.of(event.command), held_bytes=random.choice((0, 1, 2, 5, 40)) * GB)
    command = replace(event.command, argv=work.command().argv)
    asked = replace(event.request, limits_memory=True)
    return replace(request, event=replace(event, command=command, request=asked, estimate=estimate))


def draw_blocks(random: Random, nodes: tuple[str, ...], *, until_ms: int) -> list[UserRequest]:
    """Blocks of the memory pool, for programs on the nodes; some are released before their time is over."""
    requests = []
    for number in range(random.choice((0, 0, 2, 6))):
        at, user, block_id = random.randrange(until_ms), random.choice([*TEAMS]), f"block{number}"
        asked = BlockAsked(
            id=block_id,
            user=user,
            size_bytes=random.choice((GB // 4, GB, 3 * GB)),
            term_ms=random.randint(20_000, 150_000),
            copies=random.choice((1, 1, 2, 3)),
            home=random.choice(nodes),
        )
        requests.append(UserRequest(at, asked))
        if random.random() < 0.4:
            requests.append(UserRequest(at + random.randrange(60_000), BlockReleased(block_id, user)))
    return requests


def _request(random: Random, uid: str, nodes: tuple[str, ...], *, duration_ms: int = 0) -> Request:
    named = (random.choice(nodes),)
    others = (f"group{random.randrange(2)}",)
    user = random.choice([*TEAMS])
    return Request(
        id=uid,
        user=user,
        ask=random.choice(ASKS),
        priority=random.choice(PRIORITIES),
        prefer=named if random.random() < 0.15 else (),
        require=named if random.random() < 0.1 else (),
        wait_ms=random.choice(WAITS_MS),
        duration_ms=duration_ms or random.choice((0, 0, 0, 60_000)),
        strategy=random.choice(STRATEGIES),
        group=others[0] if random.random() < 0.2 else "",
        team=TEAMS[user],
        labels=(("zone", random.choice(ZONES)),) if random.random() < 0.08 else (),
        affinity=others if random.random() < 0.03 else (),
        anti_affinity=others if random.random() < 0.1 else (),
        gang=random.choice((1, 1, 2, 3)) if duration_ms else 1,
        expects_ms=random.choice((0, 0, 5_000, 60_000)),
    )
