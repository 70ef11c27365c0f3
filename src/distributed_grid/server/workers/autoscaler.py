"""Autoscaler: evaluates scaling at every interval, and has the ledger start and give back workers.

What the provider can start is read first and kept in the ledger, so that a request which only a worker could serve
waits for one. Where workers could not reach this control plane, or the provider cannot be used, nothing is started and
the reason is shown. Without `scaling.provider` it only sets the rules: nothing acts on its own.

For the predictive policy it learns the load that is to be expected from samples of the ledger. Five-minute sums of the
last eight days are in a file of their own; without it, or with a damaged one, it begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.adapters.stores.minute_store import MinuteStore
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import ScalingRequested, ScalingRulesSet
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import LeaseState, WorkerState
from distributed_grid.domain.workers import ScalingPlan, ScalingRules, Worker, WorkerResources
from distributed_grid.errors import GridError
from distributed_grid.ports import WorkerOffer
from distributed_grid.prediction.warm_pool import KEPT_MS, SLOT_MS, LoadSlot, WarmPool
from distributed_grid.reactor.decision import ScalingAnswer
from distributed_grid.scheduling.scaling.demand import read_demand
from distributed_grid.scheduling.scaling.evaluation import MAX_STARTS, evaluate, has_work
from distributed_grid.server.workers.offers import OfferCatalog, new_worker_id, worker_of
from distributed_grid.server.workers.worker_reconciler import wall_ms

MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.5, 60.0
SAMPLES_PER_WINDOW = 30
MAX_SHOWN = 5
POLL_SECONDS = 0.25
"""How often it is checked whether the end of a worker was announced, or something waits that no node could serve."""
REST_FACTOR = 20
"""It is not checked again before so many times the time that it took."""
log = logging.getLogger(__name__)
_LOAD_ROW = struct.Struct("<qqq")
LOAD_ROW_BYTES = _LOAD_ROW.size
LOAD = "load"
"""The name under which the slots are stored."""


class Autoscaler:
    """Evaluates scaling; `problem` says why the provider cannot be used at present."""

    def __init__(
        self,
        grid: Grid,
        catalog: OfferCatalog,
        rules: ScalingRules,
        *,
        check_reachable: Callable[[str], Awaitable[None]],
        expected: ExpectedLoad | None = None,
    ) -> None:
        """With `expected` workers are kept and started for the load that is expected."""
        self._grid = grid
        self._catalog = catalog
        self._rules = rules
        self._check_reachable = check_reachable
        self._expected = expected
        self.problem = ""
        self.warm = 0
        self._leaving: set[str] = set()
        self._has_new_waiting = False
        self._rests_until = 0.0
        grid.follow(self._note_waiting)

    @property
    def provider(self) -> str:
        return self._rules.provider

    @property
    def interval_seconds(self) -> float:
        """The time between two evaluations: so many in a window, within bounds."""
        each = self._rules.window_ms / 1000 / SAMPLES_PER_WINDOW
        return min(max(each, MIN_INTERVAL_SECONDS), MAX_INTERVAL_SECONDS)

    @property
    def expected_milli(self) -> int | None:
        """The load that is expected soon, in thousandths of a worker; None where nothing is forecast."""
        return None if self._expected is None else self._expected.expected_milli

    async def start(self) -> None:
        """Set the rules, with what the provider could start when it was last asked."""
        known = self._grid.ledger.scaling
        types = known.types if self._rules.provider and known.provider == self._rules.provider else ()
        types_known = bool(types) or not self._rules.provider
        await self._grid.handle(ScalingRulesSet(replace(self._rules, types=types, types_known=types_known)))

    async def set_rules(self, rules: ScalingRules) -> None:
        """Go by other rules of the same provider from now on."""
        self._rules = replace(rules, provider=self._rules.provider)
        await self.start()

    async def run(self) -> None:
        """Evaluate until cancelled; without a provider end at once."""
        if not self._rules.provider:
            return
        await self.read_types()
        if self._expected is not None:
            await self._expected.start(self._grid.now_ms())
        while True:
            await self._sleep()
            try:
                await self.read_types()
                await self.evaluate_now()
            except GridError as failure:
                log.warning("scaling could not be evaluated: %s", failure)

    def _note_waiting(self, rows: Sequence[Row]) -> None:
        """Note that a request waits: there may be no node that could serve it."""
        if not self._has_new_waiting and self._rules.provider:
            self._has_new_waiting = any(isinstance(row, Lease) and row.state is LeaseState.ASKED for row in rows)

    async def _sleep(self) -> None:
        """Wait for the next evaluation: at once where the end of another worker was announced, or where something waits
        that no node could serve."""
        until = asyncio.get_running_loop().time() + self.interval_seconds
        while (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left, POLL_SECONDS))
            leaving = await self._grid.read(
                lambda ledger, now: {one.id for one in ledger.workers.values() if one.is_leaving}
            )
            known, self._leaving = self._leaving, leaving
            if leaving - known:
                return
            if self._has_new_waiting and await self._has_no_node():
                return

    async def _has_no_node(self) -> bool:
        """Whether something waits that no node could serve, and workers are to be started for it; in a long queue that
        is not checked all the time."""
        began = time.monotonic()
        if began < self._rests_until:
            return False
        self._has_new_waiting = False
        found = await self._grid.read(_starts_for_no_node)
        self._rests_until = time.monotonic() + REST_FACTOR * (time.monotonic() - began)
        return found

    def close(self) -> None:
        """Close the file of the load. Safe to call twice."""
        if self._expected is not None:
            self._expected.close()

    async def read_types(self) -> None:
        """Have the ledger know what the provider can start; nothing while workers could not be used."""
        try:
            await self._check_reachable(self._rules.provider)
            known = await self._catalog.offers(self._rules.provider)
            offers = [one for one in known if not one.unavailable]
            problem = "" if offers else _why_nothing(self._rules.provider, known)
        except GridError as failure:
            problem, offers = str(failure), []
            if failure.retryable:  # what could be started a while ago may still be
                self._note_problem(problem)
                return
        self._note_problem(problem)
        types = tuple(
            _template(worker_of(one, self._rules.provider, WorkerResources(), by=GRID_USER)) for one in offers
        )
        rules = replace(self._rules, types=types)
        if rules != self._grid.ledger.scaling:
            await self._grid.handle(ScalingRulesSet(rules))

    def _note_problem(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        if problem:
            log.warning("no workers of %s can be started: %s", self._rules.provider, problem)

    async def evaluate_now(self) -> tuple[ScalingPlan, list[str]]:
        """Evaluate once and act; what is done, and the workers that are wanted because of it."""
        if self._expected is not None:
            self.warm = await self._expected.sample(self._grid.now_ms())
        ids = tuple(new_worker_id() for _ in range(MAX_STARTS))
        answer = await self._grid.handle(ScalingRequested(ids, wall_ms(), self.warm))
        assert isinstance(answer, ScalingAnswer)
        plan = answer.plan
        if plan.action == "none":
            return plan, []
        log.info("%s: %s", plan.action, plan.reason)
        return plan, await self._grid.read(
            lambda ledger, now: [one for one in ids[: plan.count] if one in ledger.workers]
        )


def _starts_for_no_node(ledger: Ledger, now: int) -> bool:
    """Whether workers would be started now, and something waits that no node could serve."""
    found = evaluate(ledger, now, wall_ms())
    return found.plan.action == "scale_up" and bool(found.plan.count and found.unmet.without_node(ledger).shapes)


def _why_nothing(provider: str, offers: Sequence[WorkerOffer]) -> str:
    """Why nothing of a provider can be started."""
    reasons = [f"{one.id}: {one.unavailable}" for one in offers[:MAX_SHOWN]]
    return f"{provider} offers nothing that can be had{': ' * bool(reasons)}{'; '.join(reasons)}"


def _template(worker: Worker) -> Worker:
    return replace(worker, id="", by="")


class ExpectedLoad:
    """Learns the load of a grid, and says how many workers to keep."""

    def __init__(self, grid: Grid, store: MinuteStore, *, cutoff_ms: Callable[[int], int] | None = None) -> None:
        """`cutoff_ms` says before which time of the grid something is older than so long."""
        self._grid = grid
        self._store = store
        self._cutoff_ms = cutoff_ms
        self._pool = WarmPool()

    async def start(self, now_ms: int) -> None:
        """Learn what was known before."""
        rows = await asyncio.to_thread(self._store.load, now_ms - KEPT_MS, now_ms)
        await asyncio.to_thread(self._learn, rows)

    def _learn(self, rows: list[tuple[str, bytes]]) -> None:
        for _, row in rows:
            slot, load_sum, counts = _LOAD_ROW.unpack(row)
            self._pool.learn(LoadSlot(slot, load_sum, counts >> 32, counts & 0xFFFFFFFF))

    async def sample(self, now_ms: int) -> int:
        """Learn the load of this moment of the grid's time; how many workers are to be kept."""
        load = await self._grid.read(lambda ledger, now: read_load(ledger))
        warm, ended = size_pool(self._pool, load, self._grid.ledger.scaling, now_ms)
        if ended is not None:
            row = _LOAD_ROW.pack(ended.slot, ended.load_sum, ended.samples << 32 | ended.workers_in_use)
            written = [(ended.slot * SLOT_MS, LOAD, row)]
            before_ms = now_ms - KEPT_MS if self._cutoff_ms is None else self._cutoff_ms(KEPT_MS)
            await asyncio.to_thread(self._store.write, written, before_ms=before_ms)
        return warm

    @property
    def expected_milli(self) -> int | None:
        """The load that is expected soon, in thousandths of a worker; None while too little is known."""
        return self._pool.expected_milli()

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._store.close()


class GridLoad(Struct, frozen=True):
    """The load of a grid at one moment; loads are in thousandths of a worker of the preferred type."""

    load_milli: int
    """What is lent and what waits."""
    own_milli: int
    """What nodes have that are no workers."""
    workers: int
    in_use: int


def size_pool(pool: WarmPool, load: GridLoad, rules: ScalingRules, now_ms: int) -> tuple[int, LoadSlot | None]:
    """Learn the load of this moment: how many workers are to be kept, and the slot that it ends, if it does."""
    ended = pool.observe(now_ms, load.load_milli, load.in_use)
    warm = pool.size(
        load.workers,
        load.in_use,
        own_milli=load.own_milli,
        target_milli=rules.target_milli,
        limit=rules.max_workers,
    )
    return warm, ended


def read_load(ledger: Ledger) -> GridLoad:
    """The load of a grid now."""
    serving = [one for one in ledger.workers.values() if one.is_on_its_way or one.state is WorkerState.JOINED]
    in_use = sum(has_work(ledger, worker.node) for worker in serving)
    types = ledger.scaling.types
    if not types:
        return GridLoad(0, 0, len(serving), in_use)
    unit = types[0].resources
    lent = [sum(parts) for parts in zip(*(_lent_on(ledger, name) for name in ledger.node_claims), strict=True)]
    for shape in read_demand(ledger, [one.resources for one in types]).shapes:
        ask = shape.request.ask
        asked = (ask.cpu_milli, ask.memory_bytes, ask.gpu_milli)
        lent = [one + shape.members * more for one, more in zip(lent or [0, 0, 0], asked, strict=True)]
    own = [node.lendable for node in ledger.nodes.values() if node.name not in ledger.workers]
    has = (
        sum(one.cpu_milli for one in own),
        sum(one.memory_bytes for one in own),
        WHOLE_GPU * sum(len(one.gpus) for one in own),
    )
    load = max(_parts(lent or [0, 0, 0], unit), default=0)
    return GridLoad(load, min(_parts(has, unit), default=0), len(serving), in_use)


def _lent_on(ledger: Ledger, node: str) -> tuple[int, int, int]:
    claims = ledger.claims_on(node)
    return claims.cpu_milli, claims.memory_bytes, sum(claims.gpu_milli.values())


def _parts(amounts: list[int] | tuple[int, int, int], unit: WorkerResources) -> list[int]:
    """Each resource in thousandths of what a worker has of it."""
    sizes = (unit.cpu_milli, unit.memory_bytes, WHOLE_GPU * unit.gpu_count)
    return [1000 * amount // size for amount, size in zip(amounts, sizes, strict=True) if size]
