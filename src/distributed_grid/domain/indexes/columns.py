"""Column indexes over nodes and running leases, so that filters and searches are vector operations.

Both are derived in `Ledger.apply`; nothing is known only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.jobs import Ending, Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.resources import WHOLE_GPU, is_model
from distributed_grid.domain.states import LeaseState

Column = NDArray[np.int64]
_FREE_COLUMNS = (
    "cpu", "memory", "gpu_whole", "gpu_part", "gpu_left", "slack", "rank", "leases", "busy", "pressure", "speed",
    "cost", "lends_cpu", "lends_memory", "lends_gpus", "model",
)  # fmt: skip
_FLAG_COLUMNS = ("open", "local", "home", "simulated", "pull", "asking", "keeps_cpu")
_MODEL = _FREE_COLUMNS.index("model")

WHOLE = 1_000_000
"""A node's whole offer of a resource, where parts are compared."""
THOUSANDTH = WHOLE // 1000
"""Nodes that differ by less are equal: free amounts are rounded down to it."""

WHOLE_ONLY = WHOLE_GPU + 1
"""Free part of an idle device that is only lent whole."""
NO_DEVICE = -1


class FreeColumns:
    """Parallel arrays over the nodes.

    `open` where a node takes new leases, `local` where it is on this machine, `home` where it is the head on it,
    `simulated` where it stands there for a machine of its own, `pull` where it has no agent, `asking` where such a one
    waits for a task, `keeps_cpu` where no command starts for its owner's sake; `slack` is how free it is, 0 to `WHOLE`
    for CPU and for memory; `busy` how hard its CPU works and `pressure` how hard all of it does, 0 to 1000; `devices`
    what is left of each GPU.
    """

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.names: list[str] = []
        self.models: dict[frozenset[str], int] = {frozenset(): 0}
        self._size = 0
        self.clock = 0  # counts the writes of free amounts, on any row
        self.terms = 0  # counts the writes of a node's most, with its rank, speed, cost and models
        self._table: Column = np.zeros((len(_FREE_COLUMNS), 16), dtype=np.int64)
        self._flags: NDArray[np.bool_] = np.zeros((len(_FLAG_COLUMNS), 16), dtype=np.bool_)
        self._devices: Column = np.full((16, 1), NO_DEVICE, dtype=np.int64)
        self._changed: Column = np.zeros(16, dtype=np.int64)
        self.layout = 0  # grows when the arrays are replaced
        self._cut()

    def _cut(self) -> None:
        """Views over the rows in use."""
        size = self._size
        self.__dict__.update(zip(_FREE_COLUMNS, self._table[:, :size], strict=True))
        self.__dict__.update(zip(_FLAG_COLUMNS, self._flags[:, :size], strict=True))
        self.changed, self.devices = self._changed[:size], self._devices[:size]
        self.layout += 1

    cpu: Column
    memory: Column
    gpu_whole: Column
    gpu_part: Column
    gpu_left: Column
    slack: Column
    rank: Column
    leases: Column
    busy: Column
    pressure: Column
    speed: Column
    cost: Column
    lends_cpu: Column
    lends_memory: Column
    lends_gpus: Column
    model: Column
    changed: Column
    devices: Column
    open: NDArray[np.bool_]
    local: NDArray[np.bool_]
    home: NDArray[np.bool_]
    simulated: NDArray[np.bool_]
    pull: NDArray[np.bool_]
    asking: NDArray[np.bool_]
    keeps_cpu: NDArray[np.bool_]

    def row_of(self, node: str) -> int:
        """The row of a node, made on first use; rows are never given to another node."""
        row = self.rows.get(node)
        if row is None:
            row = self._size
            if row == len(self._changed):
                self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
                self._flags = np.concatenate((self._flags, np.zeros_like(self._flags)), axis=1)
                self._changed = np.concatenate((self._changed, np.zeros_like(self._changed)))
                self._devices = np.concatenate((self._devices, np.full_like(self._devices, NO_DEVICE)))
            self.rows[node] = row
            self.names.append(node)
            self._size += 1
            self._cut()
        return row

    def mask_of(self, nodes: Iterable[str]) -> NDArray[np.bool_]:
        """The rows of these nodes, as a mask; unknown names are ignored."""
        mask = np.zeros(self._size, dtype=np.bool_)
        for name in nodes:
            row = self.rows.get(name)
            if row is not None:
                mask[row] = True
        return mask

    def touch(self, row: int) -> None:
        """Note that a row was written: its `changed` grows."""
        self.clock += 1
        self.changed[row] = self.clock

    def put_devices(self, row: int, free: Sequence[int]) -> None:
        """Write the free part of each device of a node, in their order."""
        if len(free) > self._devices.shape[1]:
            more = len(free) - self._devices.shape[1]
            self._devices = np.pad(self._devices, ((0, 0), (0, more)), constant_values=NO_DEVICE)
            self._cut()
        self.devices[row] = NO_DEVICE
        self.devices[row, : len(free)] = free
        self.gpu_whole[row] = sum(milli >= WHOLE_GPU for milli in free)
        self.gpu_part[row] = max((milli for milli in free if milli != WHOLE_ONLY), default=0)
        self.gpu_left[row] = sum(min(milli, WHOLE_GPU) for milli in free)

    def model_of(self, names: Iterable[str]) -> int:
        """The number that stands for a node with GPUs of these models, made on first use."""
        return self.models.setdefault(frozenset(names), len(self.models))

    def has_model(self, wanted: tuple[str, ...]) -> NDArray[np.bool_]:
        """The rows with at least one GPU whose name contains one of the wanted words, whatever their case."""
        return self.of_model(wanted)[self.model]

    def of_model(self, wanted: tuple[str, ...]) -> NDArray[np.bool_]:
        """Mask over the numbers of models (`model_of`) with a GPU of a wanted one; without a wish all of them."""
        fits = [not wanted or any(is_model(name, wanted) for name in names) for names in self.models]
        return np.array(fits, dtype=np.bool_)

    def equals(self, other: FreeColumns) -> bool:
        """Whether every node has the same values, in any order of the rows."""
        if set(self.rows) != set(other.rows):
            return False
        mine, its = [*self.rows.values()], [other.rows[node] for node in self.rows]
        width = max(self._devices.shape[1], other._devices.shape[1])
        return (
            np.array_equal(self._table[:_MODEL, mine], other._table[:_MODEL, its])  # a model has a number in each
            and np.array_equal(self._flags[:, mine], other._flags[:, its])
            and np.array_equal(_padded(self._devices[mine], width), _padded(other._devices[its], width))
        )


def _padded(devices: Column, width: int) -> Column:
    if devices.shape[1] == width:
        return devices
    return np.pad(devices, ((0, 0), (0, width - devices.shape[1])), constant_values=NO_DEVICE)


_RUNNING_COLUMNS = ("node", "priority", "started", "since", "preemptions", "cpu", "memory", "gpu", "devices", "share")
_BEGAN, _SINCE, _SPENT = (
    _RUNNING_COLUMNS.index("started"),
    _RUNNING_COLUMNS.index("since"),
    _RUNNING_COLUMNS.index("preemptions"),
)


class RunningColumns:
    """Parallel arrays over the leases that are active.

    `node` is the node's row in the columns; `began` when it started, `since` when it started or last marked a
    checkpoint; `spent` how often its job was displaced before. Of GPUs it holds `gpu` thousandths in all, on so many
    `devices`, the largest `share` on one of them.
    """

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.ids: list[str] = []
        self.leaving: dict[str, dict[str, None]] = {}
        self._table: NDArray[np.int64] = np.zeros((len(_RUNNING_COLUMNS), 16), dtype=np.int64)

    def column(self, name: str) -> Column:
        """One fact of every slot in use; do not write to it."""
        found: Column = self._table[_RUNNING_COLUMNS.index(name), : len(self.ids)]
        return found

    def put(self, lease: Lease, job: Job | None, row: int) -> None:
        """Write a lease with its job; `row` is that of its node."""
        if lease.state is LeaseState.RELEASING:
            self.leaving.setdefault(lease.node, {})[lease.id] = None
        is_preemptible = not (lease.request.block or lease.request.worker)
        if lease.state is not LeaseState.ACTIVE or lease.claim is None or not is_preemptible:
            self._drop(lease.id)
            return
        claim = lease.claim
        began, since, spent = _run_history(lease, job)
        slot = self.slots.get(lease.id)
        if slot is None:
            slot = len(self.ids)
            if slot == self._table.shape[1]:
                self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self.slots[lease.id] = slot
            self.ids.append(lease.id)
        self._table[:, slot] = (
            row,
            lease.request.priority,
            began,
            since,
            spent,
            claim.cpu_milli,
            claim.memory_bytes,
            sum(share.milli for share in claim.gpus) if claim.gpus else 0,
            len(claim.gpus),
            max(share.milli for share in claim.gpus) if claim.gpus else 0,
        )

    def update_job(self, lease: Lease, job: Job) -> None:
        slot = self.slots.get(lease.id)
        if slot is not None:
            table = self._table
            table[_BEGAN, slot], table[_SINCE, slot], table[_SPENT, slot] = _run_history(lease, job)

    def remove(self, lease: Lease) -> None:
        self._drop(lease.id)
        there = self.leaving.get(lease.node)
        if there is not None and lease.id in there:
            del there[lease.id]
            if not there:
                del self.leaving[lease.node]

    def _drop(self, lease_id: str) -> None:
        """Give the slot up; the last one moves into it."""
        slot = self.slots.pop(lease_id, None)
        if slot is None:
            return
        last = self.ids.pop()
        if last != lease_id:
            self._table[:, slot] = self._table[:, len(self.ids)]
            self.ids[slot] = last
            self.slots[last] = slot

    def facts(self, nodes: Sequence[str]) -> dict[str, tuple[str | int, ...]]:
        """All columns by lease, with the node's name: equal for equal ledgers."""
        found: dict[str, tuple[str | int, ...]] = {}
        for lease_id, slot in self.slots.items():
            row, *facts = self._table[:, slot].tolist()
            found[lease_id] = (nodes[row], *facts)
        return found


def _run_history(lease: Lease, job: Job | None) -> tuple[int, int, int]:
    """Start of a lease's run, its last checkpoint mark or start, and earlier preemptions of its job."""
    if job is None:
        return lease.granted_at_ms, lease.granted_at_ms, 0
    spent = sum(run.outcome is not None and run.outcome.ending is Ending.PREEMPTED for run in job.attempts)
    attempt = job.attempt
    if attempt is None or attempt.lease_id != lease.id:
        return lease.granted_at_ms, lease.granted_at_ms, spent
    began = max(lease.granted_at_ms, attempt.started_at_ms)
    return began, max(began, attempt.marked_at_ms), spent
