"""Events: facts that reach the ledger from outside, or that follow from a decision, in the past tense.

Commands that a decider leaves for later are follow-ups (`followups.py`). A report of an agent carries in `nodes` the
nodes that this agent serves: it counts only for these. Empty means the grid itself.
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.deliveries import DeliveredFiles, FetchOrder
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.jobs import Command, JobEstimate, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.moves import Move, MoveConsent, OffloadRules
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.rebalancing import PressureReading, RebalanceRules
from distributed_grid.domain.resources import Claim
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import MoveState
from distributed_grid.domain.workers import ScalingRules, Worker, WorkerRules


class Event(Struct, frozen=True):
    """Base of all events, of which exactly one decider each is in `reactor/dispatch.py`."""


class TimePassed(Event, frozen=True):
    """The clock ticked: every second, and when a row is due."""


class PolicySet(Event, frozen=True):
    """The scheduling policy of the config was read."""

    policy: SchedulingPolicy


# ------------------------------------------------------------------ nodes


class ControlPlaneStarted(Event, frozen=True):
    """A control plane took over the ledger: the epoch grows, and every node counts as silent."""

    epoch: int


class NodeDeclared(Event, frozen=True):
    """The config names a node, or its agent declared its resources."""

    node: Node


class EpochReported(Event, frozen=True):
    """The agent of a node has seen this epoch of a control plane; it may be later than the grid's own."""

    node: str
    epoch: int


class AgentRejected(Event, frozen=True):
    """The agent of a node was turned away, because its statements cannot be true."""

    node: str
    why: str


class NodeForgotten(Event, frozen=True):
    name: str


class HeartbeatReceived(Event, frozen=True, kw_only=True):
    """A heartbeat with its measurements arrived."""

    name: str
    usage: Usage
    beat: int = 0
    generation: int = 0
    yields: bool = False  # the agent gives resources back to the owner on its own
    repeats: bool = False  # a sign of life that declares no resources anew
    clock_jump_ms: int = 0  # pending jump of the wall clock; 0: none
    clock_waits_ms: int = 0  # time for which the jump stays pending


class NodeHeard(Event, frozen=True):
    """A heartbeat of this node is in the ledger; its consequences are due."""

    name: str


class ClocksConfirmed(Event, frozen=True):
    """A user confirmed the wall clocks of all nodes: deletions by age resume."""

    by: str


class PullWorkerRegistered(Event, frozen=True):
    """A worker without an agent declared its resources; another incarnation is another process."""

    node: Node
    usage: Usage


class TaskAsked(Event, frozen=True):
    """A pull worker asks for its next task."""

    worker: str
    incarnation: str = ""
    running: tuple[str, ...] = ()  # ids of all tasks that it has
    ask_id: str = ""  # names the answer, so that it can be given back undelivered


class TaskAskWithdrawn(Event, frozen=True):
    """The connection of a pull worker's ask is closed: an answer to it was not delivered."""

    worker: str
    incarnation: str = ""
    ask_id: str = ""


class ReassessmentRequested(Event, frozen=True):
    """Every pull worker has to declare its resources anew."""


class AgentRequested(Event, frozen=True):
    """A user wants the agent of a node to run, or to be stopped."""

    name: str
    wanted: bool


class NodeDrained(Event, frozen=True):
    """A node has to give everything back to its owner; its jobs are requeued."""

    name: str
    detail: str = "the node is being drained"
    cooling: bool = False  # it lends nothing until `NodeResumed`, whatever is started meanwhile
    reclaims: bool = True  # False: its leases come to their ends


class NodeResumed(Event, frozen=True):
    """A cooling node may lend again."""

    name: str


class NodeStopped(Event, frozen=True):
    """The agent of a node was stopped on purpose; none of its attempts is left."""

    name: str


class AlertChanged(Event, frozen=True):
    """An alert about a node was raised or cleared: only the audit trail changes."""

    node: str
    resource: str
    raised: bool
    detail: str


# ------------------------------------------------------------------ engines


class EngineRegistered(Event, frozen=True, kw_only=True):
    """An engine has to carry leases, or the grid has started it anew with another `session`."""

    name: str
    mode: str
    address: str
    namespace: str = "grid"
    session: str = ""
    nodes: tuple[str, ...] = ()


class EngineRemoved(Event, frozen=True):
    name: str
    detail: str = ""


class EngineNode(Struct, frozen=True, kw_only=True):
    """A node as an engine sees it."""

    id: str
    name: str = ""
    address: str = ""
    hostname: str = ""
    head: bool = False
    has: EngineResources = EngineResources()  # total
    room: EngineResources = EngineResources()  # total without the shares of others


class EngineObserved(Event, frozen=True, kw_only=True):
    """An engine listed its nodes and the placement groups of the grid, as of `asked_at_ms`."""

    name: str
    session: str
    asked_at_ms: int
    nodes: tuple[EngineNode, ...]
    groups: tuple[tuple[str, str], ...] | None = None  # None: only the nodes were listed
    in_use: tuple[str, ...] = ()  # groups with a process in them, known or assumed


class GroupBound(Event, frozen=True):
    """The engine has made the placement group of a binding."""

    key: str
    term_ms: int = 0  # end of the lease that the engine has acknowledged; 0: none


class GroupTermSet(Event, frozen=True):
    key: str
    term_ms: int


class GroupRefused(Event, frozen=True):
    """The engine refused the placement group of a binding, and holds nothing for it."""

    key: str
    why: str


class GroupFreed(Event, frozen=True):
    """The engine holds nothing for a binding any more."""

    key: str


# ------------------------------------------------------------------ leases


class LeaseAsked(Event, frozen=True):
    """A user asks for resources to hold, without a command."""

    request: Request
    again: bool = False  # the id of an ended lease may be used once more


class LeaseRecovered(Event, frozen=True, kw_only=True):
    """A lease that this ledger lacks was found elsewhere; it is a claim until its node confirms it."""

    request: Request
    node: str
    claim: Claim
    fence: int
    granted_at_ms: int
    ends_at_ms: int


class LeasesRecovered(Event, frozen=True):
    """All leases that a new ledger can recover from elsewhere were read; this happens once."""

    claims: tuple[LeaseRecovered, ...] = ()


class RequestRefused(Event, frozen=True):
    """A request was refused before it reached the ledger: only the audit trail changes."""

    request_id: str
    user: str
    reason: str


class LeaseReleased(Event, frozen=True):
    """The holder released a lease; a second release is harmless."""

    lease_id: str
    by: str
    detail: str = ""


class LeaseReclaimed(Event, frozen=True):
    lease_id: str
    detail: str


class LeaseLost(Event, frozen=True):
    """A lease ended without a report: its node is gone, or its hold has run out."""

    lease_id: str
    detail: str


class LeaseExtended(Event, frozen=True):
    """The holder asks for more time."""

    lease_id: str
    by: str
    extra_ms: int
    request_id: str = ""  # the same one counts once


# ------------------------------------------------------------------ jobs and attempts


class JobSubmitted(Event, frozen=True, kw_only=True):
    """A user wants a command to run under a lease."""

    id: str
    command: Command
    request: Request
    retries: int = 0
    estimate: JobEstimate | None = None  # the grid's own; no part of the identity of a repeated submission
    restartable: bool = False
    fetch: FetchOrder | None = None


class JobCancelled(Event, frozen=True):
    """The user cancelled a job; a second cancellation is harmless."""

    uid: str
    by: str
    detail: str = ""


class JobDetached(Event, frozen=True):
    """The command that followed a job has left it running, for instance because its terminal closed."""

    uid: str
    by: str
    reason: str


class AttemptStarted(Event, frozen=True, kw_only=True):
    uid: str
    number: int
    fence: int
    pid: int
    cores: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    pid_start: int = 0


class AttemptPaused(Event, frozen=True, kw_only=True):
    """The agent paused or resumed an attempt for the node's owner."""

    uid: str
    number: int
    fence: int
    paused: bool
    detail: str = ""
    nodes: tuple[str, ...] = ()


class AttemptMarked(Event, frozen=True):
    """An attempt marked a checkpoint `age_ms` ago: its work until then would not be lost."""

    uid: str
    number: int
    fence: int
    age_ms: int
    nodes: tuple[str, ...] = ()


class AttemptOutgrown(Event, frozen=True):
    """An attempt holds more memory than its lease, whose size was learned; reported repeatedly while that lasts."""

    uid: str
    number: int
    fence: int
    memory_bytes: int
    nodes: tuple[str, ...] = ()


class AttemptEnded(Event, frozen=True, kw_only=True):
    """The agent has proven that the whole process tree of an attempt is gone."""

    uid: str
    number: int
    fence: int
    outcome: Outcome
    nodes: tuple[str, ...] = ()
    pid: int = 0  # with one the start is reported, too: the end came before a message of its own
    cores: tuple[int, ...] = ()
    mark_age_ms: int | None = None  # time from its last checkpoint mark to its end; None: no mark
    pid_start: int = 0
    result: str = ""  # of a task, as JSON
    has_checkpoint: bool = False  # its checkpoint directory is not empty


class AttemptsListed(Event, frozen=True, kw_only=True):
    """An agent connected (again) and listed its attempts, by lease id."""

    node: str
    attempts: tuple[str, ...]  # those with a record
    boot: str = ""
    machine: str = ""
    running: tuple[str, ...] = ()  # others with a process on this machine
    ordered: tuple[str, ...] = ()  # those that were ordered on this node since `ordered_since_ms`
    ordered_since_ms: int | None = None  # nothing is known of earlier orders; None: of any order


class AttemptsGone(Event, frozen=True):
    """No process is left of attempts that their agent had no trace of."""

    node: str
    attempts: tuple[str, ...]


class StartsExpired(Event, frozen=True):
    """A node has not started these attempts (by lease id) in time, and cannot start them any more."""

    node: str
    attempts: tuple[str, ...]


class CheckpointShipped(Event, frozen=True, kw_only=True):
    """The checkpoint directory of a job's last attempt was copied here, or cannot be had."""

    uid: str
    number: int
    manifest: str = ""  # empty: the attempt left none
    problem: str = ""  # reason why it cannot be had; the job starts with the checkpoint before
    files: int = 0
    bytes: int = 0
    left_out: tuple[str, ...] = ()  # files that no other machine can have


class FilesDelivered(Event, frozen=True):
    """The files of an ended job are in their user's directory, on the disk."""

    job: str
    delivered: DeliveredFiles


class FilesDelayed(Event, frozen=True):
    """The delivery of an ended job's files failed for now."""

    job: str
    problem: str


class FilesUndeliverable(Event, frozen=True):
    """The files of an ended job cannot be delivered any more, or there are none."""

    job: str
    problem: str


class FilesFetched(Event, frozen=True, kw_only=True):
    """A user has fetched files of a job by hand."""

    job: str
    job_id: str
    user: str
    node: str
    patterns: tuple[str, ...]
    delivered: DeliveredFiles


# ------------------------------------------------------------------ blocks of the memory pool


class BlockAsked(Event, frozen=True, kw_only=True):
    """A user wants bytes in the memory of other nodes."""

    id: str
    user: str
    size_bytes: int
    term_ms: int  # first term; with a `session` also the term of each renewal
    copies: int = 1
    name: str = ""
    meta: str = ""
    session: str = ""
    home: str = ""
    prefer: str = ""


class BlockReleased(Event, frozen=True):
    """A block was released; a second release is harmless."""

    block_id: str
    by: str
    detail: str = ""


class BlockNamed(Event, frozen=True):
    """A block was given a name; the block that had this name is released."""

    block_id: str
    by: str
    name: str
    meta: str = ""
    term_ms: int = 0  # new fixed term, independent of its program; 0: as before


class BlocksRenewed(Event, frozen=True):
    """The program of a session lives: its blocks get another term."""

    session: str
    by: str


class CopyUnwanted(Event, frozen=True):
    """A copy has to leave its node, which reclaims memory or is short of it."""

    block_id: str
    copy: str
    why: str
    spills: bool = True  # without room elsewhere it goes to disk; False: it stays
    avoid: tuple[str, ...] = ()  # nodes that must not take it


class CopyMade(Event, frozen=True):
    """A node has made a copy of a copy elsewhere, or failed to."""

    source: str
    generation: int
    problem: str = ""
    nodes: tuple[str, ...] = ()


class CopiesFreed(Event, frozen=True):
    """The memory of these copies is free."""

    copies: tuple[str, ...]
    nodes: tuple[str, ...] = ()


class CopyLost(Event, frozen=True):
    block_id: str
    copy: str
    why: str


class MemoryServed(Event, frozen=True):
    """The memory server of a node came up, or is unusable."""

    lender: MemoryServerRow
    on_disk: tuple[str, ...] = ()  # copies on its disk
    problem: str = ""  # reason why it is unusable; empty: it came up


class MemoryReclaimRequested(Event, frozen=True):
    """The owner of a node needs memory back that blocks hold."""

    node: str
    memory_bytes: int


# ------------------------------------------------------------------ workers and scaling


class WorkerRulesSet(Event, frozen=True):
    rules: WorkerRules


class WallTimePassed(Event, frozen=True):
    """The reconciler of workers read the wall clock, which says to which day (UTC) costs belong."""

    wall_ms: int


class WorkerRequested(Event, frozen=True):
    """A worker is wanted; the same row a second time is harmless."""

    worker: Worker
    wall_ms: int


class WorkerAsked(Event, frozen=True):
    """A call to create this worker is about to be made: from now on it may exist."""

    worker_id: str


class WorkerBooted(Event, frozen=True):
    """The provider has made this machine, or has queued the order."""

    worker_id: str
    instance: str
    warning: str = ""  # resources that fall short of the request
    ends_in_ms: int | None = None  # time until the provider ends it by itself; None: it does not
    waits: bool = False  # the order is in the provider's queue


class WorkerJoined(Event, frozen=True):
    worker_id: str


class WorkerCallFailed(Event, frozen=True):
    """A call about a worker failed; the identical call follows after a pause."""

    worker_id: str
    why: str
    was_lost: bool = True  # the answer was lost, so the call may have had its effect


class WorkerRefused(Event, frozen=True):
    """The provider refuses to make this worker."""

    worker_id: str
    why: str
    wall_ms: int
    scope: str = ""  # where the provider has no capacity now; empty: the refusal is final
    instead: Worker | None = None  # replacement, within the budget


class WorkerDrainRequested(Event, frozen=True):
    """A worker has to take no new work; refused while it has a lease, unless `force` gives its leases back."""

    worker_id: str
    by: str
    why: str
    force: bool = False


class WorkerEndAnnounced(Event, frozen=True):
    """The agent of a worker announces that the provider will take its machine away."""

    worker_id: str
    why: str
    ends_in_ms: int | None = None  # None: the end is possible, its time unknown
    withdrawn: bool = False  # the machine stays after all


class WorkerResumed(Event, frozen=True):
    worker_id: str
    by: str
    why: str = ""


class WorkerTerminationRequested(Event, frozen=True):
    """A worker has to be terminated; refused while it has a lease, unless `force` ends its leases."""

    worker_id: str
    by: str
    why: str
    wall_ms: int
    force: bool = False


class WorkerTerminationAccepted(Event, frozen=True):
    """The provider has accepted the termination of a worker."""

    worker_id: str
    problem: str = ""  # reason why the machine is still not gone after long


class WorkerGone(Event, frozen=True):
    """The provider has proven that this machine does not exist any more."""

    worker_id: str
    why: str
    wall_ms: int


class ListedInstance(Struct, frozen=True, kw_only=True):
    """A machine in a provider's list."""

    worker_id: str
    instance: str  # the provider's id
    state: str
    detail: str = ""
    ends_in_ms: int | None = None  # time until the provider ends it by itself; None: it does not
    waits: bool = False  # an order in the provider's queue


class WorkersListed(Event, frozen=True):
    """A provider listed all machines of this grid, as of `asked_at_ms`."""

    provider: str
    asked_at_ms: int
    instances: tuple[ListedInstance, ...]
    wall_ms: int


class StrayInstanceFound(Event, frozen=True):
    """A provider has a machine of this grid without a worker's row: it is terminated and recorded."""

    provider: str
    worker_id: str
    instance: str


class ScalingRulesSet(Event, frozen=True):
    """The scaling settings were read from the config, or the provider's choice of machines has changed."""

    rules: ScalingRules


class ScalingRequested(Event, frozen=True):
    """The autoscaler asks for an evaluation of the pool of workers."""

    ids: tuple[str, ...]  # of new workers
    wall_ms: int
    warm: int = 0  # workers that the expected load calls for


class OutputsCollected(Event, frozen=True):
    """The output of ended jobs on a draining worker was copied."""

    worker_id: str
    wall_ms: int
    files: int = 0
    bytes: int = 0
    lost: tuple[str, ...] = ()  # files that could not be copied


# ------------------------------------------------------------------ pressure, moves and consents


class PressureRead(Event, frozen=True):
    """The pressure of every node was read for a round of rebalancing."""

    readings: tuple[PressureReading, ...]
    rules: RebalanceRules


class OffloadPressureRead(Event, frozen=True):
    """The pressure of every node was read for automatic offloading."""

    readings: tuple[PressureReading, ...]
    rules: RebalanceRules | None  # None: no sharing; earlier actions are undone
    offload: OffloadRules
    ids: tuple[str, ...] = ()  # of new moves


class AutoOffloadSet(Event, frozen=True):
    """A user switched automatic offloading on or off; None: the config decides again."""

    enabled: bool | None
    by: str


class MoveRequested(Event, frozen=True):
    """Work has to leave its node; the same move a second time is harmless."""

    move: Move


class MoveShipped(Event, frozen=True):
    """The working directory of the original was copied here."""

    move_id: str
    manifest: str
    bytes: int = 0  # new ones
    left_out: tuple[str, ...] = ()  # files that are not shipped, with the reason


class MoveFilesSettled(Event, frozen=True):
    """The working directory of the frozen original was copied here."""

    move_id: str
    manifest: str
    bytes: int = 0
    left_out: tuple[str, ...] = ()  # files that are not shipped, with the reason


class MoveReported(Event, frozen=True, kw_only=True):
    """The agent of a move's source reported a state of the move there."""

    move_id: str
    state: MoveState
    nodes: tuple[str, ...] = ()  # of the agent
    detail: str = ""
    frozen_ms: int = 0  # length of the freeze; 0: unknown
    files: int = 0  # number of files that are back
    kept: tuple[str, ...] = ()  # files that were changed at the source meanwhile, and stay
    notes: tuple[str, ...] = ()


class MoveFailed(Event, frozen=True):
    """The files of a move could not be shipped: the original is left as it was, unless the kill is decided."""

    move_id: str
    why: str


class MoveCancelled(Event, frozen=True):
    """A user cancelled a move; refused once the kill is decided."""

    move_id: str
    by: str


class MoveResultsBrought(Event, frozen=True):
    """The files that the job of a moved process has written were copied here."""

    move_id: str
    manifest: str = ""  # empty: there are none, or they cannot be had
    problem: str = ""


class ConsentGiven(Event, frozen=True):
    """A user allows moves of processes of a command shape."""

    consent: MoveConsent


class ConsentWithdrawn(Event, frozen=True):
    """A user withdrew a consent; a second time is harmless."""

    user: str
    shape: str
