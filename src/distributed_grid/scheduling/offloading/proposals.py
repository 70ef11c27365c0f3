"""Proposals: for the work of a node by which way, where to and how surely it could run elsewhere, or why it cannot.

A target is on another machine, alive, above none of its own marks, may run the work, and has room and a surplus for it.
A target that the user names only has to be able to run it.

Recommended are the pieces of work that bring the node from above a mark down to its low one: those that lose least come
first, each on a target that has a surplus beside the others. A piece that hardly counts, a server, and a process at a
terminal are never recommended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.moves import MOVE_PREFIX, MoveConsent, Way, consent_key
from distributed_grid.domain.processes import ProcessInfo, ProcessType
from distributed_grid.domain.rebalancing import WATCHED_RESOURCES, claimed_amount
from distributed_grid.domain.resources import MAX_AMOUNT, WHOLE_GPU, Amounts, ResourceType
from distributed_grid.domain.states import NodeState
from distributed_grid.masking.command_line import shown_command
from distributed_grid.scheduling.offloading.processes import (
    Obstacle,
    ObstacleKind,
    classify,
    classify_command,
    command_shape,
    one_line,
    process_obstacles,
)
from distributed_grid.scheduling.placement.explanation import confidence
from distributed_grid.scheduling.placement.placement import find_placement, unmet_constraint
from distributed_grid.scheduling.pressure.loans import (
    MIN_WORTH_MILLI,
    asked_amount,
    describe,
    pressure_reason,
    surplus,
    total_of,
    why_no_surplus,
)
from distributed_grid.scheduling.pressure.relief import JobWay, job_way, jobs_of_node
from distributed_grid.scheduling.pressure.scan import PressureScan, machine_of, percent
from distributed_grid.scheduling.queue.reasons import stopped_reason

MAX_TARGETS = 32
"""Nodes that are compared, least loaded first."""
MAX_REASONS = 4


class MoveTarget(Struct, frozen=True):
    """Where a piece of work can go, and how sure that is right (thousandths); or (without a node) why nowhere.

    `missing` are the files that keep it from nodes that could take it otherwise.
    """

    node: str = ""
    confidence: int = 0
    reason: str = ""
    missing: tuple[str, ...] = ()


class MoveTargets:
    """Finds targets for the work of one node; resources that were assigned on one of them are not assigned twice."""

    def __init__(
        self, scan: PressureScan, node: str, only: str = "", absent: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self._scan = scan
        self._node = node
        self._only = only
        self._absent = absent or {}
        self._assigned: Counter[tuple[str, str]] = Counter()
        self._surplus: dict[tuple[str, str], int] = {}
        nodes = scan.ledger.nodes
        others = (name for name in scan.other_machines(node) if scan.has_headroom(name))
        by_load = sorted((scan.reading(name).score or 0, name) for name in others) if not self._only else []
        self._names = [name for _, name in by_load[:MAX_TARGETS]]
        if self._only in nodes and self._only != node:
            self._names = [self._only]

    def find(self, request: Request, needs: Sequence[tuple[str, int]] = (), *, assign: bool = False) -> MoveTarget:
        """The least loaded node that can take this; with `assign` it can spare that much less from now on."""
        missing: tuple[str, ...] = ()
        refusals: list[str] = []
        for name in self._names:
            refusal = self._refusal(request, name)
            if refusal:
                refusals.append(refusal)
                continue
            lacks = tuple(path for path, _ in needs if path in self._absent.get(name, ()))
            if lacks:
                missing = missing or lacks
                refusals.append(f"{name}: has no {lacks[0]}")
                continue
            place = find_placement(self._scan.ledger, replace(request, require=(name,), prefer=()))
            if place is None:
                refusals.append(f"{name}: no room for it now")
                continue
            if assign:
                self._assigned.update({(name, kind): asked_amount(request.ask, kind) for kind in WATCHED_RESOURCES})
            return MoveTarget(name, confidence(self._scan.ledger, request, place, self._scan.now).whole)
        return MoveTarget(reason=self._why_nowhere(request, refusals), missing=missing)

    def _refusal(self, request: Request, name: str) -> str:
        ledger = self._scan.ledger
        node = ledger.nodes[name]
        if node.state is not NodeState.ALIVE:
            return f"{name}: {stopped_reason(ledger, node) or f'is {node.state}'}"
        if machine_of(node) == machine_of(ledger.nodes[self._node]):
            return f"{name}: is on the same machine"
        unmet = unmet_constraint(ledger, request, name)
        if unmet is not None:
            return f"{name}: {unmet}"
        if self._only:
            return ""
        for kind in WATCHED_RESOURCES:
            asked = asked_amount(request.ask, kind)
            if (name, kind) not in self._surplus:
                self._surplus[name, kind] = surplus(self._scan, name, kind)
            left = max(self._surplus[name, kind] - self._assigned[name, kind], 0)
            if asked > left:
                return f"{name}: {describe(kind, left)} to spare, {describe(kind, asked)} needed"
        return ""

    def _why_nowhere(self, request: Request, refusals: list[str]) -> str:
        if self._only and not refusals:
            return f"there is no other node {self._only}"
        if not refusals:
            kind = next((kind for kind in WATCHED_RESOURCES if asked_amount(request.ask, kind)), WATCHED_RESOURCES[0])
            others = self._scan.other_machines(self._node)
            refusals = [why_no_surplus(self._scan, name, kind) for name, _ in zip(others, range(MAX_TARGETS))]  # noqa: B905
        if not refusals:
            return "there is no other machine"
        more = f"; and {len(refusals) - MAX_REASONS} more" if len(refusals) > MAX_REASONS else ""
        return "; ".join(refusals[:MAX_REASONS]) + more


def amounts_text(ask: Amounts) -> str:
    """Requested amounts as text."""
    return ", ".join(describe(kind, asked_amount(ask, kind)) for kind in WATCHED_RESOURCES if asked_amount(ask, kind))


MEMORY_MARGIN_MILLI = 1500
"""A process gets so much of the memory that was measured: it may be about to grow."""
MEMORY_UNIT, MIN_MEMORY_BYTES = 64 << 20, 256 << 20
WAY_CONFIDENCE = {
    Way.QUEUE_ELSEWHERE: 1000,
    Way.CHECKPOINT_RESTART: 950,
    Way.RESTART: 900,
    Way.PROCESS_RESTART: 750,
}
"""How sure each way is by itself, in thousandths: what the grid did not start may need what nobody saw."""
UNCHECKED_MILLI = 850
"""What is left of that as long as the target was not asked for the needed files."""
MAX_COMMAND_CHARS = 500
_WAYS = list(Way)
_NEVER_RECOMMENDED = (ProcessType.INTERACTIVE, ProcessType.DAEMON)


class Proposal(Struct, frozen=True, kw_only=True):
    """A piece of work on a node, and what could be done with it.

    Either `process` is set, or `job` (its uid) and `job_id`. `ask` is what it needs on the target. `way`, `target` and
    `confidence` (thousandths) are set also where only the user's consent is missing. `recommended`: with the others
    that are, it brings the node below its low mark, and it costs least. `lost_ms` is the run time that a move loses.
    """

    node: str
    user: str
    command: str
    process_type: ProcessType
    ask: Amounts
    age_ms: int = 0
    process: ProcessInfo | None = None
    job: str = ""
    job_id: str = ""
    way: Way | None = None
    target: str = ""
    confidence: int = 0
    recommended: bool = False
    reasons: tuple[str, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    needs_consent: bool = False
    shape: str = ""
    lost_ms: int = 0

    @property
    def movable(self) -> bool:
        """Whether it could be moved now; at most its user's consent is missing."""
        return self.way is not None and not self.obstacles


def propose(
    scan: PressureScan,
    node: str,
    processes: Sequence[ProcessInfo],
    consents: Mapping[str, MoveConsent],
    *,
    user: str = "",
    target: str = "",
    absent: Mapping[str, Collection[str]] | None = None,
) -> list[Proposal]:
    """All jobs and processes of a node, the recommended ones first, then those that could move, then the others.

    `consents` are those of the ledger, by their key; those of `user` count, or else of the user of each process. With a
    `target` no other node is considered, also where it has little to spare. `absent` are the needed files that nodes
    were found to lack; `files_to_check` says what to ask them, and a node that is a key of it was asked.
    """
    if node not in scan.ledger.nodes:
        return []
    targets = MoveTargets(scan, node, target, absent)
    found = [_propose_job(scan, node, job, lease, targets) for job, lease in jobs_of_node(scan.ledger, node)]
    for process in processes:
        shape = command_shape(process.argv, process.cwd)
        consent = consents.get(consent_key(user or process.user, shape, process.cwd))
        has_consent = consent is not None and not consent.withdrawn
        found.append(_propose_process(scan, node, process, shape, has_consent, targets, absent or {}))
    found = _recommend(scan, node, found, targets)
    return sorted(found, key=lambda one: (not one.recommended, not one.movable, -one.confidence, one.lost_ms))


def files_to_check(proposals: Sequence[Proposal]) -> dict[str, tuple[tuple[str, int], ...]]:
    """The files that processes need on their targets and that are not shipped, by target, as (path, bytes)."""
    found: dict[str, dict[tuple[str, int], None]] = {}
    for proposal in proposals:
        if proposal.process is not None and proposal.movable and proposal.process.needs:
            found.setdefault(proposal.target, {}).update(dict.fromkeys(proposal.process.needs))
    return {node: tuple(files) for node, files in found.items()}


def process_ask(process: ProcessInfo) -> Amounts:
    """Needs of a process elsewhere: the cores it uses, rounded up, its memory with a margin, and a GPU if it has one.

    What an agent says is believed within bounds only."""
    cores = max(-(-max(process.cpu_milli, 0) // 1000), 1)
    memory = max(process.pss_bytes, 0) * MEMORY_MARGIN_MILLI // 1000
    memory = max(-(-memory // MEMORY_UNIT) * MEMORY_UNIT, MIN_MEMORY_BYTES)
    gpu_bytes = max(process.gpu_memory_bytes, 0)
    return Amounts(
        cpu_milli=min(cores * 1000, MAX_AMOUNT),
        memory_bytes=min(memory, MAX_AMOUNT),
        gpu_milli=WHOLE_GPU if gpu_bytes else 0,
        gpu_memory_bytes=min(gpu_bytes, MAX_AMOUNT),
    )


def _propose_job(scan: PressureScan, node: str, job: Job, lease: Lease, targets: MoveTargets) -> Proposal:
    known = classify_command(job.command.argv)
    started_ms = job.attempt.started_at_ms if job.attempt is not None else 0
    how: JobWay = job_way(scan.ledger, job, lease, scan.now)
    proposal = Proposal(
        node=node,
        user=job.request.user,
        command=one_line(shown_command(job.command.argv, MAX_COMMAND_CHARS)),
        process_type=known.type,
        ask=job.sized_request.ask,
        age_ms=max(scan.now - (started_ms or job.submitted_at_ms), 0),
        job=job.uid,
        job_id=job.id,
        reasons=(*_pressure(scan, node), *known.reasons),
    )
    if how.way is None:
        obstacles = (how.obstacle,) if how.obstacle is not None else ()
        return replace(proposal, obstacles=obstacles)
    proposal = replace(proposal, way=how.way, lost_ms=how.lost_ms, reasons=(*proposal.reasons, how.reason))
    return _with_target(scan, proposal, job.sized_request, targets)


def _propose_process(
    scan: PressureScan,
    node: str,
    process: ProcessInfo,
    shape: str,
    has_consent: bool,
    targets: MoveTargets,
    absent: Mapping[str, Collection[str]],
) -> Proposal:
    known, ask = classify(process), process_ask(process)
    proposal = Proposal(
        node=node,
        user=process.user,
        command=one_line(shown_command(process.argv, MAX_COMMAND_CHARS) or process.name),
        process_type=known.type,
        ask=ask,
        age_ms=max(process.age_ms, 0),
        process=process,
        reasons=(*_pressure(scan, node), *map(one_line, known.reasons)),
        shape=shape,
        lost_ms=max(process.cpu_ms, 0),
    )
    obstacles = process_obstacles(process)
    for move in (scan.ledger.moves.get(move_id) for move_id in scan.ledger.moves_at.get(node, ())):
        if move is not None and move.process and move.process.identity == process.identity:
            obstacles = (*obstacles, Obstacle(ObstacleKind.MOVING, f"it is being moved: {move.id}"))
            break
    if obstacles:
        return replace(proposal, obstacles=obstacles)
    where = one_line(process.cwd)
    lost = f"{process.cpu_ms / 1000:.0f} s of CPU are run again, with whatever they did outside of {where}"
    asks = () if has_consent else (f"it needs your consent for `{shape}` in {where}",)
    proposal = replace(
        proposal,
        way=Way.PROCESS_RESTART,
        needs_consent=not has_consent,
        reasons=(*proposal.reasons, lost, *asks),
    )
    request = Request(id=f"{MOVE_PREFIX}{process.pid}", user=process.user, ask=ask)
    proposal = _with_target(scan, proposal, request, targets, process.needs)
    if proposal.movable and process.needs and proposal.target not in absent:
        proposal = replace(proposal, confidence=proposal.confidence * UNCHECKED_MILLI // 1000)
    return proposal


def _with_target(
    scan: PressureScan,
    proposal: Proposal,
    request: Request,
    targets: MoveTargets,
    needs: Sequence[tuple[str, int]] = (),
) -> Proposal:
    assert proposal.way is not None
    found = targets.find(request, needs)
    if found.missing and not found.node:
        text = one_line(f"the files it needs are nowhere else: {', '.join(found.missing[:3])} ({found.reason})")
        return replace(proposal, obstacles=(Obstacle(ObstacleKind.MISSING_FILES, text),))
    if not found.node:
        text = f"no node can take it ({amounts_text(proposal.ask)}): {found.reason}"
        return replace(proposal, obstacles=(Obstacle(ObstacleKind.NO_TARGET, text),))
    score = scan.reading(found.node).score
    load = f"works at {percent(score)}" if score is not None else "is free"
    return replace(
        proposal,
        target=found.node,
        confidence=found.confidence * WAY_CONFIDENCE[proposal.way] // 1000,
        reasons=(*proposal.reasons, f"{found.node} {load} and has room for {amounts_text(proposal.ask)}"),
    )


def _recommend(scan: PressureScan, node: str, found: Sequence[Proposal], targets: MoveTargets) -> list[Proposal]:
    """Mark those that together bring the node down to its low marks: jobs first, then the least lost work."""
    total = {kind: total_of(scan.ledger.nodes[node].capacity, kind) for kind in WATCHED_RESOURCES}
    excess = dict.fromkeys(WATCHED_RESOURCES, 0)  # above the low mark, of a resource that is above a mark
    for kind in WATCHED_RESOURCES:
        level = scan.reading(node).level(kind)
        if level is not None and scan.is_above(node, kind):
            excess[kind] = total[kind] * max(level - scan.rules.watermarks(kind).low, 0) // 1000
    marked: dict[int, Proposal] = {}
    ranks = [_WAYS.index(proposal.way or _WAYS[-1]) for proposal in found]  # order of preference
    order = sorted((proposal.process is not None, proposal.lost_ms, ranks[at], at) for at, proposal in enumerate(found))
    for *_, at in order:
        one = found[at]
        relief = {kind: _relief(scan, one, kind) for kind in WATCHED_RESOURCES if excess[kind] > 0}
        counts = any(1000 * size >= MIN_WORTH_MILLI * total[kind] for kind, size in relief.items() if size)
        if not one.movable or not counts or one.process_type in _NEVER_RECOMMENDED:
            continue
        if one.process is None:
            room = targets.find(scan.ledger.jobs[one.job].sized_request, (), assign=True)
        else:
            request = Request(id=f"{MOVE_PREFIX}{one.process.pid}", user=one.user, ask=one.ask)
            room = targets.find(request, one.process.needs, assign=True)
        if not room.node:
            marked[at] = replace(one, reasons=(*one.reasons, f"beside what is recommended: {room.reason}"))
            continue
        for kind, size in relief.items():
            excess[kind] -= size
        moved = one if room.node == one.target else replace(one, target=room.node)
        marked[at] = replace(moved, recommended=True)
    return [marked.get(at, one) for at, one in enumerate(found)]


def _relief(scan: PressureScan, one: Proposal, kind: ResourceType) -> int:
    """How much of a resource is free on the node when this has left it."""
    if one.process is not None:
        if scan.ledger.nodes[one.node].simulated:  # its level is that of its jobs alone
            return 0
        sizes = {ResourceType.MEMORY: one.process.pss_bytes, ResourceType.CPU: one.process.cpu_milli}
        return max(sizes.get(kind, 0), 0)
    lease = scan.ledger.leases.get(scan.ledger.jobs[one.job].lease_id)
    return claimed_amount(lease, kind) if lease is not None and lease.node == one.node else 0


def _pressure(scan: PressureScan, node: str) -> tuple[str, ...]:
    return tuple(pressure_reason(scan, node, kind) for kind in WATCHED_RESOURCES if scan.is_above(node, kind))[:1]
