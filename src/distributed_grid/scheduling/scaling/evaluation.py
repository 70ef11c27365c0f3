"""Evaluation: the workers to start or give back, their type, and the reason. It only reads.

Up: where requests wait that only new workers would serve, and the bottleneck (the fullest resource that they ask for,
over the window) is at its threshold. A busy grid without waiting requests starts nothing. Each direction rests for its
cooldown after a success: after a worker has joined, or is gone. The minimum and the maximum hold whatever the levels
and cooldowns are.

Down: workers without a lease; copies of blocks do not count, since they can move. A worker goes when the part of the
window in which it may have had a lease is below the threshold, the longest idle first, as long as the load of the
others stays below the target; where there is a warm pool, down to its size instead. The last one that is warm stays for
its cooldown. More than the maximum are given back at once.

A worker whose end is announced is no capacity any more, and none of the maximum. Work there that fits nowhere else
gets a replacement at once, whatever the level and the cooldown: within the budget, of which both are a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, ResourceType
from distributed_grid.domain.states import NodeState, WorkerState
from distributed_grid.domain.workers import (
    MAX_LEVEL,
    SCALED_DOWN,
    SCALED_UP,
    ScalingPlan,
    UtilizationSample,
    UtilizationWindow,
    Worker,
    WorkerResources,
)
from distributed_grid.scheduling.scaling.budget import budget_state
from distributed_grid.scheduling.scaling.demand import (
    Demand,
    OfferedType,
    UnmetDemand,
    choose_type,
    displaced_demand,
    lendable,
    pack,
    read_demand,
    usable,
)
from distributed_grid.scheduling.scaling.worker_availability import closed_text, closure_of, has_room, place_of


class IdleWorker(Struct, frozen=True):
    """A worker without a lease; `used_milli` is the part of the window that it may have had one."""

    worker: Worker
    idle_ms: int
    used_milli: int


def has_work(ledger: Ledger, node: str) -> bool:
    return any(not lease.request.block for lease in ledger.leases_of(node))


def idle_workers(ledger: Ledger, workers: Iterable[Worker], now: int) -> list[IdleWorker]:
    """The workers that have joined, are heard and have no lease, the longest idle first."""
    window_ms, idle = ledger.scaling.window_ms, []
    for worker in workers:
        node = ledger.nodes.get(worker.node)
        is_heard = node is not None and node.state is NodeState.ALIVE
        if worker.state is WorkerState.JOINED and is_heard and not has_work(ledger, worker.node):
            idle_ms = max(now - max(worker.joined_at_ms, worker.used_at_ms), 0)
            idle.append(IdleWorker(worker, idle_ms, 1000 * max(window_ms - idle_ms, 0) // window_ms))
    return sorted(idle, key=lambda one: (-one.idle_ms, one.worker.id))


def workers_to_give_back(
    ledger: Ledger,
    serving: Sequence[Worker],
    idle: Sequence[IdleWorker],
    floor: int,
    *,
    excess: int,
    resting: bool,
    has_pool: bool = False,
) -> tuple[list[IdleWorker], str]:
    """The idle workers to give back, and the reason why others are kept, if it is worth a mention.

    `serving` are the workers that are there or on their way; at least `floor` of them are kept. `excess` workers leave
    in any case, the others not while scaling down is `resting`. With `has_pool` the floor is the size of a warm pool,
    which has its headroom: nothing is kept for the target beyond it.
    """
    rules, surplus = ledger.scaling, max(len(serving) - floor, 0)
    joined = [worker for worker in serving if worker.state is WorkerState.JOINED]
    idle_ids = {entry.worker.id for entry in idle}  # copies of blocks there will move
    claims = [ledger.claims_on(worker.node) for worker in joined if worker.id not in idle_ids]
    lent = (
        sum(claim.cpu_milli for claim in claims),
        sum(claim.memory_bytes for claim in claims),
        sum(sum(claim.gpu_milli.values()) for claim in claims),
    )
    left = [sum(amounts) for amounts in zip(*(_load_of(worker.resources) for worker in joined), strict=True)]
    chosen = list(idle[: min(excess, surplus)])
    for entry in chosen:
        left = [has - less for has, less in zip(left, _load_of(entry.worker.resources), strict=True)]
    for entry in idle[len(chosen) :]:
        if entry.used_milli >= rules.down_milli or len(chosen) >= surplus:
            break
        if resting:
            return chosen, "a worker was given back a short while ago"
        left = [has - less for has, less in zip(left, _load_of(entry.worker.resources), strict=True)]
        if not has_pool and any(1000 * used > rules.target_milli * has for used, has in zip(lent, left, strict=True)):
            return chosen, "the others would be above the target without it"
        if len(chosen) == len(joined) - 1 and entry.idle_ms < rules.down_cooldown_ms:
            return chosen, "the last warm worker is kept for its cooldown"
        chosen.append(entry)
    return chosen, ""


def _load_of(resources: WorkerResources) -> tuple[int, int, int]:
    """Millicores, bytes of memory, thousandths of GPUs."""
    return resources.cpu_milli, resources.memory_bytes, WHOLE_GPU * resources.gpu_count


MAX_STARTS = 100  # workers that one evaluation starts; the next one comes soon
MAX_CLOSED_SHOWN = 3
_ORDER = (ResourceType.GPU, ResourceType.MEMORY, ResourceType.CPU)
"""Which resource is the bottleneck among equally full ones: the scarcest first."""
_SERVING = frozenset({WorkerState.WANTED, WorkerState.ASKED, WorkerState.BOOTING, WorkerState.JOINED})


class ScalingEvaluation(Struct, frozen=True, kw_only=True):
    """The plan and its inputs; the direction rests until `up_at_ms` or `down_at_ms` (0: it does not rest)."""

    plan: ScalingPlan
    demand: Demand
    unmet: UnmetDemand
    window: UtilizationWindow
    idle: tuple[IdleWorker, ...]
    up_at_ms: int
    down_at_ms: int


def evaluate(ledger: Ledger, now: int, wall_ms: int, *, warm: int = 0, limit: int = MAX_STARTS) -> ScalingEvaluation:
    """The scaling plan at this moment, with at most `limit` starts; `wall_ms` gives the day (UTC), `warm` the number of
    workers kept for the expected load."""
    return Evaluator(ledger, now, wall_ms, warm, min(limit, MAX_STARTS)).evaluate()


class Evaluator:
    """One evaluation over cached inputs."""

    def __init__(self, ledger: Ledger, now: int, wall_ms: int, warm: int, limit: int) -> None:
        self._ledger = ledger
        self._now = now
        self._wall_ms = wall_ms
        self._limit = limit
        self._rules = rules = ledger.scaling
        self._workers = [worker for worker in ledger.workers.values() if worker.provider == rules.provider]
        self._serving = [worker for worker in self._workers if worker.state in _SERVING]
        self._leaving = [worker for worker in self._workers if worker.is_leaving]
        self._staying = sum(not worker.leaving_at_ms for worker in self._workers)
        self._room = max(rules.max_workers - self._staying, 0)
        known = [(one, lendable(ledger, one)) for one in rules.types if has_room(ledger, one)]
        self._types: Sequence[OfferedType] = [one for one in known if closure_of(ledger, place_of(one[0])) is None]
        self._closed: Sequence[OfferedType] = [one for one in known if one not in self._types]
        self._has_pool = warm > 0
        self._floor = max(rules.min_workers, min(warm, rules.max_workers))
        lent = [resources for _, resources in known]
        waiting = read_demand(ledger, lent)
        displaced = displaced_demand(ledger, lent) if self._leaving else ()
        self._demand = Demand((*displaced, *waiting.shapes), waiting.not_counted)
        self._unmet = pack(ledger, self._demand, self._room, now)
        self._window = ledger.utilization.added(_sample_utilization(ledger, self._unmet, now), rules.window_ms)
        asked = [resource for resource in _ORDER if self._unmet.total(resource)] or _ORDER
        self._bottleneck = max(asked, key=lambda resource: self._window.mean(resource, now - rules.window_ms))
        self._level = self._window.mean(self._bottleneck, now - rules.window_ms)
        self._up_at_ms = self._rests_until(SCALED_UP, rules.up_cooldown_ms)
        self._down_at_ms = self._rests_until(SCALED_DOWN, rules.down_cooldown_ms)

    def evaluate(self) -> ScalingEvaluation:
        idle = idle_workers(self._ledger, self._serving, self._now)
        plan = self._plan(idle) if self._rules.provider else self._nothing("scaling.provider is not set")
        return ScalingEvaluation(
            plan=plan,
            demand=self._demand,
            unmet=self._unmet,
            window=self._window,
            idle=tuple(idle),
            up_at_ms=self._up_at_ms,
            down_at_ms=self._down_at_ms,
        )

    def _rests_until(self, counter: str, cooldown_ms: int) -> int:
        succeeded = self._ledger.counters.get(counter)
        return succeeded + cooldown_ms if succeeded is not None and succeeded + cooldown_ms > self._now else 0

    def _plan(self, idle: Sequence[IdleWorker]) -> ScalingPlan:
        missing = min(max(self._floor - len(self._serving), 0), self._room, self._limit)
        wanted, why_not = self._wanted()
        kept = self._unmet.kept
        if wanted is not None and wanted[1] >= missing:
            return self._up(wanted[0], wanted[1], self._why_up(is_rest=bool(why_not)))
        if missing and self._types:
            chosen = wanted[0] if wanted is not None else self._types[0][0]
            floor = _workers(self._floor)
            is_warm = self._floor > self._rules.min_workers
            why = (
                f"{floor} are kept warm for the load that is expected" if is_warm else f"at least {floor} must be there"
            )
            return self._up(chosen, missing, why)
        if kept:
            return self._up(None, 0, f"{_requests(self._demand.requests)}")
        excess = max(self._staying - self._rules.max_workers, 0)
        leaving, why_stays = workers_to_give_back(
            self._ledger,
            self._serving,
            idle,
            self._floor,
            excess=excess,
            resting=bool(self._down_at_ms),
            has_pool=self._has_pool,
        )
        if leaving:
            reason = f"{_workers(len(leaving))} without a lease, the first for {_seconds(leaving[0].idle_ms)}"
            ids = tuple(idle.worker.id for idle in leaving)
            return ScalingPlan(
                action="scale_down",
                reason=reason,
                count=len(ids),
                worker_ids=ids,
                utilization_milli=self._level,
                bottleneck=self._bottleneck,
            )
        nothing = (
            "what waits is served by what there is or comes" if self._demand.shapes else "nothing waits for a worker"
        )
        return self._nothing("; ".join(part for part in (why_not or nothing, why_stays) if part))

    def _wanted(self) -> tuple[tuple[Worker, int] | None, str]:
        """The type and number of workers that the unmet requests call for, and why not more of them."""
        if not self._unmet.shapes:
            return None, ""
        wanted: tuple[Worker, int] | None = None
        why_not, waiting = "", _requests(self._unmet.requests)
        if self._level < self._rules.up_milli:
            why_not = f"{waiting}, {self._fullness()}, which is below {_percent(self._rules.up_milli)}"
        elif self._up_at_ms:
            rest = _seconds(self._up_at_ms - self._now)
            why_not = f"{waiting}, a worker joined a short while ago: the next is started in {rest}"
        elif not self._room:
            why_not = f"{waiting}, and there are {self._staying} of at most {self._rules.max_workers} workers"
        else:
            wanted = choose_type(self._unmet, self._bottleneck, self._types, min(self._room, self._limit))
            why_not = "" if wanted is not None else f"{waiting}, and {self._why_none_serves()}"
        if wanted is None and self._room:
            urgent = UnmetDemand((*self._unmet.displaced.shapes, *self._unmet.without_node(self._ledger).shapes))
            if urgent.shapes:
                wanted = choose_type(urgent, self._bottleneck, self._types, min(self._room, self._limit))
        return wanted, why_not

    def _why_none_serves(self) -> str:
        """Why no type of worker can be started for the waiting requests: the matching types are closed."""
        closed = [one for one in self._closed if choose_type(self._unmet, self._bottleneck, [one], 1) is not None]
        texts = [
            f"{worker.offer} ({closed_text(closure_of(self._ledger, place_of(worker)), self._now)})"
            for worker, _ in closed[:MAX_CLOSED_SHOWN]
        ]
        if len(closed) > MAX_CLOSED_SHOWN:
            texts.append(f"{len(closed) - MAX_CLOSED_SHOWN} more")
        return f"what serves them cannot be had now: {', '.join(texts)}" if texts else "no type of worker serves them"

    def _why_up(self, *, is_rest: bool) -> str:
        """Why workers are started: for waiting requests, or (`is_rest`) only for those that no node could serve or that
        have to leave."""
        displaced = self._unmet.displaced.requests
        if not displaced and is_rest:
            return f"{_requests(self._unmet.without_node(self._ledger).requests)} that no node could serve"
        if not displaced:
            return f"{_requests(self._unmet.requests)} for {self._fullness()}"
        first = min(self._leaving, key=lambda worker: worker.leaving_at_ms)
        reason = first.notice.why if first.notice is not None else ""
        left = _seconds(max(first.leaving_at_ms - self._now, 0))
        leaves = f"{displaced} job{' has' if displaced == 1 else 's have'} to leave {first.id}"
        text = f"{leaves}, which ends in {left}: {reason}"
        waiting = self._unmet.requests - displaced
        return text if is_rest or not waiting else f"{text}; {_requests(waiting)} for {self._fullness()}"

    def _up(self, worker: Worker | None, count: int, reason: str) -> ScalingPlan:
        kept = self._unmet.kept
        if worker is not None:
            paid, refusal = 0, ""
            state = budget_state(self._ledger, self._now, self._wall_ms)
            while paid < count and (beyond := state.refusal(worker)) is None:
                state, paid = state.with_workers(worker), paid + 1
            if paid < count:
                refusal = beyond or ""
            if not paid and not kept:
                waits = "; the replacement waits until it is gone" if self._unmet.displaced.shapes else ""
                return self._nothing(f"{reason}; {refusal}{waits}")
            count, reason = paid, f"{reason}; {paid} of {count} are within the budget: {refusal}" if refusal else reason
        why = f"{reason}; {_workers(len(kept))} that drain{'s' if len(kept) == 1 else ''} kept" if kept else reason
        return ScalingPlan(
            action="scale_up",
            reason=why,
            count=count,
            worker_ids=kept,
            utilization_milli=self._level,
            bottleneck=self._bottleneck,
            worker=worker,
        )

    def _nothing(self, reason: str) -> ScalingPlan:
        return ScalingPlan(
            action="none",
            reason=reason,
            count=0,
            worker_ids=(),
            utilization_milli=self._level,
            bottleneck=self._bottleneck,
        )

    def _fullness(self) -> str:
        return f"{self._bottleneck} at {_percent(self._level)} over the window"


def _percent(milli: int) -> str:
    return f"{milli / 10:.0f} %"


def _seconds(duration_ms: int) -> str:
    return f"{-(-duration_ms // 1000)} s"


def _requests(count: int) -> str:
    return f"{count:,} request{' waits' if count == 1 else 's wait'}"


def _workers(count: int) -> str:
    return f"{count:,} worker{'' if count == 1 else 's'}"


def _sample_utilization(ledger: Ledger, unmet: UnmetDemand, now: int) -> UtilizationSample:
    """Utilization by resource: taken and waiting amounts over the largest capacity of the grid, workers on their way
    included.

    The owner's use of a node counts as taken: it cannot be lent.
    """
    columns = ledger.columns
    coming = [usable(worker.resources) for worker in ledger.workers.values() if worker.is_on_its_way]
    levels: dict[str, int] = {}
    for resource, has, free, comes in (
        (ResourceType.CPU, columns.lends_cpu, columns.cpu, sum(one.cpu_milli for one in coming)),
        (ResourceType.MEMORY, columns.lends_memory, columns.memory, sum(one.memory_bytes for one in coming)),
        (
            ResourceType.GPU,
            WHOLE_GPU * columns.lends_gpus,
            columns.gpu_left,
            WHOLE_GPU * sum(one.gpu_count for one in coming),
        ),
    ):
        here = has[columns.open]
        taken = int((here - free[columns.open]).clip(0, here).sum())
        total = int(here.sum()) + comes
        asked = taken + unmet.total(resource)
        levels[str(resource)] = min(1000 * asked // total, MAX_LEVEL) if total else MAX_LEVEL if asked else 0
    return UtilizationSample(now, **levels)
