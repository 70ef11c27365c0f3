"""Nodes, their offers, and recommendations to move work between them."""

from __future__ import annotations

from distributed_grid.api.answers.common import HIDDEN, Answer, PageAnswer, Viewer, gigabytes, headline
from distributed_grid.domain.clock_jumps import jump_text
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, pressure
from distributed_grid.domain.rebalancing import WATCHED_RESOURCES, Advice
from distributed_grid.domain.states import NodeState
from distributed_grid.scheduling.offers.offer import lendable_now
from distributed_grid.scheduling.offers.pause import OfferPause, pauses
from distributed_grid.scheduling.pressure.loans import amounts_of
from distributed_grid.scheduling.queue.reasons import is_stopped, why_not_lent


class UnusedBorrowing(Answer, frozen=True):
    """A resource that was borrowed for a node and went back after this time because nothing had used it."""

    resource_type: str
    amount: float
    unused_seconds: float

    @classmethod
    def of_node(cls, ledger: Ledger, node: str) -> list[UnusedBorrowing]:
        state = ledger.rebalance_states.get(node)
        watches = [(kind, state.watch(kind)) for kind in WATCHED_RESOURCES] if state is not None else []
        return [
            cls(str(kind), headline(amounts_of(kind, watch.unused_amount))[1], watch.unused_ms / 1000)
            for kind, watch in watches
            if watch.unused_amount
        ]


class NodeRow(Answer, frozen=True, kw_only=True):
    """A node as it is now."""

    node_id: str
    host: str
    role: str
    state: str
    simulated: bool
    cooling: bool
    stopped: bool
    cpu_cores: float
    memory_gb: float
    gpus: int
    custom: dict[str, int]
    cpu_lent: float
    memory_lent_gb: float
    gpus_lent: float
    open: bool
    cpu_free: float
    memory_free_gb: float
    gpus_free: float
    leases: int
    priority: float
    speed: float
    cost_per_hour: float
    labels: dict[str, str]
    tags: list[str]
    keeps: list[str]  # reasons why it does not lend the rest
    pressure: float | None
    cpu_percent: float | None
    memory_used_gb: float | None
    seconds_since_heard: float | None
    rejected: str | None
    degraded: str | None
    unused_borrowing: list[UnusedBorrowing]
    clock_jump: str | None

    @classmethod
    def of(cls, ledger: Ledger, node: Node, now: int) -> NodeRow:
        seen = ledger.observations.get(node.name)
        claims, columns, row = ledger.claims_on(node.name), ledger.columns, ledger.columns.rows[node.name]
        is_open, is_alive = bool(columns.open[row]), node.state is NodeState.ALIVE
        usage = seen.usage if seen is not None and is_alive else None
        return cls(
            node_id=node.name,
            host=node.host,
            role=node.role,
            state=str(node.state),
            simulated=node.simulated,
            cooling=node.cooling,
            stopped=is_stopped(ledger, node),
            cpu_cores=node.capacity.cpu_milli / 1000,
            memory_gb=gigabytes(node.capacity.memory_bytes),
            gpus=len(node.capacity.gpus),
            custom=dict(node.capacity.custom),
            cpu_lent=claims.cpu_milli / 1000,
            memory_lent_gb=gigabytes(claims.memory_bytes),
            gpus_lent=sum(claims.gpu_milli.values()) / 1000,
            open=is_open,
            cpu_free=max(int(columns.cpu[row]), 0) / 1000 if is_open else 0.0,
            memory_free_gb=gigabytes(max(int(columns.memory[row]), 0)) if is_open else 0.0,
            gpus_free=int(columns.gpu_left[row]) / 1000 if is_open else 0.0,
            leases=int(columns.leases[row]),
            priority=node.rank / 1000,
            speed=node.speed_milli / 1000,
            cost_per_hour=node.cost_milli / 1000,
            labels=dict(node.labels),
            tags=list(node.tags),
            keeps=list(why_not_lent(ledger, node, now)),
            pressure=pressure(node.capacity, usage) if usage is not None else None,
            cpu_percent=usage.cpu_busy_milli / 10 if usage is not None else None,
            memory_used_gb=gigabytes(usage.memory_bytes) if usage is not None else None,
            seconds_since_heard=(now - seen.at_ms) / 1000 if seen is not None and seen.at_ms else None,
            rejected=seen.rejected if seen is not None and seen.is_rejected and not is_alive else None,
            degraded=ledger.degraded[node.name].why if node.name in ledger.degraded else None,
            unused_borrowing=UnusedBorrowing.of_node(ledger, node.name),
            clock_jump=jump_text(node.name, seen.clock_jump_ms, seen.clock_waits_ms)
            if seen is not None and seen.clock_jump_ms
            else None,
        )


class OfferRow(Answer, frozen=True, kw_only=True):
    """One kind of resource that a node would lend; a paused one is not lent anew before `returns_at`."""

    node_id: str
    resource_type: str
    amount: float
    generation: int
    expires_at: str | None
    state: str = "open"
    mark_percent: float | None = None
    measured_percent: float | None = None
    returns_at: str | None = None

    @classmethod
    def of_node(cls, viewer: Viewer, ledger: Ledger, name: str) -> list[OfferRow]:
        """The offers of a node, up to the configured number; paused ones last."""
        offer, node = ledger.offers.get(name), ledger.nodes[name]
        if offer is None or node.state is not NodeState.ALIVE or name in ledger.pull_nodes:
            return []  # a pull worker offers only to its tasks
        claims, lends = ledger.claims_on(name), offer.lends
        taken, expires_at = dict(claims.custom), viewer.time(offer.expires_at_ms)
        free: list[tuple[str, float]] = [
            ("cpu", max(lends.cpu_milli - claims.cpu_milli, 0) / 1000),
            ("memory", gigabytes(max(lends.memory_bytes - claims.memory_bytes, 0))),
            ("gpu", sum(claims.free_milli(device) for device in lends.gpus) / 1000),
        ]
        free += [(kind, count - taken.get(kind, 0)) for kind, count in lends.custom]
        rows = [
            cls(node_id=name, resource_type=kind, amount=amount, generation=offer.generation, expires_at=expires_at)
            for kind, amount in free
            if amount > 0
        ]
        seen = ledger.observations.get(name)
        if offer.paused and seen is not None and seen.usage is not None:
            resumed = lendable_now(node, seen.usage, seen.idleness)[0]
            amounts = {
                "cpu": max(resumed.cpu_milli - claims.cpu_milli, 0) / 1000,
                "memory": gigabytes(max(resumed.memory_bytes - claims.memory_bytes, 0)),
                "gpu": sum(claims.free_milli(gpu) for gpu in resumed.gpus if f"gpu{gpu.index}" in offer.paused) / 1000,
            }
            first: dict[str, OfferPause] = {}  # of several GPUs the one that may return first
            for pause in sorted(pauses(node, seen), key=lambda pause: pause.returns_at_ms):
                first.setdefault(pause.resource, pause)
            rows += [
                cls(
                    node_id=name,
                    resource_type=kind,
                    amount=amounts[kind],
                    generation=offer.generation,
                    expires_at=expires_at,
                    state="paused",
                    mark_percent=pause.mark_milli / 10,
                    measured_percent=pause.measured_milli / 10,
                    returns_at=viewer.time(pause.returns_at_ms),
                )
                for kind, pause in first.items()
            ]
        return rows[: viewer.max_offers_per_node]


class RecommendationRow(Answer, frozen=True, kw_only=True):
    """Work that should move from one node to another."""

    node_id: str
    job_id: str | None
    source_node: str
    target_node: str
    cause: str
    reason: str
    since: str | None

    @classmethod
    def of(cls, viewer: Viewer, ledger: Ledger, node: str, advice: Advice) -> RecommendationRow:
        job = ledger.jobs.get(advice.job)
        return cls(
            node_id=node,
            job_id=job.id if job is not None else None,
            source_node=node,
            target_node=advice.to,
            cause=advice.cause,
            reason=advice.reason if job is None or viewer.shows(job.request.user) else HIDDEN,
            since=viewer.time(advice.since_ms),
        )

    @classmethod
    def of_node(cls, viewer: Viewer, ledger: Ledger, name: str) -> list[RecommendationRow]:
        """The recommendation for a node, or none."""
        state = ledger.rebalance_states.get(name)
        return [cls.of(viewer, ledger, name, state.advice)] if state is not None and state.advice is not None else []

    @classmethod
    def of_ledger(cls, viewer: Viewer, ledger: Ledger) -> list[RecommendationRow]:
        return [row for name in ledger.rebalance_states for row in cls.of_node(viewer, ledger, name)]


class NodeList(PageAnswer, frozen=True, kw_only=True):
    nodes: list[NodeRow]
    total: int  # in all pages


class NodeDetail(Answer, frozen=True):
    node: NodeRow


class OfferList(PageAnswer, frozen=True, kw_only=True):
    offers: list[OfferRow]


class RecommendationList(PageAnswer, frozen=True, kw_only=True):
    recommendations: list[RecommendationRow]
    total: int  # in all pages


class NodeStep(Answer, frozen=True):
    """Progress of a command on one node."""

    node_id: str
    step: str


class DrainAnswer(Answer, frozen=True):
    """A node that lends nothing new, or lends again; `given_back` counts the leases that its owner got back."""

    node_id: str
    cooling: bool
    given_back: int
    detail: str
