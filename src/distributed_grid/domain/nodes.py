"""Nodes: capacity, caps and thresholds, measured usage, observations, offers, and the pressure score."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from distributed_grid.domain.resources import MAX_AMOUNT, NOTHING, Capacity
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


class OfferThresholds(Struct, frozen=True):
    """Idleness that a node needs before it lends; ratios in thousandths.

    It lends again after `dwell_ms` at the marks or below, and stops after half of that above the marks and the margin.
    While the last minute is above a mark, nothing new is lent, nor for a dwell after it was above it often.
    Of CPU and memory it keeps `excess_milli` free whatever it lends.
    """

    cpu_busy_max_milli: int
    cpu_min_milli: int
    memory_used_max_milli: int
    memory_min_bytes: int
    gpu_busy_max_milli: int
    gpu_memory_min_bytes: int
    margin_milli: int = 50
    dwell_ms: int = 1_200_000
    excess_milli: int = 0


class Node(Struct, frozen=True):
    """A machine with an agent, or a pull worker (`host` is `pull`), of which `incarnation` names the registration.

    `hold_ms` is how long its work goes on without a word from the control plane (0: without end), `start_ms` how long
    it may take to start an attempt. `wanted`: its
    agent is to run and to be connected. `joined`: it came by itself, with a token; no config names it. `speed_milli`
    is how fast it works, 1000 being usual; `cost_milli` what an hour of it costs, in thousandths. `engine` names what
    reserves leases here besides the grid (`ray`), `engine_node` is the engine's own name of this node, empty since
    `engine_lost_ms` where the engine does not see it any more. `cooling`: it has to give everything back, and lends
    nothing until somebody ends that. `reclaim` says why a draining one takes back what it lent; one without lets its
    leases come to their ends. `epoch` is its own where it has seen a later one than the grid's (`leases.py`).
    `simulated`: it stands for a machine of its own on the control plane's machine. It has what is declared for it, and
    its usage is what its own work uses of that, besides the declared background of its owner.
    """

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
    hold_ms: int = 0
    offer_ms: int = 300_000
    refresh_ms: int = 60_000
    forgotten: bool = False
    wanted: bool = False
    joined: bool = False
    speed_milli: int = 1000
    cost_milli: int = 0
    engine: str = ""
    engine_node: str = ""
    engine_lost_ms: int = 0
    cooling: bool = False
    epoch: int = 0
    simulated: bool = False
    reclaim: str = ""
    incarnation: str = ""
    start_ms: int = START_MS

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


class Usage(Struct, frozen=True):
    """Measured usage of a node: in all, and outside the grid.

    `memory_room_bytes` is what its machine really has for the grid: all memory but what others use of it (None: not
    measured). Simulated nodes share it. `disk_free_bytes` is what can still be written to the file system of its jobs'
    directory, which has `disk_bytes` in all (0: not measured). Without `cpu_measured` no use of CPU is known yet, and
    without `gpus_measured` none of GPUs: that is not idleness.
    """

    cpu_busy_milli: Milli = 0
    cpu_outside_milli: Milli = 0
    memory_bytes: Bytes = 0
    memory_outside_bytes: Bytes = 0
    gpus: Annotated[tuple[GpuUsage, ...], Meta(max_length=MAX_GPUS)] = ()
    memory_room_bytes: Bytes | None = None
    disk_free_bytes: Bytes = 0
    disk_bytes: Bytes = 0
    cpu_measured: bool = True
    gpus_measured: bool = True


class MissingAttempt(Struct, frozen=True):
    """An attempt (by its lease id) that the agent of its node has no trace of, which does not prove that it is over:
    until then it may run on. 0 is for as long as something of it is seen on this machine."""

    lease_id: str
    until_ms: int


class NodeObservation(Struct, frozen=True):
    """The last heartbeat of a node, and what follows from it. Never stored: after a restart no node was heard.

    `beat` is the heartbeat's number. Until `held_until_ms` what was lent there may still run; after it nothing can,
    whatever became of the node. `generation` counts how often its agent has withdrawn what it offered, and `yields`
    says that it does so now, because the owner is using it. `boot` names the time since its machine was started,
    `machine` the machine and directory of its agent. `missing` is what may still run there unseen. `idleness` is
    what thresholds make of all that was measured so far, `recent` its owner's use lately, `volatility` how
    that has moved,
    `overused_since_ms` since when the owner wants back what an engine holds there for others (0: no). `rejected` is
    why its agent was last turned away, at `rejected_at_ms`. Until `records_spent_until_ms` the records of what its
    agent reports are paid for, and `records_omitted` were not written (`reactor/dispatch.py`). It has taken back
    what was placed on it `reclaims` times in a row, last at `reclaimed_at_ms` (`scheduling/offers/pause.py`), and has
    not started what was placed on it `failed_starts` times in a row, last at `start_failed_at_ms`. With `disk_full`
    nothing new fits on the disk of its jobs.
    A pull worker has been asking for a task since `asking_since_ms` (0: it is not), and the last task it was given,
    `handed_out`, was the answer to `handed_out_ask`. With `report_wanted` the node is to
    say anew what it has. Its wall clock has jumped by `clock_jump_ms` (0: no jump is pending), and nothing is deleted
    by age there for `clock_waits_ms` more; `clock_confirmed`: somebody says that it is right. The audit trail has
    `clock_recorded_ms`. With `lost` it was decided that the hold is over: no heartbeat renews it before the agent has
    greeted anew and listed its attempts.
    """

    kind: ClassVar[str] = "observation"

    node: str
    at_ms: int
    usage: Usage | None = None
    beat: int = 0
    held_until_ms: int = 0
    generation: int = 0
    yields: bool = False
    boot: str = ""
    machine: str = ""
    missing: tuple[MissingAttempt, ...] = ()
    idleness: Idleness | None = None
    recent: RecentUsage | None = None
    volatility: UsageVolatility | None = None
    overused_since_ms: int = 0
    rejected: str = ""
    rejected_at_ms: int = 0
    records_spent_until_ms: int = 0
    records_omitted: int = 0
    reclaims: int = 0
    reclaimed_at_ms: int = 0
    failed_starts: int = 0
    start_failed_at_ms: int = 0
    disk_full: bool = False
    asking_since_ms: int = 0
    handed_out: str = ""
    handed_out_ask: str = ""
    report_wanted: bool = False
    clock_jump_ms: int = 0
    clock_waits_ms: int = 0
    clock_confirmed: bool = False
    clock_recorded_ms: int = 0
    lost: bool = False

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return False

    @property
    def is_rejected(self) -> bool:
        """Whether the last that was heard of its agent is that it was turned away."""
        return bool(self.rejected) and self.rejected_at_ms >= self.at_ms


class Offer(Struct, frozen=True):
    """What a node lends in all (what is lent already included), and why it withholds the rest. Of what is `paused`
    (`cpu`, `memory`, `gpu0`, …) nothing new is lent for now. `keeps_cpu`: its owner leaves no CPU, so that a command
    is not started there, with or without cores."""

    kind: ClassVar[str] = "offer"

    node: str
    generation: int
    lends: Capacity
    made_at_ms: int
    expires_at_ms: int
    withheld: tuple[str, ...] = ()
    withdrawn: bool = False
    paused: tuple[str, ...] = ()
    keeps_cpu: bool = False

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
