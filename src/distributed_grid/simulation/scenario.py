"""What one seed is about: which nodes there are, what is asked of them, and what goes wrong."""

from __future__ import annotations

from random import Random

from msgspec import Struct

from distributed_grid.domain.nodes import Caps, Node, OfferThresholds
from distributed_grid.domain.rebalancing import SHARING_POLICIES, RebalanceRules, SharingMode
from distributed_grid.domain.resources import Capacity, GpuDevice
from distributed_grid.domain.scheduling_policy import HOUR_MS, Quota, SchedulingPolicy, Strategy
from distributed_grid.simulation.faults import Fault, draw
from distributed_grid.simulation.model.users import ZONES, UserRequest, load

GB = 1024**3
NAMES = ("ash", "birch", "cedar", "dogwood", "elm", "fir")
THRESHOLDS = OfferThresholds(500, 500, 600, GB, 500, GB, dwell_ms=60_000)


class Scenario(Struct, frozen=True):
    """Everything that is decided before the first moment; times are milliseconds from the beginning."""

    seed: int
    nodes: tuple[Node, ...]
    local: str
    policy: SchedulingPolicy
    rules: RebalanceRules | None
    wishes: list[UserRequest]
    faults: list[Fault]
    quiet_ms: int

    @property
    def random(self) -> Random:
        """The chances of the run itself: delays, crash points, what a power failure takes along."""
        return Random(f"{self.seed}/run")


def drawn(seed: int) -> Scenario:
    """The scenario of a seed: always the same, whatever machine or process draws it."""
    random = Random(f"{seed}/scenario")
    names = NAMES[: random.randint(2, len(NAMES))]
    local = names[0] if random.random() < 0.4 else ""
    hold_ms = random.choice((8_000, 20_000, 20_000, 60_000))
    nodes = tuple(_node(random, name, 0 if name == local else hold_ms) for name in names)
    busy_ms = random.randint(60_000, 600_000)
    jobs = random.randint(8, 25 * len(names))
    wishes = load(random, names, jobs=jobs, leases=random.randint(0, 12), until_ms=busy_ms)
    faults = draw(random, names, local, count=random.randint(0, 30), until_ms=busy_ms)
    quiet_ms = max([busy_ms, *(fault.at_ms + fault.lasts_ms for fault in faults)])
    return Scenario(seed, nodes, local, _policy(random), _rules(random), wishes, faults, quiet_ms)


def _node(random: Random, name: str, hold_ms: int) -> Node:
    """A machine of some size; some lend only a part, some watch their owner."""
    cores, memory = random.choice(((2, 8), (4, 16), (4, 16), (8, 32)))
    devices = tuple(
        GpuDevice(index, 16 * GB, "L4", exclusive=random.random() < 0.3) for index in range(random.choice((0, 0, 1, 2)))
    )
    custom = (("fpga", 2),) if random.random() < 0.3 else ()
    caps = Caps(cpu_milli=1000 * cores - 1000, memory_bytes=memory * GB // 2) if random.random() < 0.2 else Caps()
    return Node(
        name,
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
        quotas=random.choice(((), (), (Quota("bob", leases=2),), (Quota("green", cpu_milli=4000, gpu_milli=1000),))),
        reserve_after_ms=random.choice((5_000, 30_000)),
        starvation_ms=random.choice((60_000, 6 * HOUR_MS)),
        preemptions_max=random.choice((0, 1, 3)),
    )


def _rules(random: Random) -> RebalanceRules | None:
    """Some grids are balanced by themselves."""
    if random.random() < 0.6:
        return None
    return RebalanceRules(
        random.choice([*SharingMode]),
        random.choice([*SHARING_POLICIES.values()]),
        interval_ms=random.choice((2_000, 5_000, 15_000)),
    )
