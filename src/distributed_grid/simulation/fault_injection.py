"""Faults at work: what each kind does to the machines, the network and the control plane, and how that ends.

Rule 1: faults of one kind may overlap. The strongest counts while it lasts, and what they keep down comes back with the
last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_grid.domain.events import NodeDrained, NodeWanted
from distributed_grid.simulation.faults import Fault, FaultKind
from distributed_grid.simulation.model.machine import Owner
from distributed_grid.simulation.model.network import DOWN, MAX_DELAY_MS, UP

if TYPE_CHECKING:
    from distributed_grid.simulation.world import World

AGENT_STARTS_MS = 2_000
JUMPS_FROM, JUMP_MS = 0.7, 3_600_000
"""From this strength on, a machine that is started again has a clock that is ahead, by part of this."""
CONTROL = (FaultKind.CONTROL_DIES, FaultKind.CONTROL_MACHINE_DIES)
CUTS = {FaultKind.CUT: (UP, DOWN), FaultKind.CUT_UP: (UP,), FaultKind.CUT_DOWN: (DOWN,)}


class FaultInjector:
    """Begins and ends the faults of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._at_work: list[Fault] = []

    def begin(self, fault: Fault) -> None:
        world, node = self._world, fault.node
        world.note(node or "grid", f"{fault.kind}, for {fault.lasts_ms / 1000:g} s")
        self._at_work.append(fault)
        match fault.kind:
            case FaultKind.AGENT_DIES:
                world.end_agent(node, with_machine=False)
            case FaultKind.MACHINE_DIES:
                self._power_off(node)
            case FaultKind.CONTROL_DIES | FaultKind.CONTROL_MACHINE_DIES:
                self._end_control(with_machine=fault.kind is FaultKind.CONTROL_MACHINE_DIES)
            case FaultKind.CUT | FaultKind.CUT_UP | FaultKind.CUT_DOWN:
                for direction in CUTS[fault.kind]:
                    world.network.block(node, direction)
            case FaultKind.DRAINED:
                if world.control.is_up:
                    world.control.handle(NodeDrained(node))
            case _:
                self._set(fault)

    def end(self, fault: Fault) -> None:
        world, node = self._world, fault.node
        world.note(node or "grid", f"no more: {fault.kind}")
        self._at_work.remove(fault)
        match fault.kind:
            case FaultKind.AGENT_DIES:
                world.start_agent(node)
            case FaultKind.MACHINE_DIES:
                self._power_on(node)
            case FaultKind.CONTROL_DIES | FaultKind.CONTROL_MACHINE_DIES:
                self._start_control(fault)
            case FaultKind.CUT | FaultKind.CUT_UP | FaultKind.CUT_DOWN:
                for direction in CUTS[fault.kind]:
                    world.network.unblock(node, direction)
            case FaultKind.DRAINED:
                world.users.want(NodeWanted(node, True))
            case _:
                self._set(fault)

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
            case FaultKind.DISK_SLOW:
                world.control.disk_slowness = 1 if strength is None else 2 + round(500 * strength)
            case FaultKind.SLOW_NODE:
                world.machines[node].slowness = 1 if strength is None else 2 + round(18 * strength)
            case FaultKind.CLOCK_SKEWED:
                world.machines[node].skew(0.0 if strength is None else 2 * strength - 1)
            case FaultKind.OWNER:
                self._owner(node, strength)
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

    # ------------------------------------------------------------------ power and processes

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
