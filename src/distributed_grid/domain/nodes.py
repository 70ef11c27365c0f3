"""Nodes: capacity, caps and thresholds, measured usage, observations, offers, and the pressure score."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from distributed_grid.domain.resources import MAX_AMOUNT, NOTHING, Capacity
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import NodeState
from distributed_grid.domain.statistics import Idleness, RecentUsage, UsageVolatility

Milli = Annotated[int, Meta(ge=0, le=1000)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]
MAX_GPUS = 1024
START_MS = 60_000
"""How long a node may take to start an attempt, unless its config says otherwise."""
RAY_HOST = "ray"
"""The host of a node that an attached Ray cluster brought, and that only Ray can reach."""
PULL_HOST = "pull"
"""The host of a pull worker: a node without an agent, which asks for its tasks."""


class Caps(Struct, frozen=True):
    """The most a node lends; None is "all it has"."""

    can_share: bool = True
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    gpu_count: int | None = None
    custom: tuple[tuple[str, int], ...] | None = None


class OfferThresholds(Struct, frozen=True, kw_only=True):
    """Idleness that a node needs before it lends; ratios in thousandths.

    It lends again after `dwell_ms` at the marks or below, and stops after half of that above the marks and the margin.
    While the last minute is above a mark, nothing new is lent, nor for a dwell after it was above it often.
    """

    cpu_busy_max_milli: int
    cpu_min_milli: int
    memory_used_max_milli: int
    memory_min_bytes: int
    gpu_busy_max_milli: int
    gpu_memory_min_bytes: int
    margin_milli: int = 50
    dwell_ms: int = 1_200_000
    excess_milli: int = 0  # part of CPU and memory that stays free, whatever is lent


class Node(Row, frozen=True, kw_only=True):
    """A machine with an agent, or a pull worker (`host` is `pull`)."""

    kind: ClassVar[str] = "node"

    name: str
    state: NodeState = NodeState.JOINING
    capacity: Capacity = NOTHING
    caps: Caps = Caps()
    thresholds: OfferThresholds | None = None
    rank: int = 1000
    labels: tuple[tuple[str, str], ...] = ()
    tags: tuple[str, ...] = ()
    role: str = ""
    host: str = "local"
    hold_ms: int = 0  # its work outlives contact with the control plane by this; 0: without end
    offer_ms: int = 300_000
    refresh_ms: int = 60_000
    forgotten: bool = False
    wanted: bool = False  # its agent has to run and to be connected
    joined: bool = False  # it came by itself, with a token; no config names it
    speed_milli: int = 1000  # usual: 1000
    cost_milli: int = 0  # of an hour
    engine: str = ""  # scheduler that reserves leases here besides the grid (`ray`)
    engine_node: str = ""  # the engine's own name of this node
    engine_lost_ms: int = 0  # since then the engine does not list it; `engine_node` is empty
    cooling: bool = False  # it gives everything back, and lends nothing until it is resumed
    epoch: int = 0  # its own, where it has seen a later one than the grid's (`leases.py`)
    simulated: bool = False
    """It stands for a machine of its own on the control plane's machine: its capacity is declared, its usage is that of
    its own work besides the declared background of its owner."""
    reclaim: str = ""  # reason why a draining node takes its leases back; empty: they come to their ends
    incarnation: str = ""  # registration of a pull worker
    start_ms: int = START_MS  # time that it may take to start an attempt

    @property
    def key(self) -> str:
        return self.name

    @property
    def is_over(self) -> bool:
        return self.state is NodeState.LEFT

    @property
    def is_pull(self) -> bool:
        """Whether it has no agent: it gets no orders, and asks for its tasks."""
        return self.host == PULL_HOST

    def is_stopped(self, *, lends: bool) -> bool:
        """Whether somebody stopped its agent or nobody ever started it, so that it stays as it is until
        `grid cluster start`; `lends`: something of it is still lent."""
        started_elsewhere = self.joined or self.engine_node or self.host in (PULL_HOST, RAY_HOST)
        if started_elsewhere or self.cooling or self.forgotten:
            return False
        is_drained = self.state is NodeState.DRAINING and not lends
        return (
            is_drained if self.host == "local" else not self.wanted and (is_drained or self.state is NodeState.JOINING)
        )

    @property
    def lendable(self) -> Capacity:
        """The most this node can ever lend: its capacity within its caps."""
        caps, has = self.caps, self.capacity
        if not caps.can_share:
            return NOTHING
        custom = has.custom
        if caps.custom is not None:
            limit = dict(caps.custom)
            pairs = ((name, min(count, limit.get(name, count))) for name, count in custom)
            custom = tuple((name, count) for name, count in pairs if count)
        return Capacity(
            cpu_milli=has.cpu_milli if caps.cpu_milli is None else min(has.cpu_milli, caps.cpu_milli),
            memory_bytes=has.memory_bytes if caps.memory_bytes is None else min(has.memory_bytes, caps.memory_bytes),
            gpus=has.gpus if caps.gpu_count is None else has.gpus[: caps.gpu_count],
            custom=custom,
        )


class GpuUsage(Struct, frozen=True):
    """Usage of one device: outside the grid, and in all."""

    index: Annotated[int, Meta(ge=0, lt=2**16)]
    busy_milli: Milli = 0
    memory_bytes: Bytes = 0
    all_busy_milli: Milli = 0
    all_memory_bytes: Bytes = 0

    @property
    def in_use_milli(self) -> int:
        """How busy the device is, whoever uses it."""
        return max(self.busy_milli, self.all_busy_milli)

    @property
    def in_use_bytes(self) -> int:
        """How much of its memory is taken, whoever took it."""
        return max(self.memory_bytes, self.all_memory_bytes)


class Usage(Struct, frozen=True, kw_only=True):
    """Measured usage of a node: in all, and outside the grid."""

    cpu_busy_milli: Milli = 0
    cpu_outside_milli: Milli = 0
    memory_bytes: Bytes = 0
    memory_outside_bytes: Bytes = 0
    gpus: Annotated[tuple[GpuUsage, ...], Meta(max_length=MAX_GPUS)] = ()
    memory_room_bytes: Bytes | None = None
    """Memory of the machine without the usage of others, shared by its simulated nodes; None: not measured."""
    disk_free_bytes: Bytes = 0  # writable on the file system of its jobs' directory; 0: not measured
    disk_bytes: Bytes = 0  # size of that file system
    cpu_measured: bool = True  # False: the use is unknown, which is not idleness
    gpus_measured: bool = True


class MissingAttempt(Struct, frozen=True):
    """An attempt that the agent of its node has no trace of, which does not prove that it is over."""

    lease_id: str
    until_ms: int  # it may run until then; 0: for as long as a process of it is seen on this machine


class NodeObservation(Row, frozen=True, kw_only=True):
    """The last heartbeat of a node, and its consequences. Never stored: after a restart every node counts as silent."""

    kind: ClassVar[str] = "observation"
    is_volatile: ClassVar[bool] = True

    node: str
    at_ms: int
    usage: Usage | None = None
    beat: int = 0  # number of the heartbeat
    held_until_ms: int = 0  # no attempt can run there after this, in whatever state the node is
    generation: int = 0  # counts the times that its agent has withdrawn the offer
    yields: bool = False  # its agent withdraws the offer now, because the owner is using the node
    boot: str = ""  # boot id of its machine
    machine: str = ""  # machine and directory of its agent
    missing: tuple[MissingAttempt, ...] = ()
    idleness: Idleness | None = None  # by the thresholds, from all measurements so far
    recent: RecentUsage | None = None
    volatility: UsageVolatility | None = None
    overused_since_ms: int = 0  # the owner needs resources that an engine holds for others; 0: no
    rejected: str = ""  # reason why its agent was last turned away
    rejected_at_ms: int = 0
    records_spent_until_ms: int = 0  # budget of its audit records (`reactor/dispatch.py`)
    records_omitted: int = 0
    reclaims: int = 0  # leases that it took back in a row (`scheduling/offers/pause.py`)
    reclaimed_at_ms: int = 0
    failed_starts: int = 0  # attempts that it did not start, in a row
    start_failed_at_ms: int = 0
    disk_full: bool = False  # the disk of its jobs has no room for new ones
    asking_since_ms: int = 0  # of a pull worker; 0: it does not ask for a task
    handed_out: str = ""  # last task that it was given, as the answer to `handed_out_ask`
    handed_out_ask: str = ""
    report_wanted: bool = False  # it has to declare its resources anew
    clock_jump_ms: int = 0  # jump of its wall clock; 0: none is pending
    clock_waits_ms: int = 0  # deletions by age pause for this time more
    clock_confirmed: bool = False  # a user says that its clock is right
    clock_recorded_ms: int = 0  # jump in the audit trail
    lost: bool = False
    """Its hold is over by decision: no heartbeat renews it before its agent has greeted anew with its attempts."""

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_rejected(self) -> bool:
        """Whether the last that was heard of its agent is that it was turned away."""
        return bool(self.rejected) and self.rejected_at_ms >= self.at_ms


class Offer(Row, frozen=True, kw_only=True):
    """All resources that a node lends, current leases included, and the reasons why it withholds the rest."""

    kind: ClassVar[str] = "offer"
    is_volatile: ClassVar[bool] = True

    node: str
    generation: int
    lends: Capacity
    made_at_ms: int
    expires_at_ms: int
    withheld: tuple[str, ...] = ()
    withdrawn: bool = False
    paused: tuple[str, ...] = ()  # resources (`cpu`, `memory`, `gpu0`, …) that are not lent anew for now
    for_owner: bool = False  # withheld because of its owner's use
    keeps_cpu: bool = False  # its owner leaves no CPU: no command starts there, with or without cores

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return self.withdrawn


def first_node(nodes: Iterable[Node]) -> str:
    """The node that stands for several of one machine: the head, or else the first by name; empty without any."""
    return min(((node.role != "head", node.name) for node in nodes), default=(True, ""))[1]


CPU_WEIGHT, MEMORY_WEIGHT, GPU_WEIGHT = 3, 3, 4


def pressure(capacity: Capacity, usage: Usage) -> float:
    """How hard a node works, 0 idle to 1 full: CPU 30 %, memory 30 %, GPU 40 %, renormalised without GPUs."""
    total = CPU_WEIGHT * cpu_part(usage) + MEMORY_WEIGHT * memory_part(capacity, usage)
    weight = CPU_WEIGHT + MEMORY_WEIGHT
    gpu = gpu_part(usage)
    if gpu is not None:
        total += GPU_WEIGHT * gpu
        weight += GPU_WEIGHT
    return round(total / weight, 3)


def cpu_part(usage: Usage) -> float:
    """How much of its cores a node uses, 0 to 1."""
    return _part(usage.cpu_busy_milli, 1000)


def memory_part(capacity: Capacity, usage: Usage) -> float:
    """How much of its memory a node uses, 0 to 1; a node that has none to speak of is full as soon as it uses any."""
    return _part(usage.memory_bytes, max(capacity.memory_bytes, 1))


def gpu_part(usage: Usage) -> float | None:
    """How busy its GPUs are on average, 0 to 1; None where none was measured."""
    if not usage.gpus:
        return None
    return _part(sum(gpu.in_use_milli for gpu in usage.gpus), 1000 * len(usage.gpus))


def _part(some: int, whole: int) -> float:
    return min(max(some / whole, 0.0), 1.0)
