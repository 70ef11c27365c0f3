"""Workers in virtual time: the deciders, a scripted cloud, and a control plane that can die between any two steps.

What the reconciler does with threads is done here one call at a time: record, call, report. A crash loses everything
but the stored rows. A call whose answer is lost may take its effect later, within the deadline of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed_grid.domain.events import (
    Event,
    HeartbeatReceived,
    ListedInstance,
    NodeDeclared,
    WorkerAsked,
    WorkerRequested,
    WorkersChecked,
    WorkersListed,
    WorkerTerminationRequested,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Spending, Worker, WorkerResources, WorkerRules
from distributed_grid.errors import GridError, NoCapacity
from distributed_grid.ports import WorkerOrder
from distributed_grid.reactor import pending_workers, step, step_through
from distributed_grid.reactor.effects import CreateWorker
from distributed_grid.scheduling.scaling.budget import DAY_MS, HOUR_MS
from distributed_grid.server.workers import call_outcomes
from distributed_grid.server.workers.offers import first_fitting, offer_of, worker_of
from tests.support.scripted_provider import GIB, OFFERS, ScriptedCloud

GRID_ID = "grid-1"
BEGIN_MS = 20_000 * DAY_MS + 22 * HOUR_MS


class WorkerModel:
    """One control plane and one cloud. `wall_offset_ms` is how far the wall clock is from the grid's own time."""

    def __init__(
        self, rules: WorkerRules, *, visible_after: float = 0.0, stops_in: float = 0.0, forgets: bool = False
    ) -> None:
        self.now = BEGIN_MS
        self.wall_offset_ms = 0
        self.rules = rules
        self.ledger = Ledger([rules])
        self.cloud = ScriptedCloud(
            lambda: self.now / 1000, visible_after=visible_after, stops_in=stops_in, forgets=forgets
        )
        self.number = 0
        self.during_call: Callable[[], None] = lambda: None
        self.late: list[tuple[int, WorkerOrder]] = []
        self.records: list[Any] = []
        self.refusals: list[str] = []

    @property
    def wall_ms(self) -> int:
        return self.now + self.wall_offset_ms

    def handle(self, event: Event) -> None:
        self.records += step_through(self.ledger, event, self.now).records

    def want(self, worker_type: str = "cpu") -> str:
        """Ask for a worker; its id, whether it was refused or not."""
        self.number += 1
        found = first_fitting(self.ledger, "scripted", OFFERS, worker_type, WorkerResources(), now=self.now)
        if isinstance(found, list):
            return ""
        worker = worker_of(found, "scripted", WorkerResources(), by="ada", worker_id=f"worker-{self.number}")
        try:
            self.handle(WorkerRequested(worker, self.wall_ms))
        except GridError as refusal:
            self.refusals.append(str(refusal))
        return worker.id

    def terminate(self, worker_id: str) -> None:
        if worker_id in self.ledger.workers:
            self.handle(WorkerTerminationRequested(worker_id, "ada", "asked", self.wall_ms, force=True))

    def perform(self, *, dies_at: str = "", during_call: Callable[[], None] = lambda: None) -> None:
        """Do what is pending; where it `dies_at` a step ("recorded", "called"), the control plane starts anew."""
        self.during_call = during_call
        for effect in pending_workers(self.ledger, self.now):
            worker = effect.worker
            try:
                if isinstance(effect, CreateWorker):
                    self._create(worker, dies_at)
                else:
                    self._terminate(worker, dies_at)
            except _DiedError:
                self.restart()
                return

    def _create(self, worker: Worker, dies_at: str) -> None:
        self.handle(WorkerAsked(worker.id))
        worker = self.ledger.workers[worker.id]
        if dies_at == "recorded":
            raise _DiedError
        order = WorkerOrder(worker.id, GRID_ID, offer_of(worker), worker.resources, {})
        if (self.cloud.faults.get("create") or [""])[0] == "late":
            self.cloud.faults["create"].pop(0)
            self.late.append((self.now + self.rules.call_ms, order))
            self.handle(call_outcomes.not_created(worker, TimeoutError("no answer"), self.wall_ms))
            return
        try:
            made = self.cloud.create(order)
        except Exception as failure:  # whatever the script says
            event = call_outcomes.not_created(worker, failure, self.wall_ms, self._instead(worker, failure))
        else:
            event = call_outcomes.created(worker, made, self.wall_ms)
        if dies_at == "called":
            raise _DiedError
        self.during_call()
        self.handle(event)

    def _instead(self, worker: Worker, failure: Exception) -> Worker | None:
        if not isinstance(failure, NoCapacity):
            return None
        self.number += 1
        offers = [offer for offer in OFFERS if offer.id != worker.offer]
        found = first_fitting(self.ledger, "scripted", offers, worker.worker_type, worker.resources, now=self.now)
        if isinstance(found, list):
            return None
        return worker_of(found, "scripted", worker.resources, by="ada", worker_id=f"worker-{self.number}")

    def _terminate(self, worker: Worker, dies_at: str) -> None:
        try:
            self.cloud.terminate(worker.id, GRID_ID)
            found = self.cloud.describe(worker.id, GRID_ID)
        except Exception as failure:  # whatever the script says
            event = call_outcomes.not_terminated(worker, failure)
        else:
            event = call_outcomes.terminated(worker, found, self.wall_ms)
        if dies_at in ("recorded", "called"):
            raise _DiedError
        self.handle(event)

    def join(self) -> None:
        """The agents of the machines that there are are heard."""
        for machine in self.cloud.existing():
            if self.states().get(machine["worker_id"]) in (WorkerState.ASKED, WorkerState.BOOTING):
                self.handle(NodeDeclared(Node(machine["worker_id"], capacity=Capacity(2000, GIB), host="joined")))
                self.handle(HeartbeatReceived(machine["worker_id"], Usage()))

    def compare(self) -> None:
        """List the cloud, then bring the ledger in line, and end what of ours no row stands for."""
        asked_at = self.now
        try:
            listed = self.cloud.list(GRID_ID)
        except Exception:  # whatever the script says
            return
        instances = tuple(ListedInstance(one.worker_id, one.instance, one.state) for one in listed)
        self.handle(WorkersListed("scripted", asked_at, instances, self.wall_ms))

    def pass_time(self, ms: int) -> None:
        """Let time pass, with the checks that the daemon makes."""
        until = self.now + ms
        while self.now < until:
            self.now = min(self.now + max(ms // 4, 1000), until)
            for at, order in [one for one in self.late if one[0] <= self.now]:
                self.late.remove((at, order))
                faults, self.cloud.faults = self.cloud.faults, {}
                self.cloud.create(order)
                self.cloud.faults = faults
            self.check()

    def check(self) -> None:
        self.handle(WorkersChecked(self.wall_ms))

    def restart(self) -> None:
        """A new process with what is stored."""
        rows = self.ledger.rows(durable_only=True)
        self.ledger = Ledger(decode_row(row.kind, encode_row(row)) for row in rows)

    def settle(self) -> None:
        """End everything, with nothing going wrong any more, until nothing is left to do."""
        self.cloud.faults = {}
        for worker_id in list(self.ledger.workers):
            self.terminate(worker_id)
        for _ in range(60):
            self.perform()
            self.compare()
            self.pass_time(self.rules.consistency_ms)
            if not self.ledger.workers and not self.late:
                return

    def states(self) -> dict[str, WorkerState]:
        return {worker.id: worker.state for worker in self.ledger.workers.values()}


class _DiedError(Exception):
    """The control plane was killed here."""


def many_workers(count: int, state: WorkerState) -> Ledger:
    """So many workers that have been in this state since `BEGIN_MS`; those that end are nodes, too."""
    rules = WorkerRules(budget_per_hour_micro=10**12, budget_per_day_micro=10**12)
    ledger = Ledger([rules, Spending("scripted", BEGIN_MS // (24 * HOUR_MS), 0, BEGIN_MS)])
    for number in range(count):
        ledger.apply(
            [
                Worker(
                    f"worker-{number}",
                    "scripted",
                    "cpu",
                    WorkerResources(2000, GIB),
                    BEGIN_MS,
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
            node = Node(f"worker-{number}", capacity=Capacity(2000, GIB), host="joined")
            step(ledger, NodeDeclared(node), BEGIN_MS)
            step(ledger, HeartbeatReceived(node.name, Usage()), BEGIN_MS)
    return ledger
