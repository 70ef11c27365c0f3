"""Builders: a node, a request, a job, a ledger in one line, in the units a person thinks in.

Rule 1: unnamed fields have harmless defaults. Rule 2: everything built here is valid; a test that wants nonsense says
so in its own words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptStarted,
    HeartbeatReceived,
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseReleased,
    NodeDeclared,
    TimePassed,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.jobs import Command, Ending, Job, Outcome
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Caps, GpuUsage, Node, OfferThresholds, Usage
from distributed_grid.domain.resources import Amounts, Capacity, GpuDevice, Priority, normalized_custom
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import NodeState
from distributed_grid.reactor.dispatch import StepResult, step, step_through

GB = 1024**3
NOW = 1_000_000_000
"""A moment for tests that do not care which."""


def _milli(amount: float) -> int:
    return round(amount * 1000)


def _bytes(gigabytes: float) -> int:
    return round(gigabytes * GB)


def a_capacity(
    cores: float = 4,
    memory_gb: float = 16,
    gpus: int | Sequence[GpuDevice] = 0,
    *,
    gpu_memory_gb: float = 24,
    exclusive: bool = False,
    custom: Mapping[str, int] | None = None,
) -> Capacity:
    """So many cores, gigabytes and GPUs; `gpus` is a count of equal devices, or the devices themselves."""
    if isinstance(gpus, int):
        size = _bytes(gpu_memory_gb)
        devices = tuple(GpuDevice(index, size, exclusive=exclusive) for index in range(gpus))
    else:
        devices = tuple(gpus)
    return Capacity(_milli(cores), _bytes(memory_gb), devices, normalized_custom(custom or {}))


def a_node(
    name: str = "gpu1",
    *,
    cores: float = 4,
    memory_gb: float = 16,
    gpus: int | Sequence[GpuDevice] = 0,
    gpu_memory_gb: float = 24,
    exclusive: bool = False,
    custom: Mapping[str, int] | None = None,
    caps: Caps | None = None,
    thresholds: OfferThresholds | None = None,
    rank: int = 1000,
    state: NodeState = NodeState.JOINING,
    hold_s: float = 0,
) -> Node:
    """A machine with an agent, as the config declares it; with a hold it is another than the control plane's."""
    capacity = a_capacity(cores, memory_gb, gpus, gpu_memory_gb=gpu_memory_gb, exclusive=exclusive, custom=custom)
    host = "far" if hold_s else "local"
    return Node(
        name=name,
        state=state,
        capacity=capacity,
        caps=caps or Caps(),
        thresholds=thresholds,
        rank=rank,
        host=host,
        hold_ms=_milli(hold_s),
    )


def caps(
    *,
    cores: float | None = None,
    memory_gb: float | None = None,
    gpus: int | None = None,
    custom: Mapping[str, int] | None = None,
    can_share: bool = True,
) -> Caps:
    """The most a node lends; unnamed resources are not limited."""
    return Caps(
        can_share,
        None if cores is None else _milli(cores),
        None if memory_gb is None else _bytes(memory_gb),
        gpus,
        None if custom is None else tuple(sorted(custom.items())),
    )


def thresholds(
    *,
    cpu_busy_max: float = 0.7,
    cores_min: float = 1,
    memory_used_max: float = 0.7,
    memory_gb_min: float = 2,
    gpu_busy_max: float = 0.5,
    gpu_memory_gb_min: float = 2,
    margin: float = 0.05,
    dwell_s: float = 1200,
) -> OfferThresholds:
    """How idle a node must be before it lends, and for how long; ratios between 0 and 1."""
    return OfferThresholds(
        cpu_busy_max_milli=_milli(cpu_busy_max),
        cpu_min_milli=_milli(cores_min),
        memory_used_max_milli=_milli(memory_used_max),
        memory_min_bytes=_bytes(memory_gb_min),
        gpu_busy_max_milli=_milli(gpu_busy_max),
        gpu_memory_min_bytes=_bytes(gpu_memory_gb_min),
        margin_milli=_milli(margin),
        dwell_ms=_milli(dwell_s),
    )


def a_usage(
    *,
    cpu_outside: float = 0,
    memory_outside_gb: float = 0,
    gpus: Mapping[int, tuple[float, float]] | None = None,
) -> Usage:
    """Use by the owner; `gpus` maps an index to (busy part, gigabytes in use)."""
    seen = tuple(GpuUsage(index, _milli(busy), _bytes(used)) for index, (busy, used) in (gpus or {}).items())
    outside = _bytes(memory_outside_gb)
    return Usage(
        cpu_busy_milli=_milli(cpu_outside),
        cpu_outside_milli=_milli(cpu_outside),
        memory_bytes=outside,
        memory_outside_bytes=outside,
        gpus=seen,
    )


def an_ask(
    cores: float = 0,
    memory_gb: float = 0,
    gpus: float = 0,
    *,
    gpu_memory_gb: float = 0,
    custom: Mapping[str, int] | None = None,
) -> Amounts:
    """How much of everything; one core where nothing is named."""
    if not (cores or memory_gb or gpus or custom):
        cores = 1
    return Amounts(
        _milli(cores), _bytes(memory_gb), _milli(gpus), _bytes(gpu_memory_gb), normalized_custom(custom or {})
    )


def a_request(
    request_id: str = "r1",
    *,
    cores: float = 0,
    memory_gb: float = 0,
    gpus: float = 0,
    gpu_memory_gb: float = 0,
    custom: Mapping[str, int] | None = None,
    priority: str | Priority = Priority.MEDIUM,
    prefer: Sequence[str] = (),
    require: Sequence[str] = (),
    wait_s: float = 300,
    duration_s: float = 0,
    user: str = "ada",
    **wishes: Any,
) -> Request:
    """Somebody asks: for one core, unless it says otherwise. Other fields of a request by their own names."""
    return Request(
        id=request_id,
        user=user,
        ask=an_ask(cores, memory_gb, gpus, gpu_memory_gb=gpu_memory_gb, custom=custom),
        priority=Priority.parse(priority),
        prefer=tuple(prefer),
        require=tuple(require),
        wait_ms=_milli(wait_s),
        duration_ms=_milli(duration_s),
        **wishes,
    )


def a_command(*argv: str) -> Command:
    return Command(argv or ("true",))


def a_submission(
    request: Request | None = None,
    *,
    name: str = "",
    retries: int = 0,
    command: Command | None = None,
    restartable: bool = False,
) -> JobSubmitted:
    """A command for the grid to run; its name is `job-<request id>` unless given."""
    request = request or a_request()
    return JobSubmitted(
        id=name or f"job-{request.id}",
        command=command or a_command(),
        request=request,
        retries=retries,
        restartable=restartable,
    )


def an_exit(code: int = 0) -> Outcome:
    return Outcome(Ending.EXITED, exit_code=code)


def a_ledger(*nodes: Node, now: int = NOW, rows: Sequence[Row] = ()) -> Ledger:
    """A ledger whose nodes have all just been heard and offer everything they may lend."""
    ledger = Ledger(rows)
    for node in nodes:
        step(ledger, NodeDeclared(node), now)
        step(ledger, HeartbeatReceived(name=node.name, usage=Usage()), now)
    return ledger


class Scenario:
    """A ledger and its clock: what happens, one sentence a line. Time moves only by `advance`."""

    def __init__(self, *nodes: Node, now: int = NOW, ledger: Ledger | None = None) -> None:
        self.now = now
        self.ledger = a_ledger(*nodes, now=now) if ledger is None else ledger

    def handle(self, event: Cause) -> StepResult:
        """One event and all that follows from it."""
        return step_through(self.ledger, event, self.now)

    def advance(self, seconds: float, *, heard: bool = True) -> StepResult:
        """Time passes; the nodes that were alive are heard at its end, unless nobody is."""
        self.now += _milli(seconds)
        if heard:
            for node in list(self.ledger.nodes.values()):
                if node.state is NodeState.ALIVE:
                    self.heartbeat(node.name)
        return self.handle(TimePassed())

    def heartbeat(self, name: str, usage: Usage | None = None) -> StepResult:
        return self.handle(HeartbeatReceived(name=name, usage=usage or Usage()))

    def ask(self, request: Request) -> Lease | None:
        """The lease as it stands after asking; None where it is over already."""
        self.handle(LeaseAsked(request))
        return self.ledger.leases.get(request.id)

    def release(self, lease_id: str) -> StepResult:
        return self.handle(LeaseReleased(lease_id, "ada"))

    def submit(self, request: Request, *, retries: int = 0, starts: bool = False, restartable: bool = False) -> Job:
        """A job for this request; with `starts` its agent has started it."""
        self.handle(a_submission(request, retries=retries, restartable=restartable))
        return self.start(request.id) if starts else self.job(request.id)

    def start(self, uid: str, *, pid: int = 4242) -> Job:
        """The agent says that the current attempt runs."""
        attempt = self.job(uid).attempt
        assert attempt is not None, f"{uid} has no attempt to start"
        self.handle(AttemptStarted(uid=uid, number=attempt.number, fence=attempt.fence, pid=pid))
        return self.job(uid)

    def end(self, uid: str, outcome: Outcome | None = None) -> StepResult:
        """The agent proves the current attempt over."""
        attempt = self.job(uid).attempt
        assert attempt is not None, f"{uid} has no attempt to end"
        return self.handle(
            AttemptEnded(uid=uid, number=attempt.number, fence=attempt.fence, outcome=outcome or an_exit())
        )

    def cancel(self, uid: str) -> StepResult:
        return self.handle(JobCancelled(uid, "ada"))

    def job(self, uid: str) -> Job:
        return self.ledger.jobs[uid]

    def lease_of(self, uid: str) -> Lease:
        """The lease that a job asks for or runs under."""
        return self.ledger.leases[self.job(uid).lease_id]
