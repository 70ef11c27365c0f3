"""Reconciler of workers: makes and ends machines as the ledger calls for, and compares it with what providers list.

- A call to create is recorded before it is made, and repeated identically where its answer is lost.
- About one worker there is never more than one call at a time, also where one has outlived its deadline.
- A provider is listed first, the ledger read then: what it lists and no row stands for is ended, if it carries this
  grid's id and is older than a provider's list may lag.
- Start-up, restart and repair are the same function.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from distributed_grid.adapters.clouds.boot_script import DEADLINE_VARIABLE
from distributed_grid.agent.__main__ import JOIN_VARIABLE
from distributed_grid.agent.join_client import EXIT_VARIABLE
from distributed_grid.agent.machine_end import SOURCE_VARIABLE
from distributed_grid.control.grid import Grid
from distributed_grid.control.reconciler import Reconciler
from distributed_grid.domain.events import (
    Event,
    StrayInstanceFound,
    WallTimePassed,
    WorkerAsked,
    WorkerRulesSet,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.workers import Worker, WorkerRules
from distributed_grid.errors import GridError, NoCapacity, Refused, Throttled
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOrder
from distributed_grid.reactor.decision import WorkerAnswer
from distributed_grid.reactor.effects import CreateWorker, WorkerEffect, worker_effects
from distributed_grid.reactor.workers.worker_checks import DAY_ALARM, HOUR_ALARM, core_alarm
from distributed_grid.scheduling.scaling.budget import budget_state, core_budget_key, core_hours, usd
from distributed_grid.server.workers import provider_calls
from distributed_grid.server.workers.join_tokens import WorkerJoinTokens
from distributed_grid.server.workers.offers import OfferCatalog, offer_of
from distributed_grid.supervision import start_restarted

MAX_TICK_SECONDS, IDLE_LIST_SECONDS = 1.0, 300.0
log = logging.getLogger(__name__)


def wall_ms() -> int:
    """The wall clock: it says which day it is."""
    return time.time_ns() // 1_000_000


class WorkerReconciler:
    """Performs the effects of workers, one call at a time about each, and lists the machines of providers."""

    def __init__(
        self,
        grid: Grid,
        catalog: OfferCatalog,
        tokens: WorkerJoinTokens,
        *,
        rules: WorkerRules,
        grid_id: Callable[[], str],
        on_alarm: Callable[[str, str], None] = lambda about, why: None,
    ) -> None:
        """`on_alarm(subject, reason)` is called when a machine cannot be terminated or a budget is exceeded."""
        self._grid = grid
        self._catalog = catalog
        self._tokens = tokens
        self._rules = rules
        self._grid_id = grid_id
        self._on_alarm = on_alarm
        self._work = Reconciler()
        self._listed_at: dict[str, float] = {}
        self._strays: set[str] = set()
        self._loop: asyncio.Task[None] | None = None
        self._tick_seconds = min(MAX_TICK_SECONDS, rules.consistency_ms / 4000)

    async def start(self) -> None:
        """Begin to reconcile."""
        await self._grid.handle(WorkerRulesSet(self._rules))
        rounds = partial(self._work.run, self._reconcile, self._tick_seconds)
        self._loop = start_restarted(rounds, "the reconciler of workers")

    async def set_rules(self, rules: WorkerRules) -> None:
        """Go by other budgets and times from now on."""
        self._rules = rules
        await self._grid.handle(WorkerRulesSet(rules))

    async def stop(self) -> None:
        """Leave everything as it is; the next one goes on. Safe to call twice."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._loop = None
        await self._work.stop()

    def perform(self, effect: WorkerEffect) -> None:
        work = self._create if isinstance(effect, CreateWorker) else self._terminate
        self._work.begin(effect.worker.id, partial(work, effect.worker), effect.worker.id)

    # ------------------------------------------------------------------ creating

    async def _create(self, worker: Worker) -> None:
        """Have a machine made: recorded first, then asked for, then what came of it."""
        try:
            answer = await self._grid.handle(WorkerAsked(worker.id))
        except Refused:
            return  # nobody wants it any more
        assert isinstance(answer, WorkerAnswer)
        worker = answer.worker
        try:
            calls = await self._catalog.calls(worker.provider)
            order = await self._order(worker, calls.provider.notice_source)
        except GridError as failure:  # nothing was asked for
            await self._report_failure(worker, Throttled(str(failure)))
            return
        call = await calls.begin(f"create {worker.id}", lambda: calls.provider.create(order))
        try:
            made = await call.result()
        except Exception as failure:  # whatever it is: it may have been made, or not
            await self._report_failure(worker, failure)
            await call.settled()
        else:
            await self._handle(provider_calls.creation_event(worker, made, wall_ms()))

    async def _order(self, worker: Worker, notice_source: str) -> WorkerOrder:
        """What is asked of the provider; identical whenever it is asked again."""
        ttl_seconds = (self._rules.launch_ms + worker.queue_ms + self._rules.join_ms) / 1000
        token = await self._tokens.issue(worker.id, ttl_seconds)
        environ = {
            JOIN_VARIABLE: token,
            EXIT_VARIABLE: f"{self._rules.exit_ms / 1000:g}",
            DEADLINE_VARIABLE: f"{ttl_seconds:.0f}",
        }
        if notice_source:
            environ[SOURCE_VARIABLE] = notice_source
        return WorkerOrder(worker.id, self._grid_id(), offer_of(worker), worker.resources, environ)

    async def _report_failure(self, worker: Worker, failure: Exception) -> None:
        other = None
        if isinstance(failure, NoCapacity):
            closed = provider_calls.closed_scope(worker, failure)
            other = await self._catalog.alternative(worker, closed, wall_ms())
        log.warning("worker %s was not made: %s", worker.id, failure)
        await self._handle(provider_calls.creation_failure(worker, failure, wall_ms(), other))

    # ------------------------------------------------------------------ terminating

    async def _terminate(self, worker: Worker) -> None:
        """Have a machine ended, and check whether it is gone; its key is worth nothing from here on."""
        grid_id = self._grid_id()
        await self._revoke(worker.id)
        try:
            calls = await self._catalog.calls(worker.provider)
        except GridError as failure:
            await self._report_unterminated(worker, failure)
            return
        provider = calls.provider
        call = await calls.begin(f"terminate {worker.id}", lambda: provider.terminate(worker.id, grid_id))
        try:
            await call.result()
            found = await calls.call(f"describe {worker.id}", lambda: provider.describe(worker.id, grid_id))
        except Exception as failure:  # it stays, and is ended again: it may still cost money
            await self._report_unterminated(worker, failure)
            await call.settled()
            return
        is_late = worker.accepted_at_ms and self._grid.now_ms() - worker.accepted_at_ms > self._rules.launch_ms
        problem = f"it is still {found.state} long after its termination" if is_late and found is not None else ""
        if problem:
            log.error("worker %s: %s; it goes on costing money", worker.id, problem)
        is_gone = found is None and provider.is_consistent
        await self._handle(provider_calls.termination_event(worker, found, wall_ms(), is_gone=is_gone, problem=problem))

    async def _revoke(self, worker_id: str) -> None:
        """Have the key of a worker be worth nothing; where that fails, the worker is ended all the same."""
        try:
            await self._tokens.revoke(worker_id)
        except GridError as failure:
            log.warning("the join token of %s could not be revoked: %s", worker_id, failure)

    async def _report_unterminated(self, worker: Worker, failure: Exception) -> None:
        """A worker that could not be ended stays in the ledger, is ended again, and that is said loudly."""
        why = f"worker {worker.id} could not be terminated, it goes on costing money: {failure}"
        log.error("%s", why)
        if not worker.tries:
            self._on_alarm(worker.id, why)
        await self._handle(provider_calls.termination_failure(worker, failure))

    async def _handle(self, event: Event) -> None:
        await self._grid.handle_with_retry(event)

    # ------------------------------------------------------------------ comparing

    async def _reconcile(self) -> None:
        """Compare workers with the time, and with each provider's list as often as there is something to learn."""
        if self._grid.ledger.workers or self._grid.ledger.offer_closures:
            before = await self._grid.read(budget_alarms)
            await self._handle(WallTimePassed(wall_ms()))
            after = await self._grid.read(budget_alarms)
            for subject in after.keys() - before.keys():
                self._on_alarm(subject, after[subject])
            effects: list[WorkerEffect] = await self._grid.read(worker_effects)
            for effect in effects:
                self.perform(effect)
        for provider in await self._grid.read(self._to_list):
            self._listed_at[provider] = asyncio.get_running_loop().time()
            key = f"list of {provider}"
            self._work.begin(key, partial(self.compare, provider), key)

    def _to_list(self, ledger: Ledger, now: int) -> list[str]:
        """The providers whose list is due: they have workers, or had some."""
        used = {worker.provider for worker in ledger.workers.values()}
        at = asyncio.get_running_loop().time()
        due = []
        for provider in ledger.spending:
            pause = self._rules.consistency_ms / 3000 if provider in used else IDLE_LIST_SECONDS
            if at - self._listed_at.get(provider, float("-inf")) >= pause:
                due.append(provider)
        return due

    async def compare(self, provider_name: str) -> None:
        """Bring the ledger in line with a provider's list, and end what of ours no row stands for."""
        grid_id, asked_at = self._grid_id(), self._grid.now_ms()
        try:
            calls = await self._catalog.calls(provider_name)
            found = await calls.call("list", lambda: calls.provider.list(grid_id))
        except Exception as failure:  # the next list comes soon
            log.warning("%s cannot be listed: %s", provider_name, failure)
            return
        ours = [one for one in found if one.grid_id == grid_id]
        before = await self._grid.read(lambda ledger, now: frozenset(ledger.workers))
        await self._handle(provider_calls.list_event(provider_name, asked_at, ours, wall_ms()))
        known = await self._grid.read(lambda ledger, now: frozenset(ledger.workers))
        for worker_id in before - known:
            await self._revoke(worker_id)
        for one in provider_calls.stray_instances(ours, known, self._rules):
            await self._end_stray(calls.provider, provider_name, one)

    async def _end_stray(self, provider: CloudProviderBase, name: str, stray: WorkerInstance) -> None:
        if self._work.is_under_way(stray.worker_id):
            return
        if stray.worker_id not in self._strays:
            self._strays.add(stray.worker_id)
            log.warning("%s has %s, which no worker stands for: terminating it", name, stray.worker_id)
            await self._handle(StrayInstanceFound(name, stray.worker_id, stray.instance))
        await self._revoke(stray.worker_id)
        calls = await self._catalog.calls(name)
        try:
            await calls.call(f"terminate {stray.worker_id}", lambda: provider.terminate(stray.worker_id, stray.grid_id))
        except Exception as failure:  # it is found again with the next list
            log.warning("%s could not be terminated: %s", stray.worker_id, failure)


def budget_alarms(ledger: Ledger, now: int) -> dict[str, str]:
    """The alarms about budgets that are raised, by the day or the hour, and what each says."""
    found: dict[str, str] = {}
    state = budget_state(ledger, now, wall_ms())
    if (day := ledger.counters.get(DAY_ALARM)) is not None and state.per_day_micro is not None:
        why = f"workers have cost {usd(state.spent_micro)} today, and scaling.budget_per_day is"
        found[f"budget of day {day}"] = f"{why} {usd(state.per_day_micro)}"
    if ledger.counters.get(HOUR_ALARM) and state.per_hour_micro is not None:
        why = f"workers cost {usd(state.rate_micro)} an hour, and scaling.budget_per_hour is"
        found["budget of an hour"] = f"{why} {usd(state.per_hour_micro)}"
    for one in state.cores:
        if (day := ledger.counters.get(core_alarm(one.provider))) is not None:
            why = f"workers of {one.provider} have used {core_hours(one.used_ms):g} core-hours today, and"
            limit = f"{core_budget_key(one.provider)} is {one.limit_milli / 1000:g}"
            found[f"core-hours of {one.provider} on day {day}"] = f"{why} {limit}"
    return found
