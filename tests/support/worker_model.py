"""Workers in virtual time: the deciders, a stand-in of a cloud, and a control plane that can die between any two steps.

What the reconciler does with threads is done here one call at a time: record, call, report. A crash loses everything
but the stored rows. A call whose answer is lost may take its effect later, within the deadline of a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from distributed_grid.domain.events import (
    Event,
    HeartbeatReceived,
    NodeDeclared,
    StrayInstanceFound,
    WallTimePassed,
    WorkerAsked,
    WorkerRequested,
    WorkerTerminationRequested,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Spending, Worker, WorkerResources, WorkerRules
from distributed_grid.errors import GridError, NoCapacity, Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerOffer, WorkerOrder
from distributed_grid.reactor import step, step_through
from distributed_grid.reactor.effects import CreateWorker, worker_effects
from distributed_grid.scheduling.scaling.budget import DAY_MS, HOUR_MS
from distributed_grid.server.workers import provider_calls
from distributed_grid.server.workers.provider_calls import first_fitting, offer_of, other_worker, worker_of
from tests.support.clouds.scripted import GIB, ScriptedCloud
from tests.support.clouds.stand_in import CloudStandIn

T = TypeVar("T")
GRID_ID = "grid-1"
BEGIN_MS = 20_000 * DAY_MS + 22 * HOUR_MS


class ControlPlaneModel:
    """One control plane and one cloud: the deciders that ship, with each call through the adapter that ships.

    `wall_offset_ms` is how far the wall clock is from the grid's own time.
    """

    def __init__(self, rules: WorkerRules, stand_in: Callable[[Callable[[], float]], CloudStandIn], name: str) -> None:
        self.now = BEGIN_MS
        self.wall_offset_ms = 0
        self.rules = rules
        self.name = name
        self.ledger = Ledger([rules])
        self.stand_in = stand_in(lambda: self.now / 1000)
        self.provider = self.stand_in.provider()
        self.number = 0
        self.during_call: Callable[[], None] = lambda: None
        self.late: list[tuple[int, CloudProviderBase, WorkerOrder]] = []
        self.in_flight: set[str] = set()
        self.records: list[Any] = []
        self.refusals: list[str] = []
        self._offers: tuple[int, Sequence[WorkerOffer]] = (0, ())

    @property
    def wall_ms(self) -> int:
        return self.now + self.wall_offset_ms

    def handle(self, event: Event) -> None:
        self.records += step_through(self.ledger, event, self.now).records

    def call(self, function: Callable[[], T]) -> T:
        """Make a call as the daemon does: a foreign error leaves its effect unknown."""
        try:
            return function()
        except GridError:
            raise
        except Exception as failure:
            raise Unreachable(f"{type(failure).__name__}: {failure}") from failure

    def offers(self) -> Sequence[WorkerOffer]:
        """Offers of the provider, at most a minute old; none if it cannot be asked."""
        read_at, found = self._offers
        if self.now - read_at >= 60_000:
            try:
                found = self.call(self.provider.offers)
            except GridError:
                return ()
            self._offers = (self.now, found)
        return found

    def new_id(self) -> str:
        self.number += 1
        return f"worker-{self.number}"

    def want(self, worker_type: str = "cpu") -> str:
        """Ask for a worker; its id, whether it was refused or not."""
        worker_id = self.new_id()
        found = first_fitting(self.ledger, self.name, self.offers(), worker_type, WorkerResources(), now=self.now)
        if isinstance(found, list):
            return ""
        worker = worker_of(found, self.name, WorkerResources(), by="ada", worker_id=worker_id)
        try:
            self.handle(WorkerRequested(worker, self.wall_ms))
        except GridError as refusal:
            self.refusals.append(str(refusal))
        return worker.id

    def terminate(self, worker_id: str) -> None:
        if worker_id in self.ledger.workers:
            self.handle(WorkerTerminationRequested(worker_id, "ada", "asked", self.wall_ms, force=True))

    # ------------------------------------------------------------------ calls

    def perform(self, *, dies_at: str = "", during_call: Callable[[], None] = lambda: None) -> None:
        """Do what is pending; where it `dies_at` a step ("recorded", "called"), the control plane starts anew."""
        self.during_call = during_call
        for effect in worker_effects(self.ledger, self.now):
            worker = effect.worker
            if worker.id in self.in_flight or worker.id not in self.ledger.workers:
                continue
            try:
                if isinstance(effect, CreateWorker):
                    self._create(worker, dies_at)
                else:
                    self._terminate(worker, dies_at)
            except _DiedError:
                self.restart()
                return

    def order_for(self, worker: Worker) -> WorkerOrder:
        environ = {"GRID_JOIN": f"token-of-{worker.id}"}
        return WorkerOrder(worker.id, GRID_ID, offer_of(worker), worker.resources, environ)

    def _create(self, worker: Worker, dies_at: str) -> None:
        self.handle(WorkerAsked(worker.id))
        worker = self.ledger.workers[worker.id]
        if dies_at == "recorded":
            raise _DiedError
        order = self.order_for(worker)
        waiting = self.stand_in.faults.waiting.get("create") or [""]
        if waiting[0] == "late":
            waiting.pop(0)
            self.late.append((self.now + self.rules.call_ms, self.provider, order))
            self.in_flight.add(worker.id)
            self.handle(provider_calls.creation_failure(worker, TimeoutError("no answer"), self.wall_ms))
            return
        try:
            made = self.call(lambda: self.provider.create(order))
        except GridError as failure:
            event = provider_calls.creation_failure(worker, failure, self.wall_ms, self._instead(worker, failure))
        else:
            event = provider_calls.creation_event(worker, made, self.wall_ms)
        if dies_at == "called":
            raise _DiedError
        self.during_call()
        self.handle(event)

    def _instead(self, worker: Worker, failure: GridError) -> Worker | None:
        if not isinstance(failure, NoCapacity):
            return None
        closed = provider_calls.closed_scope(worker, failure)
        other = other_worker(self.ledger, worker, self.offers(), closed, self.now, self.wall_ms)
        return None if other is None else replace(other, id=self.new_id())

    def _terminate(self, worker: Worker, dies_at: str) -> None:
        try:
            self.call(lambda: self.provider.terminate(worker.id, GRID_ID))
            found = self.call(lambda: self.provider.describe(worker.id, GRID_ID))
        except GridError as failure:
            event = provider_calls.termination_failure(worker, failure)
        else:
            is_gone = found is None and self.provider.is_consistent
            event = provider_calls.termination_event(worker, found, self.wall_ms, is_gone=is_gone)
        if dies_at in ("recorded", "called"):
            raise _DiedError
        self.handle(event)

    def compare(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """List the cloud, then bring the ledger in line, and end own machines without a row. Calls made `meanwhile`
        happens between the provider's answer and its handling."""
        asked_at = self.now
        try:
            found = self.call(lambda: self.provider.list(GRID_ID))
        except GridError:
            return
        meanwhile()
        ours = [one for one in found if one.grid_id == GRID_ID]
        self.handle(provider_calls.list_event(self.name, asked_at, ours, self.wall_ms))
        for one in provider_calls.stray_instances(ours, self.ledger.workers, self.rules):
            if one.worker_id in self.in_flight:
                continue
            self.handle(StrayInstanceFound(self.name, one.worker_id, one.instance))
            with contextlib.suppress(GridError):
                self.call(lambda one=one: self.provider.terminate(one.worker_id, one.grid_id))

    # ------------------------------------------------------------------ time

    def pass_time(self, ms: int) -> None:
        """Let time pass, with the checks that the daemon makes."""
        until = self.now + ms
        while self.now < until:
            self.now = min(self.now + max(ms // 4, 1000), until)
            self.make_late_calls()
            self.check()

    def make_late_calls(self) -> None:
        """The creations that had no answer take their effect now, if their deadline has passed."""
        for one in [one for one in self.late if one[0] <= self.now]:
            self.late.remove(one)
            _, provider, order = one
            self.in_flight.discard(order.worker_id)
            faults, self.stand_in.faults.waiting = self.stand_in.faults.waiting, {}
            with contextlib.suppress(GridError):
                self.call(lambda order=order, provider=provider: provider.create(order))
            self.stand_in.faults.waiting = faults

    def check(self) -> None:
        self.handle(WallTimePassed(self.wall_ms))

    def restart(self) -> None:
        """A new process with what is stored; calls that are under way may still have their effect."""
        rows = self.ledger.rows(durable_only=True)
        self.ledger = Ledger(decode_row(row.kind, encode_row(row)) for row in rows)
        self.provider = self.stand_in.provider()
        self.in_flight = set()
        self._offers = (0, ())

    def states(self) -> dict[str, WorkerState]:
        return {worker.id: worker.state for worker in self.ledger.workers.values()}


class WorkerModel(ControlPlaneModel):
    """The same with the scripted cloud."""

    def __init__(
        self, rules: WorkerRules, *, visible_after: float = 0.0, stops_in: float = 0.0, forgets: bool = False
    ) -> None:
        def make(clock: Callable[[], float]) -> ScriptedCloud:
            self.cloud = ScriptedCloud(clock, visible_after=visible_after, stops_in=stops_in, forgets=forgets)
            return self.cloud

        super().__init__(rules, make, "scripted")

    def join(self) -> None:
        """The agents of the machines that there are are heard."""
        for machine in self.cloud.existing():
            if self.states().get(machine["worker_id"]) in (WorkerState.ASKED, WorkerState.BOOTING):
                self.handle(NodeDeclared(Node(name=machine["worker_id"], capacity=Capacity(2000, GIB), host="joined")))
                self.handle(HeartbeatReceived(name=machine["worker_id"], usage=Usage()))

    def settle(self) -> None:
        """End everything, with nothing going wrong any more, until nothing is left to do."""
        self.cloud.faults.clear()
        for worker_id in list(self.ledger.workers):
            self.terminate(worker_id)
        for _ in range(60):
            self.perform()
            self.compare()
            self.pass_time(self.rules.consistency_ms)
            if not self.ledger.workers and not self.late:
                return


class _DiedError(Exception):
    """The control plane was killed here."""


def many_workers(count: int, state: WorkerState) -> Ledger:
    """So many workers that have been in this state since `BEGIN_MS`; those that end are nodes, too."""
    rules = WorkerRules(budget_per_hour_micro=10**12, budget_per_day_micro=10**12)
    ledger = Ledger(
        [rules, Spending(provider="scripted", day=BEGIN_MS // (24 * HOUR_MS), spent_micro=0, as_of_ms=BEGIN_MS)]
    )
    for number in range(count):
        ledger.apply(
            [
                Worker(
                    id=f"worker-{number}",
                    provider="scripted",
                    worker_type="cpu",
                    resources=WorkerResources(2000, GIB),
                    created_at_ms=BEGIN_MS,
                    offer="small-a",
                    price_micro=100_000,
                    state=state,
                    asked_at_ms=BEGIN_MS,
                    booted_at_ms=BEGIN_MS,
                    accepted_at_ms=BEGIN_MS,
                    terminate_at_ms=BEGIN_MS,
                    missing=1,
                )
            ]
        )
        if state is WorkerState.TERMINATING:
            node = Node(name=f"worker-{number}", capacity=Capacity(2000, GIB), host="joined")
            step(ledger, NodeDeclared(node), BEGIN_MS)
            step(ledger, HeartbeatReceived(name=node.name, usage=Usage()), BEGIN_MS)
    return ledger
