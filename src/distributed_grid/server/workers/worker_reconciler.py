"""Reconciler of workers: creates and terminates machines as the ledger demands, and compares it with providers' lists.

- A call to create is recorded before it is made, and repeated identically if its answer is lost.
- There is never more than one call at a time about a worker, also if a call has outlived its deadline.
- A provider is listed first, then the ledger is read: a listed machine without a row is terminated, if it carries this
  grid's id and is older than a provider's list may lag.
- Start-up, restart and repair are the same function.
- Each worker has a join token, good once and for its name alone. Its secret is derived from the worker's id and a key
  that only this control plane has (0600): the identical order can be made again after a crash, and no secret is in the
  ledger. The store of tokens has its hash.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from distributed_grid.adapters.clouds.boot_script import DEADLINE_VARIABLE
from distributed_grid.agent.__main__ import JOIN_VARIABLE
from distributed_grid.agent.join_client import EXIT_VARIABLE
from distributed_grid.agent.machine_end import SOURCE_VARIABLE
from distributed_grid.control.grid import Grid
from distributed_grid.control.reconciler import Reconciler
from distributed_grid.domain.events import (
    StrayInstanceFound,
    WallTimePassed,
    WorkerAsked,
    WorkerRulesSet,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.workers import Worker, WorkerRules
from distributed_grid.errors import GridError, NoCapacity, NotFound, Refused, Throttled
from distributed_grid.ports import WorkerOrder
from distributed_grid.posix.private_files import write_private
from distributed_grid.reactor.decision import WorkerAnswer
from distributed_grid.reactor.effects import CreateWorker, WorkerEffect, worker_effects
from distributed_grid.reactor.workers.worker_checks import DAY_ALARM, HOUR_ALARM, core_alarm
from distributed_grid.scheduling.scaling.budget import budget_state, core_budget_key, core_hours, usd
from distributed_grid.server.access.admission import Admission
from distributed_grid.server.workers import provider_calls
from distributed_grid.server.workers.provider_calls import OfferCatalog, offer_of

KEY_FILE = "worker-token.key"


class WorkerJoinTokens:
    """Issues and revokes the join tokens of workers."""

    def __init__(self, folder: Path, admission: Admission) -> None:
        self._path = folder / KEY_FILE
        self._admission = admission
        self._key = b""

    async def is_loopback_only(self) -> bool:
        """True if only this machine can reach the control plane."""
        return (await self._admission.address()).is_loopback_only

    async def issue(self, worker_id: str, ttl_seconds: float) -> str:
        """The text of the worker's token; it lets a node of its name join once."""
        key = await asyncio.to_thread(self._read_key)
        digest = hmac.digest(key, worker_id.encode(), "sha256")
        secret = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        return await self._admission.grant_join(token_id(worker_id), secret, worker_id, ttl_seconds)

    async def revoke(self, worker_id: str) -> None:
        """Revoke the token of a worker, and disconnect a node that joined with it. A second time is harmless."""
        try:
            await self._admission.revoke_join(token_id(worker_id))
        except NotFound:
            return

    def _read_key(self) -> bytes:
        if not self._key:
            try:
                if not self._path.exists():
                    write_private(self._path, secrets.token_bytes(32))
                self._key = self._path.read_bytes()
            except OSError as failure:
                raise GridError(f"cannot use {self._path}: {failure.strerror}") from failure
        return self._key


def token_id(worker_id: str) -> str:
    """The id of a worker's join token; it may be shown."""
    return hashlib.sha256(f"worker {worker_id}".encode()).hexdigest()[:32]


MAX_TICK_SECONDS, IDLE_LIST_SECONDS = 1.0, 300.0
log = logging.getLogger(__name__)


def wall_ms() -> int:
    """The wall clock, for the day of budgets."""
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
        on_alarm: Callable[[str, str], None] = lambda subject, reason: None,
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
        self._tick_seconds = min(MAX_TICK_SECONDS, rules.consistency_ms / 4000)

    async def start(self) -> None:
        await self._grid.handle(WorkerRulesSet(self._rules))
        self._work.start(self._reconcile, self._tick_seconds, "the reconciler of workers")

    async def set_rules(self, rules: WorkerRules) -> None:
        self._rules = rules
        await self._grid.handle(WorkerRulesSet(rules))

    async def stop(self) -> None:
        """Leave everything as it is for the next control plane. Safe to call twice."""
        await self._work.stop()

    def perform(self, effect: WorkerEffect) -> None:
        work = self._create if isinstance(effect, CreateWorker) else self._terminate
        self._work.begin(effect.worker.id, partial(work, effect.worker), effect.worker.id)

    # ------------------------------------------------------------------ creating

    async def _create(self, worker: Worker) -> None:
        """Create a machine: record the call, make it, report its outcome."""
        try:
            answer = await self._grid.handle(WorkerAsked(worker.id))
        except Refused:
            return  # it is not wanted any more
        assert isinstance(answer, WorkerAnswer)
        worker = answer.worker
        try:
            calls = await self._catalog.calls(worker.provider)
            ttl_seconds = (self._rules.launch_ms + worker.queue_ms + self._rules.join_ms) / 1000
            token = await self._tokens.issue(worker.id, ttl_seconds)
            environ = {
                JOIN_VARIABLE: token,
                EXIT_VARIABLE: f"{self._rules.exit_ms / 1000:g}",
                DEADLINE_VARIABLE: f"{ttl_seconds:.0f}",
            }
            if calls.provider.notice_source:
                environ[SOURCE_VARIABLE] = calls.provider.notice_source
            order = WorkerOrder(worker.id, self._grid_id(), offer_of(worker), worker.resources, environ)
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
            await self._grid.handle_with_retry(provider_calls.creation_event(worker, made, wall_ms()))

    async def _report_failure(self, worker: Worker, failure: Exception) -> None:
        other = None
        if isinstance(failure, NoCapacity):
            closed = provider_calls.closed_scope(worker, failure)
            other = await self._catalog.alternative(worker, closed, wall_ms())
        log.warning("worker %s was not made: %s", worker.id, failure)
        await self._grid.handle_with_retry(provider_calls.creation_failure(worker, failure, wall_ms(), other))

    # ------------------------------------------------------------------ terminating

    async def _terminate(self, worker: Worker) -> None:
        """Revoke the token of a machine, terminate it, and check that it is gone."""
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
            machine = await calls.call(f"describe {worker.id}", lambda: provider.describe(worker.id, grid_id))
        except Exception as failure:  # it stays, and is terminated again: it may still cost money
            await self._report_unterminated(worker, failure)
            await call.settled()
            return
        is_late = worker.accepted_at_ms and self._grid.now_ms() - worker.accepted_at_ms > self._rules.launch_ms
        problem = f"it is still {machine.state} long after its termination" if is_late and machine is not None else ""
        if problem:
            log.error("worker %s: %s; it goes on costing money", worker.id, problem)
        is_gone = machine is None and provider.is_consistent
        done = provider_calls.termination_event(worker, machine, wall_ms(), is_gone=is_gone, problem=problem)
        await self._grid.handle_with_retry(done)

    async def _revoke(self, worker_id: str) -> None:
        """Revoke the join token of a worker; a failure does not stop its termination."""
        try:
            await self._tokens.revoke(worker_id)
        except GridError as failure:
            log.warning("the join token of %s could not be revoked: %s", worker_id, failure)

    async def _report_unterminated(self, worker: Worker, failure: Exception) -> None:
        """Log and record a failed termination, with an alarm for the first one; it is tried again."""
        reason = f"worker {worker.id} could not be terminated, it goes on costing money: {failure}"
        log.error("%s", reason)
        if not worker.tries:
            self._on_alarm(worker.id, reason)
        await self._grid.handle_with_retry(provider_calls.termination_failure(worker, failure))

    # ------------------------------------------------------------------ comparing

    async def _reconcile(self) -> None:
        """Check the deadlines and budgets of workers, perform their effects, and compare with due lists."""
        if self._grid.ledger.workers or self._grid.ledger.offer_closures:
            before = await self._grid.read(budget_alarms)
            await self._grid.handle_with_retry(WallTimePassed(wall_ms()))
            after = await self._grid.read(budget_alarms)
            for subject in after.keys() - before.keys():
                self._on_alarm(subject, after[subject])
            effects: list[WorkerEffect] = await self._grid.read(worker_effects)
            for effect in effects:
                self.perform(effect)
        used, providers = await self._grid.read(
            lambda ledger, now: ({worker.provider for worker in ledger.workers.values()}, list(ledger.spending))
        )
        time_now = asyncio.get_running_loop().time()
        for provider in providers:  # those that have or had workers
            pause = self._rules.consistency_ms / 3000 if provider in used else IDLE_LIST_SECONDS
            if time_now - self._listed_at.get(provider, float("-inf")) >= pause:
                self._listed_at[provider] = time_now
                key = f"list of {provider}"
                self._work.begin(key, partial(self.compare, provider), key)

    async def compare(self, provider_name: str) -> None:
        """Bring the ledger in line with a provider's list, and terminate machines of this grid without a row."""
        grid_id, asked_at = self._grid_id(), self._grid.now_ms()
        try:
            calls = await self._catalog.calls(provider_name)
            machines = await calls.call("list", lambda: calls.provider.list(grid_id))
        except Exception as failure:  # the next list comes soon
            log.warning("%s cannot be listed: %s", provider_name, failure)
            return
        ours = [machine for machine in machines if machine.grid_id == grid_id]
        before = await self._grid.read(lambda ledger, now: frozenset(ledger.workers))
        await self._grid.handle_with_retry(provider_calls.list_event(provider_name, asked_at, ours, wall_ms()))
        known = await self._grid.read(lambda ledger, now: frozenset(ledger.workers))
        for worker_id in before - known:
            await self._revoke(worker_id)
        for stray in provider_calls.stray_instances(ours, known, self._rules):
            if not self._work.is_under_way(stray.worker_id):
                if stray.worker_id not in self._strays:
                    self._strays.add(stray.worker_id)
                    log.warning("%s has %s, which no worker stands for: terminating it", provider_name, stray.worker_id)
                    await self._grid.handle_with_retry(
                        StrayInstanceFound(provider_name, stray.worker_id, stray.instance)
                    )
                await self._revoke(stray.worker_id)
                calls = await self._catalog.calls(provider_name)
                terminate = partial(calls.provider.terminate, stray.worker_id, stray.grid_id)
                try:
                    await calls.call(f"terminate {stray.worker_id}", terminate)
                except Exception as failure:  # it is found again with the next list
                    log.warning("%s could not be terminated: %s", stray.worker_id, failure)


def budget_alarms(ledger: Ledger, now: int) -> dict[str, str]:
    """The raised alarms about budgets: the text by day or hour."""
    alarms: dict[str, str] = {}
    state = budget_state(ledger, now, wall_ms())
    if (day := ledger.counters.get(DAY_ALARM)) is not None and state.per_day_micro is not None:
        spent, limit = usd(state.spent_micro), usd(state.per_day_micro)
        alarms[f"budget of day {day}"] = f"workers have cost {spent} today, and scaling.budget_per_day is {limit}"
    if ledger.counters.get(HOUR_ALARM) and state.per_hour_micro is not None:
        rate, limit = usd(state.rate_micro), usd(state.per_hour_micro)
        alarms["budget of an hour"] = f"workers cost {rate} an hour, and scaling.budget_per_hour is {limit}"
    for cores in state.cores:
        if (day := ledger.counters.get(core_alarm(cores.provider))) is not None:
            used = f"workers of {cores.provider} have used {core_hours(cores.used_ms):g} core-hours today"
            limit = f"{core_budget_key(cores.provider)} is {cores.limit_milli / 1000:g}"
            alarms[f"core-hours of {cores.provider} on day {day}"] = f"{used}, and {limit}"
    return alarms
