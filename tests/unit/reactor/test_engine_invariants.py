"""Whatever happens to an engine and to the grid: a lease never has two groups, and in the end both say the same."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct, field

from distributed_grid.domain.engines import GROUP_PREFIX, Binding, EngineResources, parse_group_name
from distributed_grid.domain.events import (
    ControlPlaneStarted,
    EngineNode,
    EngineObserved,
    EngineRegistered,
    Event,
    GroupBound,
    GroupFreed,
    GroupRefused,
    GroupTermSet,
    LeaseExtended,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import GridError
from distributed_grid.reactor.effects import BindLease, SetGroupTerm, engine_effects
from tests.support.builders import GB, Scenario, a_node, a_request

NODES = ("gpu1", "gpu2")
ROOM = EngineResources(4000, 16 * GB, 0)


class Cluster(Struct):
    """An engine with two nodes: its capacity, its life, and its present nodes."""

    life: int = 1
    groups: dict[str, str] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=lambda: {name: f"{name}-1" for name in NODES})
    away: bool = False

    def reserve(self, binding: Binding) -> bool:
        """Whether it has the group now."""
        others = [parse_group_name(name) for name in self.groups if name != binding.group]
        assert all(found is None or found[0] != binding.lease_id for found in others), "a lease with two groups"
        if binding.place not in self.ids.values():
            return False
        self.groups[binding.group] = binding.place
        return True

    def die(self) -> None:
        """Forget everything, and come back with other names."""
        self.life += 1
        self.groups = {}
        self.ids = {name: f"{name}-{self.life}" for name in NODES}

    def lose(self, name: str) -> None:
        """Its groups stay, for the engine hopes to place them elsewhere."""
        self.ids.pop(name, None)

    def find(self, name: str) -> None:
        self.life += 1
        self.ids.setdefault(name, f"{name}-{self.life}")


class Scene:
    """A grid and an engine, and what is lost between them."""

    def __init__(self) -> None:
        self.scenario = Scenario(a_node("gpu1", hold_s=30), a_node("gpu2", hold_s=30))
        self.engine = Cluster()
        self.scenario.handle(EngineRegistered(name="ray", mode="attached", address="head"))
        self.count = 0
        self.look()

    def look(self) -> None:
        if not self.engine.away:
            places = tuple(EngineNode(id=key, name=name, has=ROOM, room=ROOM) for name, key in self.engine.ids.items())
            groups = tuple(self.engine.groups.items())
            self.scenario.now += 1
            self.scenario.handle(
                EngineObserved(
                    name="ray",
                    session=f"s{self.engine.life}",
                    asked_at_ms=self.scenario.now,
                    nodes=places,
                    groups=groups,
                )
            )
            for group in [name for name in self.engine.groups if name.removeprefix(GROUP_PREFIX) not in self.bindings]:
                del self.engine.groups[group]

    @property
    def bindings(self) -> dict[str, Binding]:
        return self.scenario.ledger.bindings

    def perform(self, *, answer: bool = True, backwards: bool = False) -> None:
        """Do what is called for; without an answer the control plane died before it heard what became of it."""
        effects = [] if self.engine.away else engine_effects(self.scenario.ledger)
        for effect in reversed(effects) if backwards else effects:
            binding = effect.binding
            if isinstance(effect, BindLease):
                made = self.engine.reserve(binding)
                term = effect.lease.ends_at_ms
                event: Event = GroupBound(binding.key, term) if made else GroupRefused(binding.key, "no such node")
            elif isinstance(effect, SetGroupTerm):
                if binding.group not in self.engine.groups:
                    continue
                event = GroupTermSet(binding.key, effect.lease.ends_at_ms)
            else:
                self.engine.groups.pop(binding.group, None)
                event = GroupFreed(binding.key)
            if answer:
                self.scenario.handle(event)

    def restart(self) -> None:
        rows = [decode_row(row.kind, encode_row(row)) for row in self.scenario.ledger.rows(durable_only=True)]
        self.scenario.ledger = Ledger(rows)
        epoch = self.scenario.ledger.counters.get("epoch", 0) + 1
        self.scenario.handle(ControlPlaneStarted(epoch))
        for name in NODES:
            self.scenario.heartbeat(name)

    def act(self, action: str, which: int) -> None:
        name = NODES[which % 2]
        live = sorted(self.scenario.ledger.leases)
        match action:
            case "ask":
                self.count += 1
                request = a_request(f"r{self.count}", cores=1 + which % 2, wait_s=60, duration_s=40 * (which % 3))
                try:
                    self.scenario.ask(request)
                except GridError:
                    pass
            case "release" if live:
                self.scenario.release(live[which % len(live)])
            case "extend" if live:
                try:
                    self.scenario.handle(LeaseExtended(live[which % len(live)], "ada", 1000 + which, f"e{which}"))
                except GridError:
                    pass
            case "perform":
                self.perform(backwards=which % 2 == 1)
            case "perform, unheard":
                self.perform(answer=False, backwards=which % 2 == 1)
            case "look":
                self.look()
            case "time":
                self.scenario.advance(1 + 10 * (which % 4))
            case "die":
                self.engine.die()
            case "lose":
                self.engine.lose(name)
            case "find":
                self.engine.find(name)
            case "away":
                self.engine.away = not self.engine.away
            case "restart":
                self.restart()


ACTIONS = ("ask", "ask", "release", "extend", "perform", "perform", "perform, unheard", "look", "time", "die", "lose",
         "find", "away", "restart")  # fmt: skip


@example([(action, 1) for action in ("ask", "perform", "lose", "look", "find", "look", "perform")])
@example([(action, 0) for action in ("ask", "perform", "lose", "look", "find", "look")] + [("perform", 1)])
@example([(action, 0) for action in ("ask", "perform, unheard", "restart", "die", "look", "perform")])
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=60))
def test_ledger_and_engine_agree_in_the_end_whatever_happened_in_between(script):
    scene = Scene()
    for action, which in script:
        scene.act(action, which)
        scene.scenario.ledger.check()
    scene.engine.away = False
    for name in NODES:
        scene.engine.find(name)
    for _ in range(4):
        scene.look()
        scene.perform()
    ledger = scene.scenario.ledger
    ledger.check()
    held = [lease for lease in ledger.leases.values() if lease.holds]
    assert all(lease.state is LeaseState.ACTIVE for lease in held)
    backed = {binding.group for lease in held if (binding := ledger.binding_of(lease)) is not None}
    assert set(scene.engine.groups) == backed == {binding.group for binding in ledger.bindings.values()}
    assert {lease.id for lease in held} == {binding.lease_id for binding in ledger.bindings.values()}
    terms = {binding.lease_id: binding.term_ms for binding in ledger.bindings.values()}
    assert terms == {lease.id: lease.ends_at_ms for lease in held}, "the engine knows when each of them ends"
