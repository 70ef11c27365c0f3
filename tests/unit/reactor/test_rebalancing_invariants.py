"""Whatever the load does, balancing does not swing: its laws over random load curves, for every policy and mode."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.events import NodeDeclared, PressureRead
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import (
    SHARING_POLICIES,
    WATCHED_RESOURCES,
    Forecast,
    PressureReading,
    SharingMode,
    claimed_amount,
    resource_of,
)
from distributed_grid.domain.resources import ResourceType
from distributed_grid.reactor import Record
from distributed_grid.scheduling.pressure.loans import total_of
from distributed_grid.scheduling.pressure.scan import RETRY_UNUSED
from tests.simulation.invariants import INVARIANTS
from tests.support.builders import a_node, a_request, thresholds
from tests.support.rebalance_rounds import INTERVAL_MS, Rounds, a_reading, apart, rules
from tests.unit.reactor.state_machine import NAMES, NODES, World
from tests.unit.reactor.test_invariants import CALLS, action, begin, kinds

TYPES = [(policy, str(mode)) for policy in SHARING_POLICIES for mode in SharingMode]
QUICK = TYPES[:: len(SharingMode) + 1]
"""Each mode, and each policy but one, once; the rest is among the slow tests."""
every_type = pytest.mark.parametrize(
    ("policy", "mode"),
    [pytest.param(*kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in TYPES],
    ids=lambda word: word,
)
NODES_HERE = ("ash", "birch", "cedar")
HIGH, LOW = 800, 300
SETTLES = 110
"""Rounds that are enough for every lease that a policy allows, and for those that nobody renews or uses to end."""


def curve(pieces: list[tuple[int | None, int, int, int]]) -> list[int | None]:
    """A load that stays, jumps or drifts, and is now and then unknown."""
    return [
        None if start is None else min(max(start + slope * step + (wobble if step % 2 else 0), 0), 1000)
        for start, slope, wobble, steps in pieces
        for step in range(steps)
    ]


pieces = st.tuples(
    st.sampled_from([0, 250, 299, 300, 550, 799, 800, 801, 950, 1000, None]),
    st.sampled_from([0, 0, 20, -20, 150, -150]),
    st.sampled_from([0, 0, 5, 400]),
    st.integers(1, 12),
)
curves = st.lists(pieces, min_size=1, max_size=8).map(curve)
three_curves = st.tuples(*(curves for _ in NODES_HERE))
forecasts = st.lists(st.sampled_from([None, Forecast(100, 10), Forecast(900, 20)]), min_size=1, max_size=7)


@st.composite
def loads(draw) -> list[tuple[PressureReading, ...]]:
    """Readings of three nodes, round after round; forecasts are as wild as they like."""
    memory, cpu = draw(three_curves), draw(three_curves)
    rounds = max(len(curve) for curve in (*memory, *cpu))
    ahead = draw(forecasts)
    return [
        tuple(
            _reading(
                name, memory[which][at % len(memory[which])], cpu[which][at % len(cpu[which])], ahead[at % len(ahead)]
            )
            for which, name in enumerate(NODES_HERE)
        )
        for at in range(rounds)
    ]


def _reading(name: str, memory: int | None, cpu: int | None, ahead: Forecast | None) -> PressureReading:
    if memory is None or cpu is None:
        return PressureReading(node=name)
    return replace(a_reading(name, memory=memory, cpu=cpu), memory_ahead=ahead)


class Watched(Rounds):
    """Rounds that are held against the rules of lending as they go, and remember who was asked when."""

    def __init__(self, policy: str, mode: str, unused_after: int = 0) -> None:
        nodes = [apart(a_node(name, cores=8, memory_gb=30)) for name in NODES_HERE]
        chosen = rules(policy, mode, unused_after=unused_after) if unused_after else rules(policy, mode)
        super().__init__(*nodes, rules=chosen)
        self.actions: dict[tuple[str, str], list[tuple[int, str, str]]] = defaultdict(list)
        self.last: dict[str, PressureReading] = {}
        self.rounds_read = 0

    def live(self, readings: tuple[PressureReading, ...]) -> list[Record]:
        before = {lease.id for lease in self.leases}
        self.last = {reading.node: reading for reading in readings}
        records = self.round(*readings)
        for lease in self.leases:
            if lease.id not in before:
                self._was_fair(lease.id)
        for name in NODES_HERE:
            mine = [lease for lease in self.leases if lease.request.target == name]
            assert len(mine) <= self.rules.policy.leases_max
        for record in records:
            if record.type == "rebalanced":
                key = (str(record.data["target_node"]), str(record.data["resource_type"]))
                action = (self.rounds_read, str(record.data["action"]), str(record.data.get("source_node", "")))
                self.actions[key].append(action)
        self.rounds_read += 1
        return records

    def _was_fair(self, lease_id: str) -> None:
        """Nothing is asked of the target itself, of an unknown node, or of one that has less to spare."""
        lease = self.ledger.leases[lease_id]
        target, lender, resource = lease.request.target, self.last[lease.node], resource_of(lease.request.ask)
        assert lease.node != target
        assert self.last[target].level(resource) is not None
        assert all((lender.level(one) or 0) <= HIGH for one in WATCHED_RESOURCES)
        assert lender.score is not None
        node, claims = self.ledger.nodes[lease.node], self.ledger.claims_on(lease.node)
        total = total_of(node.capacity, resource)
        lent = claims.memory_bytes if resource is ResourceType.MEMORY else claims.cpu_milli
        idle = total * (1000 - (lender.level(resource) or 0)) // 1000
        assert min(total - lent, idle - claimed_amount(lease, resource)) >= total * self.rules.excess_milli // 1000


@every_type
@settings(max_examples=20)
@given(load=loads())
def test_flips_are_bounded_by_real_crossings_and_by_the_cool_down(policy, mode, load):
    scenario = Watched(policy, mode)
    for readings in load:
        scenario.live(readings)
    if mode == "offload_only":
        assert not scenario.leases
    for (target, resource), actions in scenario.actions.items():
        levels = [
            next(one for one in readings if one.node == target).level(ResourceType(resource)) for readings in load
        ]
        asks = [at for at, action, _ in actions if action == "asked"]
        assert all(later - earlier >= scenario.rules.policy.cool_down for earlier, later in pairwise(asks))
        assert len(asks) <= 1 + len(load) // max(scenario.rules.policy.cool_down, 1)
        flips = [action for action in actions if action[1] in {"asked", "given_back"}]
        turns = sum(1 for one, other in pairwise(flips) if one[1] != other[1])
        unused = 1 + 2 * (
            len(load) // (RETRY_UNUSED * scenario.rules.policy.unused_after)
        )  # the slow pace of what nothing used
        assert turns <= _crossings(levels) + 2 * _lender_crossings(load, resource) + unused


def _crossings(levels: list[int | None]) -> int:
    """How often a level came below the low mark or left what is below it."""
    below = [level < LOW for level in levels if level is not None]
    return sum(1 for one, other in pairwise(below) if one != other)


def _lender_crossings(load: list[tuple[PressureReading, ...]], resource: str) -> int:
    """How often any node came to need for itself what it may have lent, really or by forecast."""
    needs = [
        [
            (level := one.level(ResourceType(resource))) is not None and (level > HIGH or _foreseen(one, resource))
            for one in readings
        ]
        for readings in load
    ]
    came = sum(
        1 for one, other in pairwise(needs) for before, after in zip(one, other, strict=True) if after and not before
    )
    return came + sum(needs[0])


def _foreseen(reading: PressureReading, resource: str) -> bool:
    ahead = reading.ahead(ResourceType(resource))
    return ahead is not None and ahead.level > HIGH


@every_type
@settings(max_examples=8)
@given(load=loads())
def test_a_constant_load_leads_to_a_fixed_point(policy, mode, load):
    scenario = Watched(policy, mode, unused_after=1_000)  # else what nothing uses comes and goes at its slow pace
    for readings in load:
        scenario.live(readings)
    for _ in range(SETTLES):
        scenario.live(load[-1])
    for _ in range(25):
        records = scenario.live(load[-1])
        assert {record.type for record in records} <= {"extended"}


@every_type
@settings(max_examples=6)
@given(load=loads(), at=st.integers(0, 60))
def test_a_restart_does_not_make_it_swing(policy, mode, load, at):
    """A restart forgets only the starting times; holdings are kept unchanged."""
    scenario = Watched(policy, mode, unused_after=1_000)
    for number, readings in enumerate(load):
        if number == at % len(load):
            held = [lease.id for lease in scenario.leases]
            scenario.ledger = Ledger(scenario.ledger.rows(durable_only=True))
            for name in NODES_HERE:
                scenario.heartbeat(name)
            assert [lease.id for lease in scenario.leases] == held
        scenario.live(readings)
    for _ in range(SETTLES):
        scenario.live(load[-1])
    assert {record.type for record in scenario.live(load[-1])} <= {"extended"}


@pytest.mark.parametrize("policy", SHARING_POLICIES)
@given(demand=st.integers(0, 1400), high=st.integers(400, 900), gap=st.integers(50, 390))
@settings(max_examples=15)
def test_borrowing_that_really_relieves_a_node_settles_too(policy, demand, high, gap):
    """A borrowed lease is used at once: the target's level falls by it, the lender's rises."""
    scenario = Watched(policy, "dynamic_balancing")
    scenario.rules = rules(policy, high=high, low=high - gap, unused_after=1_000)
    total = scenario.ledger.nodes["ash"].capacity.memory_bytes

    def level(name: str) -> PressureReading:
        lent = 1000 * scenario.ledger.claims_on(name).memory_bytes // total
        got = sum(
            1000 * lease.request.ask.memory_bytes // total for lease in scenario.leases if lease.request.target == name
        )
        return a_reading(name, memory=min(max((demand if name == "ash" else 100) + lent - got, 0), 1000))

    for _ in range(SETTLES):
        scenario.round(*(level(name) for name in NODES_HERE))
    records = [record for _ in range(25) for record in scenario.round(*(level(name) for name in NODES_HERE))]
    assert {record.type for record in records} <= {"extended"}


# ------------------------------------------------------------------ among everything else that may happen
class BalancedWorld(World):
    """The world of the laws with a rebalancer in it; its nodes are machines of their own."""

    def declare(self, which: int, kind: int) -> None:
        self.handle(NodeDeclared(replace(NODES[kind](NAMES[which]), host=NAMES[which])))

    def press(self, levels: tuple[int | None, ...], policy: str, mode: str, later: int) -> None:
        """A while later somebody reads how hard the nodes work."""
        self.wait(later * INTERVAL_MS, heard=True)
        readings = tuple(a_reading(name, memory=level, cpu=level) for name, level in zip(NAMES, levels, strict=True))
        moment = self.handle(PressureRead(readings, rules(policy, mode)))
        assert moment.refusal is None


some_levels = st.sampled_from([None, 0, 100, 500, 850, 1000])
PRESS = action(
    "press",
    st.tuples(some_levels, some_levels, some_levels),
    st.sampled_from([*SHARING_POLICIES]),
    st.sampled_from([str(mode) for mode in SharingMode]),
    st.sampled_from([0, 1, 2, 5]),
)
ANYTHING = st.one_of(PRESS, PRESS, st.sampled_from([*CALLS]).flatmap(CALLS.__getitem__))


@settings(max_examples=60)
@given(first=kinds, second=kinds, script=st.lists(ANYTHING, max_size=30))
def test_with_a_rebalancer_every_law_still_holds_and_no_reading_is_refused(first, second, script):
    world = BalancedWorld(*INVARIANTS)
    begin(world, first, second)
    for name, args in script:
        getattr(world, name)(*args)


def test_the_world_of_the_laws_sees_automatic_leases():
    """Without this the test above might prove nothing."""
    world = BalancedWorld(*INVARIANTS)
    begin(world, 0, 0)
    world.press((1000, 0, None), "aggressive", "share_and_offload", 1)
    assert [lease.request.target for lease in world.ledger.leases.values()] == [NAMES[0], NAMES[0]]
    world.press((0, 0, None), "aggressive", "share_and_offload", 2)
    assert not world.ledger.leases
    assert not world.ledger.jobs


def test_the_world_of_the_laws_sees_work_of_a_node_get_its_part_of_an_automatic_lease():
    world = BalancedWorld(*INVARIANTS)
    begin(world, 0, 0)
    world.press((1000, 0, None), "aggressive", "share_and_offload", 1)
    world.submit(a_request(cores=1, memory_gb=1, target=NAMES[0]), 0)
    (lease,) = (lease for lease in world.ledger.leases.values() if lease.job)
    assert len(lease.carved_from) == 2
    world.ended(0, 0, 0)
    world.press((0, 0, None), "aggressive", "share_and_offload", 2)
    assert not world.ledger.leases
    assert not world.ledger.jobs


def test_thresholds_of_its_own_make_a_local_node_a_machine_in_the_laws_too():
    world = World(*INVARIANTS)
    for name in NAMES[:2]:
        world.handle(NodeDeclared(a_node(name, thresholds=thresholds())))
        world.heartbeat(NAMES.index(name), 0)
    readings = (a_reading(NAMES[0], memory=900), a_reading(NAMES[1]))
    world.handle(PressureRead(readings, rules("aggressive", "share_and_offload")))
    assert [lease.node for lease in world.ledger.leases.values()] == [NAMES[1]]
