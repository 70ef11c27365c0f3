"""The ledger: all living rows, and the indexes that decisions need.

- `apply` is the only writer and cannot refuse: its changes are decided.
- Every attribute is a table of rows or an index that `apply` derives from them; `check` rebuilds and compares them.
- The claims on a node never exceed its capacity and caps. A preemptor (`awaits`) counts from when its victims are gone,
  a recovered lease from when its node was heard.
- Rows that are over leave; the store keeps their history.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from distributed_grid.domain.blocks import Block, MemoryServerRow
from distributed_grid.domain.deliveries import Delivery
from distributed_grid.domain.engines import Binding, EngineCapacity, EngineRow
from distributed_grid.domain.indexes.columns import (
    NO_DEVICE,
    THOUSANDTH,
    WHOLE_ONLY,
    FreeColumns,
    RunningColumns,
)
from distributed_grid.domain.indexes.node_claims import NodeClaims, shared_though_exclusive
from distributed_grid.domain.indexes.waiting_index import WaitingIndex, remove_sorted
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, Request, first_fence
from distributed_grid.domain.moves import MOVE_PREFIX, AutoOffloadState, DegradedNode, Move, MoveConsent, OffloadWatch
from distributed_grid.domain.nodes import Node, NodeObservation, Offer, pressure
from distributed_grid.domain.rebalancing import GRID_USER, RebalanceState
from distributed_grid.domain.resources import NOTHING, WHOLE_GPU, Capacity, Claim
from distributed_grid.domain.rows import Counter, R, Row
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import LeaseState, MoveState, NodeState
from distributed_grid.domain.statistics import Account, QueueProgress, RequestShapes
from distributed_grid.domain.workers import OfferClosure, ScalingRules, Spending, UtilizationWindow, Worker, WorkerRules

_NO_CLAIMS = NodeClaims()
L = TypeVar("L", str, tuple[str, str])
C = TypeVar("C")
Reindex = Callable[[R | None, R], None]
"""Updates the indexes over one kind of rows: the row before, or None, and the row as it is written now."""


class Ledger:
    """All living rows, with the indexes that deciding needs."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._tables: dict[type[Row], tuple[dict[str, Any], Reindex[Any] | None]] = {}
        self._caches: dict[type, object] = {}
        self.columns = FreeColumns()
        self.running = RunningColumns()
        self.node_claims: dict[str, NodeClaims] = {}

        self.counters: dict[str, int] = {}
        self._table(Counter, self._index_counter)
        self.accounts = self._table(Account)
        self.policy = self._single(SchedulingPolicy(), "policy")
        self.request_shapes = self._single(RequestShapes(), "request_shapes")
        self.queue_progress = self._single(QueueProgress(), "queue_progress")
        self.auto_offload = self._single(AutoOffloadState(), "auto_offload")
        self.worker_rules = self._single(WorkerRules(), "worker_rules")
        self.scaling = self._single(ScalingRules(), "scaling")
        self.utilization = self._single(UtilizationWindow(), "utilization")

        self.nodes = self._table(Node, self._index_node)
        self.labels: dict[tuple[str, str], dict[str, None]] = {}
        self.pull_nodes: dict[str, None] = {}

        self.leases = self._table(Lease, self._index_lease)
        self.held: dict[str, NodeClaims] = {}
        self.leases_on: dict[str, dict[str, None]] = {}
        self.leases_by_user: dict[str, dict[str, None]] = {}
        self.reservations_on: dict[str, dict[str, None]] = {}
        self.groups: dict[str, dict[str, None]] = {}
        self.gangs: dict[str, dict[str, None]] = {}
        self.dependents: dict[str, dict[str, None]] = {}
        self.awaiting: dict[str, dict[str, None]] = {}
        self.waiting: list[tuple[int, int, str]] = []
        self.queue_groups: dict[tuple[Request, bool], list[tuple[int, str]]] = {}
        self.waiting_index = WaitingIndex()
        self.due: list[tuple[int, str]] = []
        self.by_request: dict[str, str] = {}

        self.jobs = self._table(Job, self._index_job)
        self.jobs_on: dict[str, dict[str, None]] = {}
        self.job_uids: dict[str, str] = {}
        self.awaited_checkpoints: dict[str, None] = {}
        self.deliveries = self._table(Delivery)

        self.engines = self._table(EngineRow)
        self.bindings = self._table(Binding, self._index_binding)
        self.bindings_of: dict[str, dict[str, None]] = {}

        self.blocks = self._table(Block, self._index_block)
        self.block_names: dict[tuple[str, str], str] = {}
        self.blocks_at: dict[str, dict[str, None]] = {}
        self.unsettled_blocks: dict[str, None] = {}

        self.workers = self._table(Worker)
        self.spending = self._table(Spending)
        self.offer_closures = self._table(OfferClosure)

        self.moves = self._table(Move, self._index_move)
        self.moves_by_job: dict[str, str] = {}
        self.moves_at: dict[str, dict[str, None]] = {}
        self.consents = self._table(MoveConsent)
        self.degraded = self._table(DegradedNode)

        self.observations = self._table(NodeObservation, self._index_observation)
        self.asking_nodes: dict[str, None] = {}
        self.offers = self._table(Offer, self._index_offer)
        self.rebalance_states = self._table(RebalanceState)
        self.offload_watches = self._table(OffloadWatch)
        self.engine_capacities = self._table(EngineCapacity)
        self.memory_servers = self._table(MemoryServerRow)
        self.apply(rows)

    def _table(self, row_type: type[R], reindex: Reindex[R] | None = None) -> dict[str, R]:
        """The table of a kind of rows, by key."""
        table: dict[str, R] = {}
        self._tables[row_type] = (table, reindex)
        return table

    def _single(self, default: R, name: str) -> R:
        """The default of a kind with a single row, which is written to the attribute of this name."""
        self._table(type(default), lambda _, row: setattr(self, name, row))
        return default

    def apply(self, changes: Iterable[Row]) -> None:
        """Write decided changes."""
        for row in changes:
            table, reindex = self._tables[type(row)]
            key = row.key
            old = table.get(key)
            if row.is_over:
                table.pop(key, None)
            else:
                table[key] = row
            if reindex is not None:
                reindex(old, row)

    def cached(self, kind: type[C]) -> C | None:
        """A value that scheduling has derived from the rows, by its type; it may be missing at any time."""
        value = self._caches.get(kind)
        return value if isinstance(value, kind) else None

    def cache(self, value: C) -> C:
        """Keep a derived value of its type for `cached`."""
        self._caches[type(value)] = value
        return value

    def claims_on(self, node: str) -> NodeClaims:
        """The sum of the claims on a node; do not write to it."""
        return self.node_claims.get(node, _NO_CLAIMS)

    def lends(self, node: str) -> Capacity:
        """All resources that a node lends now, current leases included."""
        offer = self.offers.get(node)
        return offer.lends if offer is not None else NOTHING

    def leases_of(self, node: str) -> Iterator[Lease]:
        """The leases that count against a node."""
        return (self.leases[lease_id] for lease_id in self.leases_on.get(node, ()))

    def oldest_waiting(self) -> Iterator[Lease]:
        """The oldest request of each group of equal ones, by priority, then age."""
        return (self.leases[lease_id] for *_, lease_id in self.waiting_index.heads)

    def jobs_of(self, node: str) -> Iterator[Job]:
        """The jobs with a running attempt on a node."""
        return (self.jobs[uid] for uid in self.jobs_on.get(node, ()))

    def held_by(self, user: str) -> NodeClaims:
        """The sum of the claims of a user; do not write to it."""
        return self.held.get(user, _NO_CLAIMS)

    def labelled(self, key: str, value: str) -> dict[str, None]:
        """The nodes that carry a label; without a value those with any value of it, or with this tag."""
        return self.labels.get((key, value), {})

    def nodes_of(self, name: str) -> set[str]:
        """The nodes of a name: the node itself, or those of the leases of the job or group of that name."""
        if name in self.nodes:
            return {name}
        group = self.groups.get(name)
        nodes = {self.leases[lease_id].node for lease_id in group} if group else set()
        job = self.jobs.get(self.job_uids.get(name, name))
        lease = self.leases.get(job.lease_id) if job is not None else self.leases.get(name)
        return nodes | {lease.node} if lease is not None and lease.holds else nodes

    def binding_of(self, lease: Lease) -> Binding | None:
        """The binding of a lease that is wanted: the newest, while the lease holds and its place is there."""
        keys = self.bindings_of.get(lease.id)
        if not keys or not lease.holds:
            return None
        newest = max((self.bindings[key] for key in keys), key=lambda binding: binding.fence)
        return None if newest.dropped else newest

    def due_by(self, now: int, limit: int) -> list[str]:
        """The first leases whose time has come, earliest first, at most `limit`."""
        return [lease_id for due_ms, lease_id in self.due[:limit] if due_ms <= now]

    def next_due_ms(self) -> int | None:
        return self.due[0][0] if self.due else None

    @property
    def is_empty(self) -> bool:
        return not (self.leases or self.jobs or self.blocks or self.workers or self.moves or self.deliveries)

    def _index_counter(self, _: Counter | None, counter: Counter) -> None:
        self.counters[counter.name] = counter.value

    def _index_lease(self, old: Lease | None, lease: Lease) -> None:
        self._count_lease(old, lease)
        if lease.request.task and (old is not None and old.holds) != lease.holds:
            _index(self.reservations_on, lease.node, lease.id, holds=lease.holds)
        if old is not None:
            for awaited in old.awaits:
                _index(self.awaiting, awaited, old.id, holds=False)
            if old.state is LeaseState.ASKED:
                remove_sorted(self.waiting, old.queue_key)
                group = old.queue_group
                members = self.queue_groups[group]
                remove_sorted(members, old.age_key)
                self.waiting_index.remove(old, members)
                if not members:
                    del self.queue_groups[group]
            if old.deadline_ms:
                remove_sorted(self.due, (old.deadline_ms, old.id))
        if lease.is_over:
            self.running.remove(lease)
            if lease.id == lease.request.id:
                self.by_request.pop(lease.request.id, None)
            return
        for awaited in lease.awaits:
            _index(self.awaiting, awaited, lease.id, holds=True)
        if lease.id == lease.request.id:
            self.by_request[lease.request.id] = lease.id
        if lease.state is LeaseState.ASKED:
            insort(self.waiting, lease.queue_key)
            members = self.queue_groups.setdefault(lease.queue_group, [])
            insort(members, lease.age_key)
            self.waiting_index.add(lease, members)
        if lease.deadline_ms:
            insort(self.due, (lease.deadline_ms, lease.id))
        if lease.holds:
            self.running.put(lease, self.jobs.get(lease.job), self.columns.row_of(lease.node))

    def _count_lease(self, old: Lease | None, new: Lease) -> None:
        """Move the sums from the old claim to the new one; most transitions change neither."""
        held = old is not None and old.holds
        if held and new.holds and old is not None and old.claim == new.claim and old.node == new.node:
            return
        if old is not None and held and old.claim is not None:
            self.node_claims[old.node].remove(old.claim)
            self.leases_on[old.node].pop(old.id, None)
            self._count_holder(old, old.claim, holds=False)
            self._write_free(old.node)
        if new.holds and new.claim is not None:
            _claims_in(self.node_claims, new.node).add(new.claim)
            self.leases_on.setdefault(new.node, {})[new.id] = None
            self._count_holder(new, new.claim, holds=True)
            self._write_free(new.node)

    def _count_holder(self, lease: Lease, claim: Claim, *, holds: bool) -> None:
        """Add or subtract a claim from the sums of its user, group and gang."""
        user = lease.request.user
        if holds:
            _claims_in(self.held, user).add(claim)
        else:
            self.held[user].remove(claim)
        _index(self.leases_by_user, user, lease.id, holds=holds)
        if lease.request.group:
            _index(self.groups, lease.request.group, lease.id, holds=holds)
        if lease.gang:
            _index(self.gangs, lease.gang, lease.id, holds=holds)
        if lease.request.use_lease:
            _index(self.dependents, lease.request.use_lease, lease.id, holds=holds)
        if user not in self.leases_by_user:
            self.held.pop(user, None)

    def _index_job(self, old: Job | None, job: Job) -> None:
        if job.checkpoint_from and not job.is_over:
            self.awaited_checkpoints[job.uid] = None
        elif old is not None and old.checkpoint_from:
            del self.awaited_checkpoints[job.uid]
        was, now = _node_of(old), "" if job.is_over else _node_of(job)
        if was != now:
            if was:
                _index(self.jobs_on, was, job.uid, holds=False)
            if now:
                _index(self.jobs_on, now, job.uid, holds=True)
        if job.is_over:
            self.job_uids.pop(job.id, None)
            self.by_request.pop(job.request.id, None)
        else:
            self.job_uids[job.id] = job.uid
            self.by_request[job.request.id] = job.uid
            if job.lease_id in self.running.slots:
                self.running.update_job(self.leases[job.lease_id], job)

    def _index_observation(self, _: NodeObservation | None, seen: NodeObservation) -> None:
        row = self.columns.row_of(seen.node)
        self.columns.busy[row] = seen.usage.cpu_busy_milli if seen.usage is not None else 0
        self.columns.asking[row] = seen.asking_since_ms > 0
        _mark(self.asking_nodes, seen.node, is_in=seen.asking_since_ms > 0)
        self._write_pressure(seen.node)

    def _write_pressure(self, name: str) -> None:
        """Update the pressure column of a node; without a measurement it is 0."""
        node, seen = self.nodes.get(name), self.observations.get(name)
        usage = seen.usage if seen is not None else None
        level = round(1000 * pressure(node.capacity, usage)) if node is not None and usage is not None else 0
        self.columns.pressure[self.columns.row_of(name)] = level

    def _index_block(self, old: Block | None, block: Block) -> None:
        if old is not None:
            for node in _nodes_of(old) - (frozenset() if block.is_over else _nodes_of(block)):
                _index(self.blocks_at, node, old.id, holds=False)
            if old.name and self.block_names.get((old.user, old.name)) == old.id:
                del self.block_names[old.user, old.name]
        _mark(self.unsettled_blocks, block.id, is_in=not (block.is_over or block.is_settled))
        if block.is_over:
            return
        for node in _nodes_of(block):
            _index(self.blocks_at, node, block.id, holds=True)
        if block.name and not block.freeing:
            self.block_names[block.user, block.name] = block.id

    def _index_move(self, old: Move | None, move: Move) -> None:
        for node in {old.source, old.target} if old is not None else ():
            _index(self.moves_at, node, move.id, holds=False)
        if old is not None and old.job:
            self.moves_by_job.pop(old.job, None)
        if move.is_over:
            return
        for node in (move.source, move.target):
            _index(self.moves_at, node, move.id, holds=True)
        if move.job:
            self.moves_by_job[move.job] = move.id

    def _index_binding(self, old: Binding | None, binding: Binding) -> None:
        if (old is None) != binding.is_over:
            _index(self.bindings_of, binding.lease_id, binding.key, holds=not binding.is_over)

    def _index_offer(self, _: Offer | None, offer: Offer) -> None:
        self._write_free(offer.node)

    def _index_node(self, old: Node | None, node: Node) -> None:
        before = _labels(old) if old is not None else frozenset()
        after = frozenset() if node.is_over else _labels(node)
        for label in before - after:
            _index(self.labels, label, node.name, holds=False)
        for label in after - before:
            _index(self.labels, label, node.name, holds=True)
        if node.is_over:
            for table in (
                self.observations,
                self.offers,
                self.rebalance_states,
                self.offload_watches,
                self.engine_capacities,
                self.memory_servers,
            ):
                table.pop(node.name, None)
            row = self.columns.row_of(node.name)
            self.columns.busy[row] = 0
            self.columns.asking[row] = False
            self.asking_nodes.pop(node.name, None)
        _mark(self.pull_nodes, node.name, is_in=node.is_pull and not node.is_over)
        # The columns that depend on the node's own row only, not on leases and offers.
        columns, there = self.columns, self.nodes.get(node.name)
        row = columns.row_of(node.name)
        columns.local[row] = there is not None and there.host == "local"
        columns.home[row] = there is not None and there.host == "local" and there.role == "head"
        columns.simulated[row] = there is not None and there.simulated
        columns.pull[row] = there is not None and there.is_pull
        columns.rank[row], columns.speed[row], columns.cost[row] = (
            (there.rank, there.speed_milli, there.cost_milli) if there is not None else (0, 0, 0)
        )
        most = there.lendable if there is not None else NOTHING
        columns.lends_cpu[row] = most.cpu_milli
        columns.lends_memory[row] = most.memory_bytes
        columns.lends_gpus[row] = len(most.gpus)
        columns.model[row] = columns.model_of(device.name for device in most.gpus) if most.gpus else 0
        columns.terms += 1
        self._write_pressure(node.name)
        self._write_free(node.name)

    def _write_free(self, name: str) -> None:
        """Update the free amounts of a node, and whether it is open."""
        columns, node, offer = self.columns, self.nodes.get(name), self.offers.get(name)
        row = columns.row_of(name)
        if node is None or offer is None:
            lends, claims = NOTHING, _NO_CLAIMS
            columns.open[row] = columns.keeps_cpu[row] = False
        else:
            lends, claims = offer.lends, self.node_claims.get(name, _NO_CLAIMS)
            columns.open[row], columns.keeps_cpu[row] = node.state is NodeState.ALIVE, offer.keeps_cpu
        columns.cpu[row] = cpu = lends.cpu_milli - claims.cpu_milli
        columns.memory[row] = memory = lends.memory_bytes - claims.memory_bytes
        slack = 0
        if lends.cpu_milli:
            slack += 1000 * cpu // lends.cpu_milli
        if lends.memory_bytes:
            slack += 1000 * memory // lends.memory_bytes
        if lends.gpus:
            parts = []  # 0 while a preemptor and its victims are both on a device
            for device in lends.gpus:
                free = max(claims.free_milli(device), 0)
                parts.append(free if not device.exclusive else WHOLE_ONLY if free == WHOLE_GPU else 0)
            columns.put_devices(row, parts)
        elif columns.devices[row, 0] != NO_DEVICE:
            columns.put_devices(row, ())
        columns.slack[row] = max(slack, 0) * THOUSANDTH
        columns.leases[row] = len(self.leases_on.get(name, ()))
        columns.touch(row)

    def rows(self, *, durable_only: bool = False) -> list[Row]:
        """Every living row; the ledger can be rebuilt from them."""
        tables = (table for kind, (table, _) in self._tables.items() if not (durable_only and kind.is_volatile))
        return [row for table in tables for row in table.values()]

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken or an index differs from the rows."""
        fresh = Ledger(self.rows())
        for name, index in vars(self).items():
            if name not in _COMPARED_APART:
                assert index == getattr(fresh, name), f"index {name} is not what the rows say"
        taken = {name: claims for name, claims in self.node_claims.items() if claims != _NO_CLAIMS}
        assert taken == {n: b for n, b in fresh.node_claims.items() if b != _NO_CLAIMS}, "claims differ from the leases"
        for name, row in self.columns.rows.items():
            if name not in fresh.columns.rows:
                assert not self.columns.open[row], f"{name} is gone, its column is open"
                fresh.columns.row_of(name)
        assert self.columns.equals(fresh.columns), "columns differ from the rows"
        assert self.running.facts(self.columns.names) == fresh.running.facts(fresh.columns.names), "running differ"
        assert self.running.leaving == fresh.running.leaving, "released leases differ from the rows"
        self._check_lending()
        self._check_leases()
        self._check_blocks()
        self._check_moves()

    def _check_lending(self) -> None:
        for name in {lease.node for lease in self.leases.values() if lease.holds}:
            node = self.nodes.get(name)
            assert node is not None, f"{name} lends, but is not a node"
            begun = (lease for lease in self.leases_of(name) if not lease.awaits and not lease.recovered)
            claims = [lease.claim for lease in begun if lease.claim is not None]
            excess = NodeClaims(claims).excess_over(node.lendable) or shared_though_exclusive(claims, node.lendable)
            assert excess is None, f"{name}: {excess}"

    def _check_leases(self) -> None:
        last_fence = self.counters.get("fence", 0)
        for lease in self.leases.values():
            assert (lease.claim is not None) == lease.holds, f"lease {lease.id} is {lease.state}, claim {lease.claim}"
            lender = self.nodes.get(lease.node)
            own = first_fence(lender.epoch + 1) if lender is not None and lender.epoch else 0
            assert lease.fence <= max(last_fence, own), f"lease {lease.id} has a fence from the future"
            assert not lease.awaits or lease.state is LeaseState.RESERVING, f"{lease.id} waits, but has started"
            assert not lease.recovered or lease.state is LeaseState.RESERVING, f"{lease.id} is a claim, but has started"
            assert all(victim in self.leases for victim in lease.awaits), f"{lease.id} waits for what is over"
            assert not lease.job or lease.job in self.jobs, f"lease {lease.id} outlived its job"
            if lease.engine and not lease.job and lease.state is LeaseState.ACTIVE:
                binding = self.binding_of(lease)
                assert binding is not None, f"lease {lease.id} is active without a binding"
                assert binding.bound_at_ms, f"lease {lease.id} is active, but {binding.group} is not there"
        for job in self.jobs.values():
            assert job.lease_id in self.leases, f"job {job.id} has no lease"
            assert self.leases[job.lease_id].job == job.uid, f"job {job.id} has somebody else's lease"

    def _check_blocks(self) -> None:
        for block in self.blocks.values():
            copies = [place.copy for place in block.everywhere]
            assert len(set(copies)) == len(copies), f"block {block.id} has a copy twice"
            here = [place.node for place in block.places if not place.on_disk]
            assert len(set(here)) == len(here), f"block {block.id} has two copies on one node"
            assert not (block.freeing and (block.places or block.moving)), f"block {block.id} is freed, but kept"
            for place in block.everywhere:
                lease = self.leases.get(place.copy)
                assert (lease is None) == place.on_disk, f"copy {place.copy} and its lease do not agree"
                assert lease is None or lease.node == place.node, f"copy {place.copy} is not where its lease is"
        for lease in self.leases.values():
            block_id = lease.request.block
            held = block_id and any(place.copy == lease.id for place in self.blocks[block_id].everywhere)
            assert held or not block_id, f"lease {lease.id} is of no copy of block {block_id}"

    def _check_moves(self) -> None:
        jobs = [move.job for move in self.moves.values() if move.job]
        assert len(set(jobs)) == len(jobs), "a job is moved twice"
        originals = [(move.source, move.process.identity) for move in self.moves.values() if move.process is not None]
        assert len(set(originals)) == len(originals), "a process is moved twice"
        for move in self.moves.values():
            lease = self.leases.get(move.lease_id)
            assert (lease is None) == (not move.lease_id), f"the room of {move.id} is not there"
            assert lease is None or (lease.request.id == move.id and not lease.job), f"{move.id} keeps foreign room"
            is_untouched = not move.is_decided and not move.commit_asked_at_ms
            assert lease is not None or not is_untouched, f"{move.id} is {move.state} without room"
            is_dead = move.state in (MoveState.DEAD, MoveState.RUNNING)
            is_running = move.state is MoveState.RUNNING
            assert lease is None or not is_running, f"{move.id} is {move.state}, but its room is kept"
            has_job = move.job in self.jobs or (is_dead and bool(move.result))
            assert has_job == (is_dead or move.process is None), f"{move.id} is {move.state}, its job {move.job!r}"
        for lease in self.leases.values():
            is_room = lease.request.user == GRID_USER and lease.id.startswith(MOVE_PREFIX)
            is_kept = lease.id in self.moves and self.moves[lease.id].lease_id == lease.id
            assert not is_room or is_kept, f"room {lease.id} is kept for no move"


_COMPARED_APART = frozenset({"_tables", "_caches", "columns", "running", "node_claims", "leases_on"})
"""Attributes of a ledger that `check` compares in another way: those that keep empty entries, and no index."""


def _node_of(job: Job | None) -> str:
    """The node of a job's running attempt; empty where it has none."""
    attempt = job.attempt if job is not None else None
    return attempt.node if attempt is not None else ""


def _nodes_of(block: Block) -> frozenset[str]:
    return frozenset(place.node for place in block.everywhere)


def _claims_in(sums: dict[str, NodeClaims], name: str) -> NodeClaims:
    claims = sums.get(name)
    if claims is None:
        claims = sums[name] = NodeClaims()
    return claims


def _labels(node: Node) -> frozenset[tuple[str, str]]:
    """The labels and tags of a node, as index keys."""
    keys = [(key, "") for key, _ in node.labels]
    return frozenset([*node.labels, *keys, *((tag, "") for tag in node.tags)])


def _index(table: dict[L, dict[str, None]], key: L, name: str, *, holds: bool) -> None:
    """Add or remove a name under a key."""
    if holds:
        table.setdefault(key, {})[name] = None
    else:
        table[key].pop(name, None)
        if not table[key]:
            del table[key]


def _mark(index: dict[str, None], name: str, *, is_in: bool) -> None:
    """Add or remove a name."""
    if is_in:
        index[name] = None
    else:
        index.pop(name, None)
