"""One simulated world: machines, a control plane, users and faults, all out of one seed.

A run has two parts: a stretch with faults, and a quiet one in which everything has to come to its end.
"""

from __future__ import annotations

import traceback
from pathlib import PurePath

from msgspec import Struct

from distributed_grid.agent.orders import OrderExecutor
from distributed_grid.simulation.fault_injection import FaultInjector
from distributed_grid.simulation.faults import Fault
from distributed_grid.simulation.invariant_checker import InvariantChecker, InvariantViolated
from distributed_grid.simulation.model.agent import SimulatedAgent, SimulatedUplink
from distributed_grid.simulation.model.control_plane import ControlPlane
from distributed_grid.simulation.model.event_queue import EventQueue, SimulatedTask
from distributed_grid.simulation.model.machine import Machine
from distributed_grid.simulation.model.network import Network, SimulatedLink
from distributed_grid.simulation.model.users import Users
from distributed_grid.simulation.run_log import RunLog
from distributed_grid.simulation.scenario import Scenario

BEGIN_MS = 1_000_000_000
"""The grid's time at the beginning of every story; 0 has a meaning of its own in the ledger."""
STEP_MS = 2_000
SETTLE_MS = 240_000
"""What the slowest of the rest takes: nodes that begin to lend again, agents that look for their control plane."""


class Report(Struct, frozen=True):
    """What became of one seed; without a `law` all of them held."""

    seed: int
    law: str
    detail: str
    last: list[str]
    fingerprint: str
    visited: dict[str, int]
    accepted: int
    refused: int
    runs: int
    faults: int
    steps: int
    checks: int
    simulated_ms: int


class World:
    """Everything of one scenario; other machines and agents can be put in, to see that the laws notice."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        machine: type[Machine] = Machine,
        orders: type[OrderExecutor[SimulatedTask]] = OrderExecutor,
        keep_all: bool = False,
    ) -> None:
        self.scenario = scenario
        self.queue = EventQueue(BEGIN_MS)
        self.history = RunLog(keep_all=keep_all)
        self.laws = InvariantChecker(self.note, BEGIN_MS)
        random = scenario.random
        names = tuple(node.name for node in scenario.nodes)
        self.network = Network(self.queue, random, names)
        if scenario.local:
            route = self.network.routes[scenario.local]
            route.min_delay_ms = route.max_delay_ms = 0
        self.control = ControlPlane(
            self.queue,
            random,
            self.network,
            scenario.nodes,
            policy=scenario.policy,
            rules=scenario.rules,
            observer=self.laws,
        )
        self.users = Users(self.queue, self.control, self.laws, self.note)
        self.machines = {node.name: machine(node, self.queue, random, self.laws) for node in scenario.nodes}
        self.agents: dict[str, SimulatedAgent] = {}
        self._orders = orders
        self.trouble = FaultInjector(self)

    def note(self, who: str, what: str) -> None:
        self.history.note(self.queue.now - BEGIN_MS, who, what)

    def run(self) -> Report:
        """Live through the whole scenario; a broken law, or a bug, ends it."""
        try:
            self._live()
        except InvariantViolated as broken:
            return self._report(broken.law, broken.detail)
        except Exception as bug:  # whatever a decision raises that is no refusal
            place = traceback.extract_tb(bug.__traceback__)[-1]
            where = f"{PurePath(place.filename).name}, line {place.lineno}"
            return self._report("nothing fails but by refusal", f"{bug!r} in {where}")
        return self._report("", "")

    def _live(self) -> None:
        self.control.start()
        for name in self.machines:
            self.start_agent(name)
        self.users.plan(self.scenario.wishes, BEGIN_MS)
        for fault in self.scenario.faults:
            self._plan(fault)
        quiet = BEGIN_MS + self.scenario.quiet_ms
        while self.queue.run_next(quiet):
            pass
        self.note("world", "everything works again")
        end = quiet + self._patience_ms()
        while self.queue.now < end and not self._is_settled:
            stop = min(self.queue.now + STEP_MS, end)
            while self.queue.run_next(stop):
                pass
        self.laws.settled(self.control.now)

    def _plan(self, fault: Fault) -> None:
        self.queue.at(BEGIN_MS + fault.at_ms, lambda: self.trouble.begin(fault))
        self.queue.at(BEGIN_MS + fault.at_ms + fault.lasts_ms, lambda: self.trouble.end(fault))

    def _patience_ms(self) -> int:
        """How long what is left may take when nothing breaks any more: all of it twice, one after the other."""
        ledger = self.control.ledger
        left = sum(wish.lasts_ms for wish in self.scenario.wishes if wish.uid in ledger.by_request)
        held = [lease.ends_at_ms - self.control.now for lease in ledger.leases.values() if lease.ends_at_ms]
        return SETTLE_MS + 3 * max(node.hold_ms for node in self.scenario.nodes) + 2 * left + max([0, *held])

    @property
    def _is_settled(self) -> bool:
        return not self.users.waiting and self.laws.unsettled(self.control.now) is None

    # ------------------------------------------------------------------ agents and their links

    def dial(self, node: str, uplink: SimulatedUplink) -> SimulatedLink | None:
        """A link for an agent, where the control plane is up and can be reached."""
        if not self.control.is_up or not self.network.routes[node].is_open:
            return None
        return self.network.connect(node, uplink, self.control.gateway)

    def start_agent(self, name: str) -> None:
        """Start the agent of a node, unless something keeps it down."""
        alive = self.agents.get(name)
        if (alive is not None and alive.alive) or self.trouble.keeps_down(name):
            return
        if name == self.scenario.local and not self.control.is_up:
            return
        self.note(name, "the agent starts")
        self.agents[name] = SimulatedAgent(self.machines[name], self, self._orders)
        self.agents[name].start()

    def end_agent(self, name: str, *, with_machine: bool) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.alive:
            agent.die(with_machine=with_machine)

    # ------------------------------------------------------------------ the end

    def _report(self, law: str, detail: str) -> Report:
        return Report(
            self.scenario.seed,
            law,
            detail,
            self.history.lines,
            self.history.fingerprint,
            dict(self.laws.visited),
            self.users.accepted,
            self.users.refused,
            len(self.laws.ran),
            len(self.scenario.faults),
            self.laws.steps,
            self.laws.checks,
            self.queue.now - BEGIN_MS,
        )
