"""Decisions about engines and their bindings: registered and removed, bound, refused, freed, observed.

A lease on an engine's node is active only while the engine has its group. A forgotten group is bound again under a new
fence, and only when that is refused does the lease end. A node that the engine has lost keeps its leases, unbound,
until its hold ends: it may come back.
"""

from __future__ import annotations

from msgspec.structs import asdict, replace

from distributed_grid.domain.engines import (
    ATTACHED,
    Binding,
    EngineCapacity,
    EngineResources,
    EngineRow,
    parse_group_name,
)
from distributed_grid.domain.events import (
    EngineNode,
    EngineObserved,
    EngineRegistered,
    EngineRemoved,
    GroupBound,
    GroupFreed,
    GroupRefused,
    GroupTermSet,
    LeaseLost,
    TimePassed,
)
from distributed_grid.domain.leases import Lease, epoch_of, fence_on, is_plausible_epoch, node_above_fence
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST, Node
from distributed_grid.domain.rebalancing import GRID_USER, USED, RebalanceState, is_automatic, resource_of
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import LeaseEnd, LeaseState, Step, advance
from distributed_grid.errors import Refused
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP, Decision, Record, RecordType
from distributed_grid.reactor.jobs import requeue_unstarted
from distributed_grid.reactor.lease_transitions import FENCE, end_lease, lease_record

LOST_AFTER_MS = 60_000
"""Time that a lease waits for its engine's node to come back where the node itself has no hold."""


def on_bound(ledger: Ledger, event: GroupBound, now: int) -> Decision:
    """Activate the lease of a binding; one that is not wanted any more is freed."""
    binding = ledger.bindings.get(event.key)
    lease = ledger.leases.get(binding.lease_id) if binding is not None else None
    if binding is None or lease is None or binding.bound_at_ms or ledger.binding_of(lease) != binding:
        return Decision()
    bound = replace(binding, bound_at_ms=now, term_ms=event.term_ms)
    decision = Decision([bound], [_binding_record("bound", lease, binding)])
    if (
        not (lease.job or lease.awaits) and lease.state is LeaseState.RESERVING
    ):  # a job's is active once its command runs
        decision.changes.append(replace(lease, state=advance(lease.state, Step.BIND)))
    return decision


def on_term_set(ledger: Ledger, event: GroupTermSet, now: int) -> Decision:
    """Record the end of the lease that the engine has acknowledged; an earlier one changes nothing."""
    binding = ledger.bindings.get(event.key)
    is_news = binding is not None and binding.term_ms < event.term_ms
    return Decision([replace(binding, term_ms=event.term_ms)] if binding is not None and is_news else [])


def _binding_record(kind: RecordType, lease: Lease, binding: Binding, reason: str = "") -> Record:
    record = lease_record(kind, lease, None, reason)
    record.data["placement_group"] = binding.group
    return record


def on_refused(ledger: Ledger, event: GroupRefused, now: int) -> Decision:
    """End a lease that the engine does not reserve; a job is placed elsewhere."""
    binding = ledger.bindings.get(event.key)
    lease = ledger.leases.get(binding.lease_id) if binding is not None else None
    if binding is None or lease is None or binding.bound_at_ms or ledger.binding_of(lease) != binding:
        return Decision()
    job = ledger.jobs.get(lease.job)
    if job is None:
        decision = end_lease(ledger, lease, LeaseEnd.FAILED, event.why, now)
    else:
        decision = requeue_unstarted(ledger, job, LeaseEnd.FAILED, event.why, now)
    offer = ledger.offers.get(lease.node)
    decision.changes += [] if offer is None else [replace(offer, withdrawn=True)]
    decision.changes.append(replace(binding, gone=True))
    return decision


def on_freed(ledger: Ledger, event: GroupFreed, now: int) -> Decision:
    binding = ledger.bindings.get(event.key)
    return Decision([] if binding is None else [replace(binding, gone=True)])


def on_observed(ledger: Ledger, event: EngineObserved, now: int) -> Decision:
    """Align nodes and bindings with the engine's lists; the same list changes nothing."""
    engine = ledger.engines.get(event.name)
    if engine is None:
        return Decision()
    decision = Decision()
    if engine.mode == ATTACHED and engine.session != event.session:
        decision.changes.append(replace(engine, session=event.session))
        decision.records.append(Record("engine-session", "", event.name, reason=event.session))
    places = match_nodes(ledger, event.nodes)
    fence = ledger.counters.get(FENCE, 0)
    for node in ledger.nodes.values():
        fence = _observe_node(ledger, event, node, places.get(node.name), decision, fence, now)
    if fence != ledger.counters.get(FENCE, 0):
        decision.changes.append(Counter(FENCE, fence))
    return decision


def match_nodes(ledger: Ledger, places: tuple[EngineNode, ...]) -> dict[str, EngineNode]:
    """The grid's nodes among an engine's: by the engine's own name of it, by address, by the machine's name."""
    found: dict[str, EngineNode] = {}
    by_host = {node.host: node.name for node in ledger.nodes.values() if node.host not in ("local", "ray", PULL_HOST)}
    by_id = {node.engine_node: node.name for node in ledger.nodes.values() if node.engine_node}
    left = list(places)
    for name_of in (
        lambda place: by_id.get(place.id),
        lambda place: place.name,
        lambda place: by_host.get(place.address),
        lambda place: place.hostname,
    ):  # the surest match first, for all of them: several may share a machine
        unknown, left = left, []
        for place in unknown:
            name = name_of(place)
            if name in ledger.nodes and name not in found and name not in ledger.pull_nodes:
                found[name] = place
            else:
                left.append(place)
    return found


def _observe_node(
    ledger: Ledger,
    event: EngineObserved,
    node: Node,
    place: EngineNode | None,
    decision: Decision,
    fence: int,
    now: int,
) -> int:
    """Align the place, the free resources and the bindings of one node. Returns the last fence."""
    if place is None:
        if node.engine == event.name and node.engine_node:
            decision.changes += [
                replace(node, engine_node="", engine_lost_ms=now),
                EngineCapacity(node.name, EngineResources(), gone=True),
            ]
            for lease in ledger.leases_of(node.name):
                if (binding := ledger.binding_of(lease)) is not None:
                    decision.changes += [replace(binding, dropped=True), _with_bound_state(lease, bound=False)]
            decision.records.append(Record("engine-lost", "", node.name, node.name, f"{event.name} has lost it"))
        return fence
    if (node.engine, node.engine_node) != (event.name, place.id):
        node = replace(node, engine=event.name, engine_node=place.id, engine_lost_ms=0)
        decision.changes.append(node)
        decision.records.append(Record("engine-found", "", node.name, node.name, f"{event.name} node {place.id}"))
    stock = EngineCapacity(node.name, place.room)
    if ledger.engine_capacities.get(node.name) != stock:
        decision.changes.append(stock)
    there = None if event.groups is None else {group for group, where in event.groups if where in ("", place.id)}
    for lease in ledger.leases_of(node.name):
        binding = ledger.binding_of(lease)
        settled = lease.state is LeaseState.RELEASING or lease.request.use_lease or lease.recovered
        if settled or _is_valid(binding, place, there, event.asked_at_ms):
            if binding is not None and is_automatic(lease.request):
                _note_use(ledger, lease, binding, event, decision, now)
            continue
        found = 0  # fence of its group in the engine, if the ledger has forgotten the binding
        if binding is None:
            epoch, groups = ledger.counters.get("epoch", 0), (parse_group_name(group) for group in there or ())
            fences = (known for lease_id, known in filter(None, groups) if lease_id == lease.id)
            found = max((known for known in fences if is_plausible_epoch(epoch_of(known), epoch)), default=0)
        fence += 1
        raised = node_above_fence(node, found, fence)
        if raised is not node:
            decision.changes.append(node := raised)
        own = found or fence_on(node, fence)
        fresh = Binding(
            lease_id=lease.id,
            fence=own,
            node=node.name,
            place=place.id,
            made_at_ms=now,
            bound_at_ms=now if found else 0,
            again=True,
        )
        decision.changes += [fresh, _with_bound_state(replace(lease, engine=event.name), bound=bool(found))]
        decision.records.append(_binding_record("found-bound" if found else "rebinding", lease, fresh))
    return fence


def _note_use(
    ledger: Ledger, lease: Lease, binding: Binding, event: EngineObserved, decision: Decision, now: int
) -> None:
    """Note whether the engine's own tasks use an automatic lease; nothing, where that is as before."""
    if binding.in_use == (binding.group in event.in_use):
        return
    decision.changes.append(replace(binding, in_use=not binding.in_use, was_used=True))
    target, resource = lease.request.target, resource_of(lease.request.ask)
    if target in ledger.nodes:
        state = ledger.rebalance_states.get(target) or RebalanceState(node=target)
        watch = replace(state.watch(resource), used_at_ms=now)
        decision.changes.append(replace(state, **{str(resource): watch}))
    if not binding.in_use:
        data = {"action": USED, "resource_type": str(resource), "target_node": target, "source_node": lease.node}
        reason = f"tasks of {lease.engine} use it"
        decision.records.append(Record("rebalanced", GRID_USER, lease.id, target, reason, data={**data}))


def _is_valid(binding: Binding | None, place: EngineNode, there: set[str] | None, asked_at_ms: int) -> bool:
    """Whether a binding may stay: it is being made, its group was listed, or the list is older than it."""
    if binding is None or binding.place != place.id:
        return False
    if not binding.bound_at_ms or there is None or binding.bound_at_ms >= asked_at_ms:
        return True
    return binding.group in there


def _with_bound_state(lease: Lease, *, bound: bool) -> Lease:
    """A plain lease in the state of its new binding."""
    if lease.job or lease.awaits:
        return lease
    if bound and lease.state is LeaseState.RESERVING:
        return replace(lease, state=advance(lease.state, Step.BIND))
    if not bound and lease.state is LeaseState.ACTIVE:
        return replace(lease, state=advance(lease.state, Step.UNBIND))
    return lease


def expire_lost_nodes(ledger: Ledger, now: int) -> Decision:
    """End the leases of nodes that the engine has lost for longer than their hold; jobs run on by the agent."""
    decision = Decision()
    for node in ledger.nodes.values():
        if (
            node.engine_lost_ms
            and not node.engine_node
            and now - node.engine_lost_ms >= (node.hold_ms or LOST_AFTER_MS)
        ):
            reason = f"{node.engine} has lost {node.name}, and it did not come back within its hold"
            backed = [lease for lease in ledger.leases_of(node.name) if lease.engine]
            lost = [LeaseLost(lease.id, reason) for lease in backed if not lease.job]
            decision.follow += lost[:MAX_LEASES_PER_STEP]
            if lost[MAX_LEASES_PER_STEP:]:  # the rest in the next steps
                decision.later = [TimePassed()]
                continue
            decision.changes.append(replace(node, engine="", engine_lost_ms=0))
            decision.changes += [replace(lease, engine="") for lease in backed if lease.job]
    return decision


def release_engine(ledger: Ledger, engine: str) -> list[Row]:
    """Rows without an engine: the grid alone keeps its leases from now on."""
    rows: list[Row] = []
    for node in ledger.nodes.values():
        if node.engine == engine:
            rows.append(replace(node, engine="", engine_node="", engine_lost_ms=0))
            rows.append(EngineCapacity(node.name, EngineResources(), gone=True))
    backed = (lease for lease in ledger.leases.values() if lease.engine == engine)
    rows += [_with_bound_state(replace(lease, engine=""), bound=True) for lease in backed]
    return [*rows, *(replace(binding, gone=True) for binding in ledger.bindings.values())]


def on_registered(ledger: Ledger, event: EngineRegistered, now: int) -> Decision:
    """Register an engine, or what has changed about it; one of another mode has to be removed first."""
    old = ledger.engines.get(event.name)
    if old is not None and old.mode != event.mode:
        raise Refused(f"{event.name} is {old.mode} at {old.address} already; give that up first")
    row = EngineRow(**asdict(event))
    if row == old:
        return Decision()
    data = {"mode": row.mode, "address": row.address, "session": row.session, "nodes": list(row.nodes)}
    return Decision([row], [Record("engine-registered", "", row.name, data=data)])


def on_removed(ledger: Ledger, event: EngineRemoved, now: int) -> Decision:
    """Remove an engine; removing one that is not there is harmless."""
    row = ledger.engines.get(event.name)
    if row is None:
        return Decision()
    changes = [replace(row, gone=True), *release_engine(ledger, row.name)]
    return Decision(changes, [Record("engine-removed", "", row.name, reason=event.detail)])
