"""The ledger: everything that is alive, and the only place that knows.

Rule 1: `apply` is the only writer, and it cannot refuse: what it gets has been decided.
Rule 2: whatever is not a row is an index derived in `apply`; `check` rebuilds and compares.
Rule 3: the claims on a node never exceed what its capacity and caps allow, not even while one lease makes
room for another: what has not started yet (`awaits`) counts from when its victims are gone.
Rule 4: what is over leaves; history is the store's business.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import TypeVar

from distributed_grid.domain.books import Book, shared_though_exclusive
from distributed_grid.domain.changes import VOLATILE, Counter, Row
from distributed_grid.domain.columns import Columns
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.lives import LeaseState, NodeState
from distributed_grid.domain.nodes import Node, Sighting
from distributed_grid.domain.offers import Offer
from distributed_grid.domain.resources import NOTHING, Capacity

_NO_BOOK = Book()
T = TypeVar("T", tuple[int, str], tuple[int, int, str])


class Ledger:
    """All living rows, with the indexes that deciding needs."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.nodes: dict[str, Node] = {}
        self.sightings: dict[str, Sighting] = {}
        self.offers: dict[str, Offer] = {}
        self.leases: dict[str, Lease] = {}
        self.jobs: dict[str, Job] = {}
        self.counters: dict[str, int] = {}
        self.columns = Columns()
        self.books: dict[str, Book] = {}
        self.leases_on: dict[str, dict[str, None]] = {}
        self.waiting: list[tuple[int, int, str]] = []
        self.due: list[tuple[int, str]] = []
        self.by_request: dict[str, str] = {}
        self.job_uids: dict[str, str] = {}
        self.apply(rows)

    def apply(self, changes: Iterable[Row]) -> None:
        """Take decided changes in."""
        for row in changes:
            if isinstance(row, Lease):
                self._put_lease(row)
            elif isinstance(row, Job):
                self._put_job(row)
            elif isinstance(row, Counter):
                self.counters[row.name] = row.value
            elif isinstance(row, Sighting):
                self.sightings[row.node] = row
            elif isinstance(row, Offer):
                self._put_offer(row)
            else:
                self._put_node(row)

    def book(self, node: str) -> Book:
        """What is taken on a node; do not write to it."""
        return self.books.get(node, _NO_BOOK)

    def lends(self, node: str) -> Capacity:
        """What a node lends in all right now: its offer, within what it may lend at most."""
        offer = self.offers.get(node)
        return offer.lends if offer is not None else NOTHING

    def leases_of(self, node: str) -> Iterator[Lease]:
        """The leases that count against a node."""
        return (self.leases[lease_id] for lease_id in self.leases_on.get(node, ()))

    def due_by(self, now: int) -> list[str]:
        """The leases whose time has come, earliest first."""
        return [lease_id for _, lease_id in self.due[: bisect_right(self.due, (now, "\U0010ffff"))]]

    def next_due_ms(self) -> int | None:
        return self.due[0][0] if self.due else None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held and nobody waits."""
        return not self.leases and not self.jobs

    def _put_lease(self, lease: Lease) -> None:
        old = self.leases.get(lease.id)
        self._count_lease(old, lease)
        if old is not None:
            self._unindex(old)
        if lease.is_over:
            self.leases.pop(lease.id, None)
            if not lease.job:
                self.by_request.pop(lease.request.id, None)
            return
        self.leases[lease.id] = lease
        if not lease.job:
            self.by_request[lease.request.id] = lease.id
        if lease.state is LeaseState.ASKED:
            insort(self.waiting, lease.place_in_line)
        if lease.deadline_ms:
            insort(self.due, (lease.deadline_ms, lease.id))

    def _unindex(self, old: Lease) -> None:
        if old.state is LeaseState.ASKED:
            _take_out(self.waiting, old.place_in_line)
        if old.deadline_ms:
            _take_out(self.due, (old.deadline_ms, old.id))

    def _count_lease(self, old: Lease | None, new: Lease) -> None:
        """Move the books from the old claim to the new one; most steps of a lease change neither."""
        held = old is not None and old.holds
        if held and new.holds and old is not None and old.claim == new.claim and old.node == new.node:
            return
        if old is not None and held and old.claim is not None:
            self.books[old.node].give_back(old.claim)
            self.leases_on[old.node].pop(old.id, None)
            self._refresh(old.node)
        if new.holds and new.claim is not None:
            self.books.setdefault(new.node, Book()).take(new.claim)
            self.leases_on.setdefault(new.node, {})[new.id] = None
            self._refresh(new.node)

    def _put_job(self, job: Job) -> None:
        if job.is_over:
            self.jobs.pop(job.uid, None)
            self.job_uids.pop(job.id, None)
            self.by_request.pop(job.request.id, None)
        else:
            self.jobs[job.uid] = job
            self.job_uids[job.id] = job.uid
            self.by_request[job.request.id] = job.uid

    def _put_offer(self, offer: Offer) -> None:
        if offer.is_over:
            self.offers.pop(offer.node, None)
        else:
            self.offers[offer.node] = offer
        self._refresh(offer.node)

    def _put_node(self, node: Node) -> None:
        if node.is_over:
            for table in (self.nodes, self.sightings, self.offers):
                table.pop(node.name, None)
        else:
            self.nodes[node.name] = node
        self._refresh(node.name)

    def _refresh(self, name: str) -> None:
        """Write one node's row of the columns anew."""
        columns = self.columns
        row = columns.row_of(name)
        node, offer = self.nodes.get(name), self.offers.get(name)
        if node is None or offer is None:
            columns.open[row] = False
            columns.cpu[row] = columns.memory[row] = columns.gpu_whole[row] = columns.gpu_part[row] = 0
            columns.slack[row] = 0
        else:
            lends, book = offer.lends, self.books.get(name, _NO_BOOK)
            cpu = lends.cpu_milli - book.cpu_milli
            memory = lends.memory_bytes - book.memory_bytes
            columns.open[row] = node.state is NodeState.ALIVE
            columns.cpu[row] = cpu
            columns.memory[row] = memory
            slack = 0
            if lends.gpus:
                columns.gpu_whole[row] = whole = book.whole_free(lends)
                columns.gpu_part[row] = book.part_free(lends)
                slack = 1000 * whole // len(lends.gpus)
            else:
                columns.gpu_whole[row] = columns.gpu_part[row] = 0
            if lends.cpu_milli:
                slack += 1000 * cpu // lends.cpu_milli
            if lends.memory_bytes:
                slack += 1000 * memory // lends.memory_bytes
            columns.slack[row] = node.rank * 10_000 + max(slack, 0)
        most = node.lendable if node is not None else NOTHING
        columns.lends_cpu[row] = most.cpu_milli
        columns.lends_memory[row] = most.memory_bytes
        columns.lends_gpus[row] = len(most.gpus)

    def rows(self, *, durable_only: bool = False) -> list[Row]:
        """Every living row; of these the ledger can be built anew."""
        counters: list[Row] = [Counter(name, value) for name, value in self.counters.items()]
        found: list[Row] = [*counters, *self.nodes.values(), *self.leases.values(), *self.jobs.values()]
        if not durable_only:
            found += [*self.sightings.values(), *self.offers.values()]
        return [row for row in found if not (durable_only and row.kind in VOLATILE)]

    def check(self) -> None:
        """Raise AssertionError where a law is broken or an index is not what the rows say."""
        fresh = Ledger(self.rows())
        for name in ("waiting", "due", "by_request", "job_uids"):
            assert getattr(self, name) == getattr(fresh, name), f"index {name} is not what the rows say"
        taken = {name: book for name, book in self.books.items() if book != _NO_BOOK}
        assert taken == {n: b for n, b in fresh.books.items() if b != _NO_BOOK}, "books differ from the claims"
        for name, row in self.columns.rows.items():
            if name not in fresh.columns.rows:
                assert not self.columns.open[row], f"{name} is gone, its column is open"
                fresh.columns.row_of(name)
        assert self.columns.equals(fresh.columns), "columns differ from the rows"
        self._check_lending()
        self._check_leases()

    def _check_lending(self) -> None:
        for name in {lease.node for lease in self.leases.values() if lease.holds}:
            node = self.nodes.get(name)
            assert node is not None, f"{name} lends, but is not a node"
            claims = [lease.claim for lease in self.leases_of(name) if not lease.awaits and lease.claim is not None]
            excess = Book(claims).excess_over(node.lendable) or shared_though_exclusive(claims, node.lendable)
            assert excess is None, f"{name}: {excess}"

    def _check_leases(self) -> None:
        last_fence = self.counters.get("fence", 0)
        for lease in self.leases.values():
            assert (lease.claim is not None) == lease.holds, f"lease {lease.id} is {lease.state}, claim {lease.claim}"
            assert lease.fence <= last_fence, f"lease {lease.id} has a fence from the future"
            assert not lease.awaits or lease.state is LeaseState.RESERVING, f"{lease.id} waits, but has started"
            assert all(victim in self.leases for victim in lease.awaits), f"{lease.id} waits for what is over"
            assert not lease.job or lease.job in self.jobs, f"lease {lease.id} outlived its job"
        for job in self.jobs.values():
            assert job.lease_id in self.leases, f"job {job.id} has no lease"
            assert self.leases[job.lease_id].job == job.uid, f"job {job.id} has somebody else's lease"


def _take_out(ordered: list[T], item: T) -> None:
    """Remove an item from a sorted list."""
    place = bisect_left(ordered, item)
    if place < len(ordered) and ordered[place] == item:
        del ordered[place]
