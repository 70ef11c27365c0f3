"""A crowd: nodes of every kind and requests of every kind, at random, the same for the same seed.

Rule 1: everything a request can say is said by some of them, also what cannot be met and what makes no sense.
Rule 2: numbers are small and names few, so that requests collide: over room, quotas, groups, names and ids.
"""

from __future__ import annotations

from random import Random

from distributed_grid.domain.events import Event, JobSubmitted, LeaseAsked, PolicySet
from distributed_grid.domain.jobs import Command
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Amounts, Capacity, GpuDevice, Priority
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy, Strategy
from tests.support.builders import GB, thresholds

NODES = ("ash", "birch", "cedar", "elm", "fir", "hazel")
USERS = ("ann", "bob", "eve")
GROUPS = ("web", "db")
MODELS = ("NVIDIA A100", "Tesla V100", "GTX 1080")
PRIORITIES = (*(Priority.LOW,) * 3, Priority.MEDIUM, Priority.MEDIUM, Priority.HIGH, Priority.URGENT, Priority.URGENT)
LABELS = (("zone", "north"), ("zone", "south"), ("disk", "ssd"))


def a_random_policy(dice: Random) -> PolicySet:
    """A policy for all users: a strategy, weights, quotas of a user and of a team."""
    quotas = (
        Quota(name="ann", cpu_milli=6_000, leases=6),
        Quota(name="lab", members=("bob",), gpu_milli=2_000, memory_bytes=40 * GB, custom=(("fpga", 2),)),
    )
    return PolicySet(
        SchedulingPolicy(
            strategy=dice.choice(tuple(Strategy)[:6]),
            weights=(("eve", 3_000),),
            quotas=quotas if dice.random() < 0.7 else (),
            minimum_run_ms=1_000,
        )
    )


def a_random_node(dice: Random, name: str) -> Node:
    """A machine of some size, with or without GPUs, labels, an owner, a price."""
    devices = tuple(
        GpuDevice(at, dice.choice((8, 24)) * GB, dice.choice(MODELS), exclusive=dice.random() < 0.3)
        for at in range(dice.choice((0, 0, 1, 2, 4)))
    )
    custom = (("fpga", dice.choice((1, 3))),) if dice.random() < 0.3 else ()
    capacity = Capacity(1000 * dice.choice((2, 4, 8)), dice.choice((8, 32)) * GB, devices, custom)
    return Node(
        name=name,
        capacity=capacity,
        thresholds=thresholds() if dice.random() < 0.3 else None,
        rank=dice.choice((1000, 1000, 2000)),
        labels=(dice.choice(LABELS),),
        tags=("fast",) if dice.random() < 0.3 else (),
        host=dice.choice(("local", "far")),
        speed_milli=dice.choice((500, 1000, 2000)),
        cost_milli=dice.choice((0, 120, 900)),
    )


def a_random_event(dice: Random, number: int, now: int) -> Event:
    """Somebody asks for something: with a command or without, now and then under an id that was used before."""
    again = dice.random() < 0.03
    request = a_random_request(dice, dice.randrange(number) if again and number else number, now)
    if (request.gang > 1 and dice.random() < 0.9) or dice.random() < 0.4:
        return LeaseAsked(request)
    name = f"job{dice.randrange(40)}" if dice.random() < 0.2 else f"job-{request.id}"
    argv = () if dice.random() < 0.01 else ("true",)
    return JobSubmitted(
        id=name, command=Command(argv), request=request, retries=-1 if dice.random() < 0.01 else dice.choice((0, 1))
    )


def a_random_request(dice: Random, number: int, now: int) -> Request:
    """A request with anything that can be said of one; each thing rarely, so that many can be met."""

    def some(*values: str, rarely: float = 0.08) -> tuple[str, ...]:
        return tuple(value for value in values if dice.random() < rarely)

    ask = _amounts(dice)
    strategy = dice.choice(tuple(Strategy)) if dice.random() < 0.6 else None
    require = some(*NODES, rarely=0.03) + some("nowhere", rarely=0.01)
    if strategy is Strategy.NODE_SPECIFIC and dice.random() < 0.9:
        require = (dice.choice(NODES),)
    expects_ms = dice.choice((0, 0, 60_000, 3_600_000))
    return Request(
        id=f"r{number}",
        user=dice.choice(USERS),
        ask=ask,
        priority=dice.choice(PRIORITIES),
        prefer=some(*NODES, rarely=0.1),
        require=require,
        wait_ms=-1 if dice.random() < 0.01 else dice.choice((0, 60_000, 300_000, 3_600_000)),
        duration_ms=dice.choice((0, 0, 120_000)),
        target=dice.choice(("", "", "", *NODES)),
        team=dice.choice(("", "", "lab")),
        strategy=strategy,
        labels=(dice.choice((*LABELS, ("zone", ""), ("fast", ""), ("colour", "red"))),) if dice.random() < 0.15 else (),
        affinity=some(*NODES[:2], *GROUPS, "job3", rarely=0.03),
        anti_affinity=some(*NODES[:2], *GROUPS, "job4", rarely=0.05),
        group=dice.choice(("", "", *GROUPS)),
        gang=dice.choice((1,) * 12 + (2, 2, 3, 9)),
        expects_ms=expects_ms,
        deadline_ms=now + dice.choice((30_000, 7_200_000)) if dice.random() < 0.1 else 0,
    )


def _amounts(dice: Random) -> Amounts:
    gpu_milli = dice.choice((0, 0, 0, 0, 300, 500, 1000, 2000, 1500 if dice.random() < 0.1 else 1000))
    return Amounts(
        dice.choice((0, 500, 1000, 1000, 2000, 3000, 8000 if dice.random() < 0.3 else 1000)),
        dice.choice((0, 0, GB, 2 * GB, 6 * GB, 40 * GB if dice.random() < 0.2 else GB)),
        gpu_milli,
        6 * GB if gpu_milli and dice.random() < 0.2 else 0,
        (("fpga", dice.choice((1, 2))),) if dice.random() < 0.1 else (),
        (dice.choice(("a100", "tesla", "h200")),) if gpu_milli and dice.random() < 0.2 else (),
    )
