"""Autoscaler: evaluates scaling at every interval, and has the ledger start and give back workers.

The provider's offers are read first and kept in the ledger, so that a request which only a worker could serve waits for
one. If workers could not reach this control plane, or the provider cannot be used, nothing is started and the reason is
shown. Without `scaling.provider` it only sets the rules: nothing acts on its own.

For the predictive policy it learns the expected load from samples of the ledger. Five-minute sums of the last eight
days are in a file of their own; without it, or with a damaged one, it begins anew.
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
from distributed_grid.domain.workers import ScalingPlan, ScalingRules, WorkerResources
from distributed_grid.errors import GridError
from distributed_grid.prediction.warm_pool import KEPT_MS, SLOT_MS, LoadSlot, WarmPool
from distributed_grid.reactor.decision import ScalingAnswer
from distributed_grid.scheduling.scaling.demand import read_demand
from distributed_grid.scheduling.scaling.evaluation import MAX_STARTS, evaluate, has_work
from distributed_grid.server.workers.provider_calls import OfferCatalog, new_worker_id, worker_of
from distributed_grid.server.workers.worker_reconciler import wall_ms

MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.5, 60.0
SAMPLES_PER_WINDOW = 30
MAX_SHOWN = 5
POLL_SECONDS = 0.25
"""Interval of the checks for announced ends of workers and for requests that no node could serve."""
REST_FACTOR = 20
"""Rest after such a check, as a multiple of its duration."""
log = logging.getLogger(__name__)
_LOAD_ROW = struct.Struct("<qqq")
LOAD_ROW_BYTES = _LOAD_ROW.size
LOAD = "load"  # name of the stored slots


class Autoscaler:
    """Evaluates scaling; `problem` is the reason why the provider cannot be used at present."""

    def __init__(
        self,
        grid: Grid,
        catalog: OfferCatalog,
        rules: ScalingRules,
        *,
        check_reachable: Callable[[str], Awaitable[None]],
        expected: ExpectedLoad | None = None,
    ) -> None:
        """With `expected` workers are kept and started for the expected load."""
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
        """The time between two evaluations: `SAMPLES_PER_WINDOW` in a window, within bounds."""
        pause_seconds = self._rules.window_ms / 1000 / SAMPLES_PER_WINDOW
        return min(max(pause_seconds, MIN_INTERVAL_SECONDS), MAX_INTERVAL_SECONDS)

    @property
    def expected_milli(self) -> int | None:
        """The expected load in thousandths of a worker; None without a forecast."""
        return None if self._expected is None else self._expected.expected_milli

    async def start(self) -> None:
        """Set the rules, with the last known offers of the provider."""
        known = self._grid.ledger.scaling
        types = known.types if self._rules.provider and known.provider == self._rules.provider else ()
        types_known = bool(types) or not self._rules.provider
        await self._grid.handle(ScalingRulesSet(replace(self._rules, types=types, types_known=types_known)))

    async def set_rules(self, rules: ScalingRules) -> None:
        """Use other rules with the same provider."""
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
        """Note that a request waits, perhaps one that no node could serve."""
        if not self._has_new_waiting and self._rules.provider:
            self._has_new_waiting = any(isinstance(row, Lease) and row.state is LeaseState.ASKED for row in rows)

    async def _sleep(self) -> None:
        """Wait for the next evaluation, or until the end of another worker is announced or a request waits that no
        node could serve."""
        until = asyncio.get_running_loop().time() + self.interval_seconds
        while (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left, POLL_SECONDS))
            leaving = await self._grid.read(
                lambda ledger, now: {worker.id for worker in ledger.workers.values() if worker.is_leaving}
            )
            known, self._leaving = self._leaving, leaving
            if leaving - known:
                return
            began = time.monotonic()
            if self._has_new_waiting and began >= self._rests_until:  # in a long queue a check takes long
                self._has_new_waiting = False
                is_urgent = await self._grid.read(_starts_for_no_node)
                self._rests_until = time.monotonic() + REST_FACTOR * (time.monotonic() - began)
                if is_urgent:
                    return

    def close(self) -> None:
        """Close the file of the load. Safe to call twice."""
        if self._expected is not None:
            self._expected.close()

    async def read_types(self) -> None:
        """Record the provider's offers in the ledger; none while workers could not be used."""
        provider = self._rules.provider
        try:
            await self._check_reachable(provider)
            known = await self._catalog.offers(provider)
            offers = [offer for offer in known if not offer.unavailable]
            reasons = "; ".join(f"{offer.id}: {offer.unavailable}" for offer in known[:MAX_SHOWN])
            problem = "" if offers else f"{provider} offers nothing that can be had{': ' * bool(reasons)}{reasons}"
        except GridError as failure:
            problem, offers = str(failure), []
            if failure.retryable:  # the last known offers stay
                self._note_problem(problem)
                return
        self._note_problem(problem)
        templates = (worker_of(offer, provider, WorkerResources(), by=GRID_USER) for offer in offers)
        rules = replace(self._rules, types=tuple(replace(worker, id="", by="") for worker in templates))
        if rules != self._grid.ledger.scaling:
            await self._grid.handle(ScalingRulesSet(rules))

    def _note_problem(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        if problem:
            log.warning("no workers of %s can be started: %s", self._rules.provider, problem)

    async def evaluate_now(self) -> tuple[ScalingPlan, list[str]]:
        """Evaluate once and act; the plan, and the workers that it starts."""
        if self._expected is not None:
            self.warm = await self._expected.sample(self._grid.now_ms())
        ids = tuple(new_worker_id() for _ in range(MAX_STARTS))
        answer = await self._grid.handle(ScalingRequested(ids, wall_ms(), self.warm))
        assert isinstance(answer, ScalingAnswer)
        plan = answer.plan
        if plan.action == "none":
            return plan, []
        log.info("%s: %s", plan.action, plan.reason)
        started = ids[: plan.count]
        return plan, await self._grid.read(lambda ledger, now: [name for name in started if name in ledger.workers])


def _starts_for_no_node(ledger: Ledger, now: int) -> bool:
    """True if workers would be started now, and a request waits that no node could serve."""
    evaluation = evaluate(ledger, now, wall_ms())
    plan = evaluation.plan
    return plan.action == "scale_up" and bool(plan.count and evaluation.unmet.without_node(ledger).shapes)


class ExpectedLoad:
    """Learns the load of a grid, and sizes the pool of workers that are kept for it."""

    def __init__(self, grid: Grid, store: MinuteStore, *, cutoff_ms: Callable[[int], int] | None = None) -> None:
        """`cutoff_ms` converts an age into a time of the grid."""
        self._grid = grid
        self._store = store
        self._cutoff_ms = cutoff_ms
        self._pool = WarmPool()

    async def start(self, now_ms: int) -> None:
        """Learn the stored slots."""

        def learn() -> None:
            for _, row in self._store.load(now_ms - KEPT_MS, now_ms):
                slot, load_sum, counts = _LOAD_ROW.unpack(row)
                self._pool.learn(LoadSlot(slot, load_sum, counts >> 32, counts & 0xFFFFFFFF))

        await asyncio.to_thread(learn)

    async def sample(self, now_ms: int) -> int:
        """Learn the load of this moment of grid time; the number of workers to keep."""
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
        """The expected load in thousandths of a worker; None while too little is known."""
        return self._pool.expected_milli()

    def close(self) -> None:
        self._store.close()


class GridLoad(Struct, frozen=True):
    """The load of a grid at one moment; loads are in thousandths of a worker of the preferred type."""

    load_milli: int  # lent and waiting
    own_milli: int  # resources of nodes that are no workers
    workers: int
    in_use: int


def size_pool(pool: WarmPool, load: GridLoad, rules: ScalingRules, now_ms: int) -> tuple[int, LoadSlot | None]:
    """Learn the load of this moment; the number of workers to keep, and the slot that it completes."""
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
    workers = ledger.workers.values()
    serving = [worker for worker in workers if worker.is_on_its_way or worker.state is WorkerState.JOINED]
    in_use = sum(has_work(ledger, worker.node) for worker in serving)
    types = ledger.scaling.types
    if not types:
        return GridLoad(0, 0, len(serving), in_use)
    unit = types[0].resources
    claims = [ledger.claims_on(name) for name in ledger.node_claims]
    lent = [
        sum(claim.cpu_milli for claim in claims),
        sum(claim.memory_bytes for claim in claims),
        sum(sum(claim.gpu_milli.values()) for claim in claims),
    ]
    for shape in read_demand(ledger, [template.resources for template in types]).shapes:
        ask = shape.request.ask
        asked = (ask.cpu_milli, ask.memory_bytes, ask.gpu_milli)
        lent = [amount + shape.members * more for amount, more in zip(lent, asked, strict=True)]
    own = [node.lendable for node in ledger.nodes.values() if node.name not in ledger.workers]
    has = (
        sum(capacity.cpu_milli for capacity in own),
        sum(capacity.memory_bytes for capacity in own),
        WHOLE_GPU * sum(len(capacity.gpus) for capacity in own),
    )
    load = max(_parts(lent, unit), default=0)
    return GridLoad(load, min(_parts(has, unit), default=0), len(serving), in_use)


def _parts(amounts: list[int] | tuple[int, int, int], unit: WorkerResources) -> list[int]:
    """Each resource in thousandths of a worker's."""
    sizes = (unit.cpu_milli, unit.memory_bytes, WHOLE_GPU * unit.gpu_count)
    return [1000 * amount // size for amount, size in zip(amounts, sizes, strict=True) if size]
