"""Seeded faults: what breaks, when and for how long, and what each kind does to the simulated world.

Faults are drawn before anything happens; each has a beginning and an end. After the last end everything works again, so
that whatever is still wrong then is the grid's own doing. Faults of one kind may overlap: the strongest counts while it
lasts, and what they keep down comes back with the last of them.
"""

from __future__ import annotations

import enum
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, inspect

from distributed_grid.domain.events import AgentRequested, NodeDrained
from distributed_grid.errors import ProtocolError
from distributed_grid.wire import FromAgent, decode_from_agent, encode
from tests.simulation.machine import Owner
from tests.simulation.network import DOWN, MAX_DELAY_MS, UP

if TYPE_CHECKING:
    from tests.simulation.world import World

MAX_NUMBER = 2**61


class FaultKind(enum.StrEnum):
    """Kinds of faults."""

    AGENT_DIES = "the agent dies"
    MACHINE_DIES = "the machine loses its power"
    CONTROL_DIES = "the control plane dies"
    CONTROL_MACHINE_DIES = "the control plane's machine loses its power"
    CUT = "the network is cut"
    CUT_UP = "nothing from the node arrives"
    CUT_DOWN = "nothing arrives at the node"
    SLOW_LINK = "the network is slow"
    SLOW_NODE = "the machine is slow"
    CLOCK_SKEWED = "the machine's clock runs fast or slow"
    LOSSY = "messages are lost"
    REPEATING = "messages are repeated"
    SCRAMBLED = "messages overtake each other"
    DISK_FULL = "the control plane's disk is full"
    DISK_SLOW = "the control plane's disk is slow"
    DISK_HANGS = "the control plane's disk does not answer"
    NODE_DISK_FULL = "the node's disk is full"
    DIRECTORY_LOST = "the node joins again with an empty directory"
    AGENT_LIES = "the agent lies"
    STARTS_NOTHING = "the node starts nothing"
    SIGTERM_IGNORED = "jobs ignore SIGTERM"
    CLOCK_STEPPED = "the machine's wall clock is stepped"
    DISK_FLOODED = "a job fills its node's disk"
    AGENT_STOPPED = "the agent is stopped"
    SHIMS_STOPPED = "all shims are stopped"
    WATCHDOGS_STOPPED = "the agent and all shims are stopped"
    READERS = "many readers ask the control plane"
    OWNER = "the owner comes"
    DRAINED = "the node is drained"


LOCAL = frozenset(
    {
        FaultKind.OWNER,
        FaultKind.DRAINED,
        FaultKind.SLOW_NODE,
        FaultKind.STARTS_NOTHING,
        FaultKind.SIGTERM_IGNORED,
        FaultKind.CLOCK_STEPPED,
        FaultKind.DISK_FLOODED,
        FaultKind.SHIMS_STOPPED,
    }
)
"""What can happen to the node of the control plane's own machine; its agent and its links live and die with it."""
_STORE = frozenset({FaultKind.DISK_FULL, FaultKind.DISK_SLOW, FaultKind.DISK_HANGS})
LOAD = (
    FaultKind.DISK_FLOODED,
    FaultKind.AGENT_STOPPED,
    FaultKind.SHIMS_STOPPED,
    FaultKind.WATCHDOGS_STOPPED,
    FaultKind.READERS,
)
"""Loads and stopped processes, which are drawn for themselves."""
EVERYWHERE = frozenset({FaultKind.CONTROL_DIES, FaultKind.CONTROL_MACHINE_DIES, FaultKind.READERS}) | _STORE
HARMLESS = _STORE | {
    FaultKind.NODE_DISK_FULL,
    FaultKind.OWNER,
    FaultKind.DRAINED,
    FaultKind.REPEATING,
    FaultKind.SCRAMBLED,
    FaultKind.SIGTERM_IGNORED,
    FaultKind.STARTS_NOTHING,
    FaultKind.CLOCK_STEPPED,
    FaultKind.DISK_FLOODED,
    FaultKind.SHIMS_STOPPED,
    FaultKind.READERS,
}
"""What must not keep the hold of a node from being renewed."""
_LASTS_MS = {
    FaultKind.AGENT_DIES: (500, 15_000),
    FaultKind.MACHINE_DIES: (5_000, 90_000),
    FaultKind.CONTROL_DIES: (100, 30_000),
    FaultKind.CONTROL_MACHINE_DIES: (5_000, 60_000),
    FaultKind.CUT: (1_000, 150_000),
    FaultKind.CUT_UP: (1_000, 120_000),
    FaultKind.CUT_DOWN: (1_000, 120_000),
    FaultKind.DISK_FULL: (500, 120_000),
    FaultKind.DISK_HANGS: (500, 120_000),
    FaultKind.NODE_DISK_FULL: (500, 120_000),
    FaultKind.DIRECTORY_LOST: (1, 1),
    FaultKind.STARTS_NOTHING: (5_000, 150_000),
    FaultKind.DISK_FLOODED: (20_000, 120_000),
    FaultKind.AGENT_STOPPED: (1_000, 120_000),
    FaultKind.SHIMS_STOPPED: (1_000, 150_000),
    FaultKind.WATCHDOGS_STOPPED: (5_000, 150_000),
    FaultKind.OWNER: (3_000, 120_000),
    FaultKind.DRAINED: (5_000, 60_000),
}
_USUALLY_MS = (5_000, 60_000)
_OFTEN = (FaultKind.CUT, FaultKind.CUT, FaultKind.CUT_UP, FaultKind.CUT_DOWN)


class Fault(Struct, frozen=True):
    """Something goes wrong at a moment, and right again later; an empty node is all of them."""

    at_ms: int
    kind: FaultKind
    node: str
    lasts_ms: int
    strength: float
    """Between 0 and 1; what it means depends on the kind."""


def draw_faults(random: Random, nodes: tuple[str, ...], local: str, *, count: int, until_ms: int) -> list[Fault]:
    """So many faults, of a few kinds that this seed is about, before that moment."""
    every = [kind for kind in FaultKind if kind not in LOAD]
    kinds = [*random.sample(every, random.randint(2, 6)), *_OFTEN] if random.random() < 0.7 else every
    return _draw(random, kinds, nodes, local, count=count, until_ms=until_ms)


def draw_loads(random: Random, nodes: tuple[str, ...], local: str, *, until_ms: int) -> list[Fault]:
    """A few floods, crowds of readers and stopped processes; in every other world none."""
    count = random.choice((0, 1, 2, 6))
    return _draw(random, [*LOAD], nodes, local, count=count, until_ms=until_ms)


def _draw(
    random: Random, kinds: list[FaultKind], nodes: tuple[str, ...], local: str, *, count: int, until_ms: int
) -> list[Fault]:
    found = []
    for _ in range(count):
        kind = random.choice(kinds)
        node = "" if kind in EVERYWHERE else random.choice(nodes)
        if node and node == local and kind not in LOCAL:
            continue
        shortest, longest = _LASTS_MS.get(kind, _USUALLY_MS)
        found.append(Fault(random.randrange(until_ms), kind, node, random.randint(shortest, longest), random.random()))
    return found


AGENT_STARTS_MS = 2_000
IGNORES_FROM = 0.5
"""From this strength on, a node that starts nothing ignores its orders."""
JUMPS_FROM, JUMP_MS = 0.7, 3_600_000
"""From this strength on, a machine that is started again has a clock that is ahead, by part of this."""
MAX_READERS = 200
STEP_MS = 3_600_000
"""A wall clock is stepped by as much as this, ahead or back."""
CONTROL = (FaultKind.CONTROL_DIES, FaultKind.CONTROL_MACHINE_DIES)
CUTS = {FaultKind.CUT: (UP, DOWN), FaultKind.CUT_UP: (UP,), FaultKind.CUT_DOWN: (DOWN,)}


class FaultInjector:
    """Begins and ends the faults of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._at_work: list[Fault] = []
        self._disturbed_at: dict[str, int] = {}

    def begin(self, fault: Fault) -> None:
        world, node = self._world, fault.node
        world.note(node or "grid", f"{fault.kind}, for {fault.lasts_ms / 1000:g} s")
        self._at_work.append(fault)
        self._disturb_until_now(fault)
        match fault.kind:
            case FaultKind.AGENT_DIES:
                world.end_agent(node, with_machine=False)
            case FaultKind.AGENT_LIES:
                world.checker.liars.add(node)
                world.machines[node].lies = True
            case FaultKind.MACHINE_DIES:
                self._power_off(node)
            case FaultKind.CONTROL_DIES | FaultKind.CONTROL_MACHINE_DIES:
                self._end_control(with_machine=fault.kind is FaultKind.CONTROL_MACHINE_DIES)
            case FaultKind.CUT | FaultKind.CUT_UP | FaultKind.CUT_DOWN:
                for direction in CUTS[fault.kind]:
                    world.network.block(node, direction)
            case FaultKind.DIRECTORY_LOST:
                world.join_again(node)
            case FaultKind.DRAINED:
                if world.control.is_up:
                    world.control.handle(NodeDrained(node))
            case _:
                self._set(fault)

    def end(self, fault: Fault) -> None:
        world, node = self._world, fault.node
        world.note(node or "grid", f"no more: {fault.kind}")
        self._at_work.remove(fault)
        self._disturb_until_now(fault)
        match fault.kind:
            case FaultKind.AGENT_DIES:
                world.start_agent(node)
            case FaultKind.AGENT_LIES:
                self._make_honest(node)
            case FaultKind.MACHINE_DIES:
                self._power_on(node)
            case FaultKind.CONTROL_DIES | FaultKind.CONTROL_MACHINE_DIES:
                self._start_control(fault)
            case FaultKind.CUT | FaultKind.CUT_UP | FaultKind.CUT_DOWN:
                for direction in CUTS[fault.kind]:
                    world.network.unblock(node, direction)
            case FaultKind.DIRECTORY_LOST:
                pass
            case FaultKind.DRAINED:
                world.users.submit(AgentRequested(node, True))
            case _:
                self._set(fault)

    def undisturbed_ms(self, node: str) -> int:
        """For how long nothing has happened that may keep the hold of a node from being renewed."""
        if any(fault.node in ("", node) and fault.kind not in HARMLESS for fault in self._at_work):
            return 0
        since = max(self._disturbed_at.get(node, 0), self._disturbed_at.get("", 0))
        return self._world.queue.now - since

    def _disturb_until_now(self, fault: Fault) -> None:
        if fault.kind not in HARMLESS:
            self._disturbed_at[fault.node] = self._world.queue.now

    def keeps_down(self, node: str) -> bool:
        """Whether a fault keeps the agent of a node from running."""
        return self._is_at_work(node, FaultKind.AGENT_DIES) or self._keeps_off(node)

    def _keeps_off(self, node: str) -> bool:
        is_local = node == self._world.scenario.local
        return self._is_at_work(node, FaultKind.MACHINE_DIES) or (is_local and self._is_at_work("", CONTROL[1]))

    def _is_at_work(self, node: str, *kinds: FaultKind) -> bool:
        return any(fault.node == node and fault.kind in kinds for fault in self._at_work)

    # ------------------------------------------------------------------ what is worse while it lasts

    def _set(self, fault: Fault) -> None:
        """Have everything as bad as the strongest fault of this kind that is at work makes it."""
        world, node = self._world, fault.node
        same = [one.strength for one in self._at_work if (one.kind, one.node) == (fault.kind, node)]
        strength = max(same, default=None)
        match fault.kind:
            case FaultKind.DISK_FULL:
                world.control.disk_is_full = strength is not None
            case FaultKind.DISK_HANGS:
                world.control.disk_hangs = strength is not None
            case FaultKind.NODE_DISK_FULL:
                world.machines[node].fill_disk(strength is not None)
            case FaultKind.DISK_SLOW:
                world.control.disk_slowness = 1 if strength is None else 2 + round(500 * strength)
            case FaultKind.SLOW_NODE:
                world.machines[node].slowness = 1 if strength is None else 2 + round(18 * strength)
            case FaultKind.CLOCK_SKEWED:
                world.machines[node].skew(0.0 if strength is None else 2 * strength - 1)
            case FaultKind.STARTS_NOTHING:
                self._starts_nothing(node, strength)
            case FaultKind.SIGTERM_IGNORED:
                world.machines[node].ignores_sigterm = strength is not None
            case FaultKind.CLOCK_STEPPED:
                world.machines[node].step_wall_clock(0 if strength is None else round((2 * strength - 1) * STEP_MS))
            case FaultKind.OWNER:
                self._owner(node, strength)
            case FaultKind.DISK_FLOODED:
                world.machines[node].flood_disk(strength is not None)
            case FaultKind.READERS:
                world.control.set_readers(0 if strength is None else round(MAX_READERS * strength))
            case FaultKind.AGENT_STOPPED | FaultKind.SHIMS_STOPPED | FaultKind.WATCHDOGS_STOPPED:
                self._stop_watchdogs(node)
            case _:
                self._disturb(fault.kind, node, strength)

    def _disturb(self, kind: FaultKind, node: str, strength: float | None) -> None:
        route = self._world.network.routes[node]
        match kind:
            case FaultKind.SLOW_LINK:
                route.max_delay_ms = MAX_DELAY_MS if strength is None else MAX_DELAY_MS + round(5_000 * strength)
            case FaultKind.LOSSY:
                route.lose = 0.05 * (strength or 0.0)
            case FaultKind.REPEATING:
                route.repeat = 0.3 * (strength or 0.0)
            case FaultKind.SCRAMBLED:
                route.scrambled = strength is not None

    def _owner(self, node: str, strength: float | None) -> None:
        owner = Owner.AWAY if strength is None else Owner.CPU if strength < 0.6 else Owner.MEMORY
        self._world.machines[node].owner = owner
        agent = self._world.agents.get(node)
        if agent is not None and agent.alive:
            agent.observe_owner_soon()

    def _stop_watchdogs(self, node: str) -> None:
        """Have agent and shims of a node stopped, or going on, as all faults that are at work want it."""
        both = self._is_at_work(node, FaultKind.WATCHDOGS_STOPPED)
        agent = self._world.agents.get(node)
        if agent is not None and agent.alive:
            agent.set_stopped(both or self._is_at_work(node, FaultKind.AGENT_STOPPED))
        self._world.machines[node].stop_shims(both or self._is_at_work(node, FaultKind.SHIMS_STOPPED))

    def _starts_nothing(self, node: str, strength: float | None) -> None:
        """Its spawner stands still, or (a strong fault) its agent ignores orders about starts and stops."""
        machine = self._world.machines[node]
        machine.ignores_starts = strength is not None and strength >= IGNORES_FROM
        machine.stall_spawner(strength is not None and strength < IGNORES_FROM)

    # ------------------------------------------------------------------ power and processes

    def _make_honest(self, node: str) -> None:
        """The agent that lied is replaced by an honest one, which finds what there is."""
        if not self._is_at_work(node, FaultKind.AGENT_LIES):
            self._world.machines[node].lies = False
            self._world.end_agent(node, with_machine=False)
            self._world.start_agent(node)

    def _power_off(self, node: str) -> None:
        if self._world.machines[node].is_on:
            self._world.end_agent(node, with_machine=True)
            self._world.machines[node].power_off()

    def _power_on(self, node: str) -> None:
        if not self._keeps_off(node):
            self._world.machines[node].power_on()
            self._world.queue.after(AGENT_STARTS_MS, lambda: self._world.start_agent(node))

    def _end_control(self, *, with_machine: bool) -> None:
        """On the control plane's own machine an agent lives and dies with it."""
        world, local = self._world, self._world.scenario.local
        if local and with_machine:
            self._power_off(local)
        if world.control.is_up:
            if local:
                world.end_agent(local, with_machine=with_machine)
            world.control.crash(with_machine=with_machine)

    def _start_control(self, fault: Fault) -> None:
        """The next control plane; one whose machine was restarted may have a clock that is far ahead."""
        world, local = self._world, self._world.scenario.local
        if fault.kind is FaultKind.CONTROL_MACHINE_DIES:
            if local:
                self._power_on(local)
            if fault.strength > JUMPS_FROM:
                world.control.clock_ahead_ms += round(JUMP_MS * (fault.strength - JUMPS_FROM))
        if not self._is_at_work("", *CONTROL) and not world.control.is_up:
            world.control.start()
            if local:
                world.start_agent(local)


class MessageMutator:
    """Lies of an agent: its messages with one field changed, within the types of the wire. `names` are nodes and
    attempts, its own and others, that it may speak of."""

    def __init__(self, random: Random, names: tuple[str, ...]) -> None:
        self._random = random
        self._names = names

    def mutate(self, message: FromAgent) -> FromAgent:
        """The message with one field changed; as it was where the change does not fit on the wire."""
        try:
            return decode_from_agent(encode(self._struct(message)))
        except (ProtocolError, OverflowError):
            return message

    def _struct(self, value: Any) -> Any:
        """One field of it changed."""
        info = inspect.type_info(type(value))
        assert isinstance(info, inspect.StructType)
        field = self._random.choice(info.fields)
        return msgspec.structs.replace(value, **{field.name: self._value(field.type, getattr(value, field.name))})

    def _value(self, kind: inspect.Type, value: Any) -> Any:
        """Another value of a type."""
        random = self._random
        match kind:
            case inspect.UnionType():
                return self._value(random.choice(kind.types), value)
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return not value
            case inspect.IntType():
                least, most = kind.ge if kind.ge is not None else 0, _max_of(kind)
                near = (value or 0) + random.choice((-1, 1, 1_000, 1_000_000))
                return min(max(random.choice((least, most, near, near)), least), most)
            case inspect.StrType():
                return random.choice(("", *self._names, "no such name"))
            case inspect.EnumType():
                return random.choice(list(kind.cls))
            case inspect.VarTupleType():
                some = tuple(one for one in value or () if random.random() < 0.5)
                more = (self._value(kind.item_type, None),) if random.random() < 0.5 else ()
                return (*some, *more)
            case inspect.StructType() if isinstance(value, Struct):
                return self._struct(value)
        return value


def _max_of(kind: inspect.IntType) -> int:
    """The most that a number may be."""
    return kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else MAX_NUMBER
