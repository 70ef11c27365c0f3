"""Events: what happened, in the past tense. The only input of the ledger."""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.deliveries import DeliveredFiles, FetchOrder
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.jobs import Command, JobEstimate, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.moves import Move, MoveConsent, OffloadRules
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.rebalancing import PressureReading, RebalanceRules, RebalanceSchedule
from distributed_grid.domain.resources import Claim
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.workers import ScalingPlan, ScalingRules, Worker, WorkerRules


class ControlPlaneStarted(Struct, frozen=True):
    """A control plane took over the ledger: the epoch grows, no node has been heard yet."""

    epoch: int


class PolicySet(Struct, frozen=True):
    """The scheduling policy of the config was read."""

    policy: SchedulingPolicy


class NodeDeclared(Struct, frozen=True):
    """The config names this node, or its agent said what it has."""

    node: Node


class EpochReported(Struct, frozen=True):
    """The agent of a node has seen this epoch of a control plane, which may be later than the grid's own."""

    node: str
    epoch: int


class AgentRejected(Struct, frozen=True):
    """What the agent of a node says is not believed, and it was turned away."""

    node: str
    why: str


class NodeForgotten(Struct, frozen=True):
    """The config does not name this node any more."""

    name: str


class HeartbeatReceived(Struct, frozen=True):
    """A heartbeat with its measurements; its number, and what the agent itself decided for its owner.

    `repeats`: it does not say anew what the node has. `clock_jump_ms` is the pending jump of its wall clock (0: none),
    which waits for `clock_waits_ms` more.
    """

    name: str
    usage: Usage
    beat: int = 0
    generation: int = 0
    yields: bool = False
    repeats: bool = False
    clock_jump_ms: int = 0
    clock_waits_ms: int = 0


class ClocksConfirmed(Struct, frozen=True):
    """Somebody says that the wall clocks of all nodes are right: deletions by age go on there."""

    by: str


class NodeHeard(Struct, frozen=True):
    """What the last heartbeat of a node calls for is to be done; the heartbeat itself is in the ledger already."""

    name: str


class PullWorkerRegistered(Struct, frozen=True):
    """A worker without an agent said what it has; another incarnation than before is another process."""

    node: Node
    usage: Usage


class TaskAsked(Struct, frozen=True):
    """A pull worker wants its next task; it has those that are `running`, by their ids, and no others."""

    worker: str
    incarnation: str = ""
    running: tuple[str, ...] = ()
    ask_id: str = ""  # names the answer, so that it can be given back undelivered


class TaskAskWithdrawn(Struct, frozen=True):
    """The connection is gone on which a pull worker asked: it asks no more, and the answer to this ask, if there was
    one, was not delivered."""

    worker: str
    incarnation: str = ""
    ask_id: str = ""


class ReassessmentRequested(Struct, frozen=True):
    """Every worker of another machine is to say anew what it has."""


class AgentRequested(Struct, frozen=True):
    """Somebody asked for the agent of a node to run, or to run no longer."""

    name: str
    wanted: bool


class NodeDrained(Struct, frozen=True):
    """A node is to give everything back to its owner; its jobs are requeued. One that is `cooling` lends
    nothing until it is resumed, whatever is started meanwhile. Unless it `reclaims`, what is lent there may come to its
    end."""

    name: str
    detail: str = "the node is being drained"
    cooling: bool = False
    reclaims: bool = True


class NodeResumed(Struct, frozen=True):
    """A node that cooled down may lend again."""

    name: str


class NodeStopped(Struct, frozen=True):
    """The agent of a node was ended on purpose, and nothing runs there any more."""

    name: str


class EngineRegistered(Struct, frozen=True):
    """An engine is to carry leases, too, or the grid has started it anew (another `session`)."""

    name: str
    mode: str
    address: str
    namespace: str = "grid"
    session: str = ""
    nodes: tuple[str, ...] = ()


class EngineRemoved(Struct, frozen=True):
    """An engine is to carry leases no longer."""

    name: str
    detail: str = ""


class EngineNode(Struct, frozen=True):
    """A node as an engine sees it: its names, its total resources, and what others have not taken of them."""

    id: str
    name: str = ""
    address: str = ""
    hostname: str = ""
    head: bool = False
    has: EngineResources = EngineResources()
    room: EngineResources = EngineResources()


class EngineObserved(Struct, frozen=True):
    """What an engine has: its nodes, and the groups that are named as ours are, as of when they were asked for.

    `groups` is None where only the nodes were looked at. `in_use` are those in which something runs, or was said to.
    """

    name: str
    session: str
    asked_at_ms: int
    nodes: tuple[EngineNode, ...]
    groups: tuple[tuple[str, str], ...] | None = None
    in_use: tuple[str, ...] = ()


class GroupBound(Struct, frozen=True):
    """The engine has made the group of a binding, and knows that its lease ends then (0: not known to end)."""

    key: str
    term_ms: int = 0


class GroupTermSet(Struct, frozen=True):
    """The engine knows that the lease of a binding ends then."""

    key: str
    term_ms: int


class GroupRefused(Struct, frozen=True):
    """The engine has not made the group of a binding, and has nothing of it."""

    key: str
    why: str


class GroupFreed(Struct, frozen=True):
    """The engine has nothing of that binding any more."""

    key: str


class LeaseLost(Struct, frozen=True):
    """A lease ended without a report: its node is gone, or its hold has run out."""

    lease_id: str
    detail: str


class LeaseReclaimed(Struct, frozen=True):
    """A node wants back what it lent."""

    lease_id: str
    detail: str


class LeaseAsked(Struct, frozen=True):
    """Somebody asks for resources to hold, without a command; with `again` the id of a lease that is over may be used
    once more."""

    request: Request
    again: bool = False


class LeaseClaimed(Struct, frozen=True):
    """Something else than the ledger knows of a lease that the ledger does not have: a claim until its node confirms
    it."""

    request: Request
    node: str
    claim: Claim
    fence: int
    granted_at_ms: int
    ends_at_ms: int


class ClaimsRead(Struct, frozen=True):
    """Everything that a new ledger could learn of leases from elsewhere was read, once and for all."""

    claims: tuple[LeaseClaimed, ...] = ()


class ClaimsChecked(Struct, frozen=True):
    """A node was heard: what is claimed of it can be compared with what it has."""

    node: str


class RequestRefused(Struct, frozen=True):
    """A request was refused before it could become one of the ledger's: only the audit trail changes."""

    request_id: str
    user: str
    reason: str


class AlertChanged(Struct, frozen=True):
    """An alert about a node was raised or cleared: only the audit trail changes."""

    node: str
    resource: str
    raised: bool
    detail: str


class LeaseReleased(Struct, frozen=True):
    """The holder gives a lease back; giving it back twice is harmless."""

    lease_id: str
    by: str
    detail: str = ""


class LeaseExtended(Struct, frozen=True):
    """The holder asks for this much more time; the same request id counts once."""

    lease_id: str
    by: str
    extra_ms: int
    request_id: str = ""


class JobSubmitted(Struct, frozen=True):
    """Somebody wants a command run under a lease; the estimate is the grid's own, and no part of what was asked."""

    id: str
    command: Command
    request: Request
    retries: int = 0
    estimate: JobEstimate | None = None
    restartable: bool = False
    fetch: FetchOrder | None = None


class JobCancelled(Struct, frozen=True):
    """The user does not want the job any more; cancelling twice is harmless."""

    uid: str
    by: str
    detail: str = ""


class JobDetached(Struct, frozen=True):
    """The command that followed a job has left it running, for instance because its terminal closed."""

    uid: str
    by: str
    reason: str


class AttemptStarted(Struct, frozen=True):
    """The agent runs the command."""

    uid: str
    number: int
    fence: int
    pid: int
    cores: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    pid_start: int = 0


class AttemptPaused(Struct, frozen=True):
    """The agent let an attempt stand still, or go on, for the sake of the node's owner."""

    uid: str
    number: int
    fence: int
    paused: bool
    detail: str = ""
    nodes: tuple[str, ...] = ()


class AttemptMarked(Struct, frozen=True):
    """An attempt marked a checkpoint `age_ms` ago: its work until then would not be lost."""

    uid: str
    number: int
    fence: int
    age_ms: int
    nodes: tuple[str, ...] = ()


class AttemptOutgrown(Struct, frozen=True):
    """An attempt holds more memory than its lease, whose size was learned from earlier runs. It is reported again for
    as long as that is so."""

    uid: str
    number: int
    fence: int
    memory_bytes: int
    nodes: tuple[str, ...] = ()


class AttemptEnded(Struct, frozen=True):
    """The agent proved the attempt over: its whole process tree is gone.

    `nodes` are those the reporting agent serves: nobody reports about another's attempts. None is the grid itself.
    With a `pid` its start is told, too: it was over before that was worth a message of its own. `mark_age_ms` is how
    long before its end it last marked a checkpoint; None is never. `result` is what a task has to say, as JSON.
    `has_checkpoint`: it has left something in its checkpoint directory.
    """

    uid: str
    number: int
    fence: int
    outcome: Outcome
    nodes: tuple[str, ...] = ()
    pid: int = 0
    cores: tuple[int, ...] = ()
    mark_age_ms: int | None = None
    pid_start: int = 0
    result: str = ""
    has_checkpoint: bool = False


class AttemptsListed(Struct, frozen=True):
    """An agent came (back) and said which attempts it has a record of, by lease id. `running` are others of which
    something was seen to run on this machine. `ordered` are those on this node that were ever ordered since
    `ordered_since_ms`; of what was assigned before, or with None of any, nobody knows."""

    node: str
    attempts: tuple[str, ...]
    boot: str = ""
    machine: str = ""
    running: tuple[str, ...] = ()
    ordered: tuple[str, ...] = ()
    ordered_since_ms: int | None = None


class AttemptsGone(Struct, frozen=True):
    """Nothing is seen any more of attempts that their agent had no trace of."""

    node: str
    attempts: tuple[str, ...]


class StartsExpired(Struct, frozen=True):
    """A node has not started these attempts (by their lease ids) in time, and cannot start them any more."""

    node: str
    attempts: tuple[str, ...]


class BlockAsked(Struct, frozen=True):
    """Somebody wants so many bytes in other nodes' memory; `term_ms` is how long at first, and with a `session` how
    much each time that renews it."""

    id: str
    user: str
    size_bytes: int
    term_ms: int
    copies: int = 1
    name: str = ""
    meta: str = ""
    session: str = ""
    home: str = ""
    prefer: str = ""


class CopyAdded(Struct, frozen=True):
    """A block that is just being made needs one copy more; there are no bytes yet."""

    block_id: str


class BlockReleased(Struct, frozen=True):
    """Nobody wants a block any more; a second time is harmless."""

    block_id: str
    by: str
    detail: str = ""


class BlockNamed(Struct, frozen=True):
    """A block goes by this name from now on, and the one that did is released; with a term it lasts so long from now
    on, whatever becomes of its program."""

    block_id: str
    by: str
    name: str
    meta: str = ""
    term_ms: int = 0


class BlocksRenewed(Struct, frozen=True):
    """The program of a session lives."""

    session: str
    by: str


class CopyUnwanted(Struct, frozen=True):
    """A copy has to leave its place: the node gives it back to its owner, or is short of memory. It goes to none of the
    nodes to `avoid`; where no other has room it goes to disk, or, unless it `spills`, stays."""

    block_id: str
    copy: str
    why: str
    spills: bool = True
    avoid: tuple[str, ...] = ()


class CopyNeeded(Struct, frozen=True):
    """A block has too few copies, or one on disk that would be better off in memory."""

    block_id: str


class CopyMade(Struct, frozen=True):
    """A node has made a copy of a copy elsewhere, or could not. `nodes` are those that the reporter serves."""

    source: str
    generation: int
    problem: str = ""
    nodes: tuple[str, ...] = ()


class CopiesFreed(Struct, frozen=True):
    """Nothing is left of these copies. `nodes` are those that the reporter serves."""

    copies: tuple[str, ...]
    nodes: tuple[str, ...] = ()


class CopyLost(Struct, frozen=True):
    """The bytes of a copy are gone."""

    block_id: str
    copy: str
    why: str


class MemoryServed(Struct, frozen=True):
    """The memory of a node can be used, and these copies are on its disk; or it cannot (any more), and why."""

    lender: MemoryServerRow
    on_disk: tuple[str, ...] = ()
    problem: str = ""


class MemoryReclaimRequested(Struct, frozen=True):
    """The owner of a node needs so much of the memory back that blocks hold there."""

    node: str
    memory_bytes: int


class WorkerRulesSet(Struct, frozen=True):
    """The budgets and times of workers were read from the config."""

    rules: WorkerRules


class WorkerRequested(Struct, frozen=True):
    """A worker is wanted; the same row a second time is harmless. `wall_ms` says which day it is (UTC)."""

    worker: Worker
    wall_ms: int


class WorkerAsked(Struct, frozen=True):
    """A call to create this worker is about to be made: from now on it may exist."""

    worker_id: str


class WorkerBooted(Struct, frozen=True):
    """The provider has made this machine; `warning` says where it has less than was asked for.

    `ends_in_ms`: the provider ends it by itself in so long; None: it does not. `waits`: it has taken the order on, and
    makes the machine when its turn comes.
    """

    worker_id: str
    instance: str
    warning: str = ""
    ends_in_ms: int | None = None
    waits: bool = False


class WorkerJoined(Struct, frozen=True):
    """The agent of a worker was heard."""

    worker_id: str


class WorkerCallFailed(Struct, frozen=True):
    """A call about a worker failed; the identical call follows after a pause. Where its answer was lost it may have had
    its effect."""

    worker_id: str
    why: str
    was_lost: bool = True


class WorkerRefused(Struct, frozen=True):
    """The provider will not make this worker. With a `scope` it has no room for it there now, and `instead` is wanted
    in its place, within the budget."""

    worker_id: str
    why: str
    wall_ms: int
    scope: str = ""
    instead: Worker | None = None


class WorkerDrainRequested(Struct, frozen=True):
    """A worker is to take nothing new; refused while it has a lease, unless it is told to give those back."""

    worker_id: str
    by: str
    why: str
    force: bool = False


class WorkerEndAnnounced(Struct, frozen=True):
    """The agent of a worker says that its machine will be taken away in so long; None: it may be, nobody knows when.
    `withdrawn`: it stays after all."""

    worker_id: str
    why: str
    ends_in_ms: int | None = None
    withdrawn: bool = False


class WorkerResumed(Struct, frozen=True):
    """A worker that drains may be used again."""

    worker_id: str
    by: str
    why: str = ""


class WorkerTerminationRequested(Struct, frozen=True):
    """A worker is to be ended; refused while it has a lease, unless those are to end with it."""

    worker_id: str
    by: str
    why: str
    wall_ms: int
    force: bool = False


class WorkerTerminationAccepted(Struct, frozen=True):
    """The provider has taken on to end a worker; `problem` says what keeps it from being gone for long."""

    worker_id: str
    problem: str = ""


class WorkerGone(Struct, frozen=True):
    """The provider has proven that this machine does not exist any more."""

    worker_id: str
    why: str
    wall_ms: int


class ListedInstance(Struct, frozen=True):
    """A machine in a provider's list: whose it is, the provider's id of it, its state there, and more about that.

    `ends_in_ms`: the provider ends it by itself in so long; None: it does not. `waits`: it is an order in a queue yet.
    """

    worker_id: str
    instance: str
    state: str
    detail: str = ""
    ends_in_ms: int | None = None
    waits: bool = False


class WorkersListed(Struct, frozen=True):
    """All machines of this grid that a provider lists, as of when it was asked."""

    provider: str
    asked_at_ms: int
    instances: tuple[ListedInstance, ...]
    wall_ms: int


class WorkersChecked(Struct, frozen=True):
    """A moment at which deadlines and budgets of workers are compared with the time."""

    wall_ms: int


class StrayInstanceFound(Struct, frozen=True):
    """A provider has a machine of this grid that no worker stands for: it is ended, and the audit trail says so."""

    provider: str
    worker_id: str
    instance: str


class ScalingRulesSet(Struct, frozen=True):
    """The scaling settings were read from the config, or what the provider can start has changed."""

    rules: ScalingRules


class ScalingEvaluated(Struct, frozen=True):
    """A moment at which workers are started or given back. `ids` are for new workers; `wall_ms` says which day it is
    (UTC); `warm` is how many workers the expected load calls for. With a `plan` that one is carried out."""

    ids: tuple[str, ...]
    wall_ms: int
    warm: int = 0
    plan: ScalingPlan | None = None


class OutputsCollected(Struct, frozen=True):
    """What jobs left on a worker that drains was copied: so many files and bytes; `lost` is what could not be."""

    worker_id: str
    wall_ms: int
    files: int = 0
    bytes: int = 0
    lost: tuple[str, ...] = ()


class MoveRequested(Struct, frozen=True):
    """Work is to leave its node; the same move a second time is harmless."""

    move: Move


class MoveChecked(Struct, frozen=True):
    """Something that a move depends on may have changed: its lease, its job, its node, or the time."""

    move_id: str


class MoveShipped(Struct, frozen=True):
    """The working directory of the original is here, as this manifest; so many bytes were new. `left_out` names files
    that are not shipped, with the reason."""

    move_id: str
    manifest: str
    bytes: int = 0
    left_out: tuple[str, ...] = ()


class MoveFrozen(Struct, frozen=True):
    """The whole tree of the original stands still, and will for so long. `nodes` are those that the reporter serves."""

    move_id: str
    left_ms: int
    nodes: tuple[str, ...] = ()


class MoveFilesSettled(Struct, frozen=True):
    """While the original stands still its working directory is this manifest, and all of it is here, but for files that
    are not shipped: `left_out`, with the reason."""

    move_id: str
    manifest: str
    bytes: int = 0
    left_out: tuple[str, ...] = ()


class MoveDecided(Struct, frozen=True):
    """The guard on the source has durably decided to end the original; it cannot go on any more. It had stood still for
    `frozen_ms` (0: unknown)."""

    move_id: str
    nodes: tuple[str, ...] = ()
    frozen_ms: int = 0


class MoveDied(Struct, frozen=True):
    """The whole tree of the original is gone: seen so by its guard, or its machine has another boot id."""

    move_id: str
    nodes: tuple[str, ...] = ()
    detail: str = ""


class MoveThawed(Struct, frozen=True):
    """The original goes on as if nothing had happened, and why; for this move that is final. Also told of a process
    that was never frozen. `gone`: it ended by itself. It had stood still for `frozen_ms`."""

    move_id: str
    why: str
    nodes: tuple[str, ...] = ()
    gone: bool = False
    frozen_ms: int = 0


class MoveFailed(Struct, frozen=True):
    """A move cannot go on: the original is left as it was, unless that is too late. `nodes` are those that the reporter
    serves, where it was an agent."""

    move_id: str
    why: str
    nodes: tuple[str, ...] = ()


class MoveCancelled(Struct, frozen=True):
    """A user does not want a move any more; refused once it is decided."""

    move_id: str
    by: str


class MoveResultsBrought(Struct, frozen=True):
    """What the job of a moved process has written is here, as this manifest; empty: it has written nothing, or nothing
    of it can be had, and `problem` says why."""

    move_id: str
    manifest: str = ""
    problem: str = ""


class MoveReturned(Struct, frozen=True):
    """What the job of a moved process has written is back at the source, but for the files that were changed there."""

    move_id: str
    files: int = 0
    kept: tuple[str, ...] = ()
    problem: str = ""
    nodes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class ConsentGiven(Struct, frozen=True):
    """A user allows that processes of a command shape are moved."""

    consent: MoveConsent


class ConsentWithdrawn(Struct, frozen=True):
    """A user does not allow it any more; a second time is harmless."""

    user: str
    shape: str


class AutoOffloadSet(Struct, frozen=True):
    """Automatic offloading was switched on or off by a person; None: it is as the config says again."""

    enabled: bool | None
    by: str


class OffloadEvaluated(Struct, frozen=True):
    """A moment at which automatic offloading looks at the pressure of all nodes. `ids` are for new moves. With `nodes`
    what was read has been recorded, and these are relieved next, one after the other. Without `rules` nothing is
    shared, and what was done is undone."""

    readings: tuple[PressureReading, ...]
    rules: RebalanceRules | None
    offload: OffloadRules
    ids: tuple[str, ...] = ()
    nodes: tuple[str, ...] | None = None


class CheckpointShipped(Struct, frozen=True):
    """The checkpoint directory of a job's last attempt is here, as this manifest (empty: it left none), or cannot be
    had: `problem` says why, and the job starts with the one before. `left_out` names what no other machine can have."""

    uid: str
    number: int
    manifest: str = ""
    problem: str = ""
    files: int = 0
    bytes: int = 0
    left_out: tuple[str, ...] = ()


class FilesDelivered(Struct, frozen=True):
    """The files of an ended job are in their user's directory, on the disk."""

    job: str
    delivered: DeliveredFiles


class FilesDelayed(Struct, frozen=True):
    """The files of an ended job could not be brought yet."""

    job: str
    problem: str


class FilesUndeliverable(Struct, frozen=True):
    """The files of an ended job cannot be brought any more, or there are none."""

    job: str
    problem: str


class FilesFetched(Struct, frozen=True):
    """A user has fetched files of a job by hand."""

    job: str
    job_id: str
    user: str
    node: str
    patterns: tuple[str, ...]
    delivered: DeliveredFiles


class QueueScanned(Struct, frozen=True):
    """Capacity may have come free: scan the queue.

    `tried` are the fit keys of requests that did not fit during this scan, `granted` counts those that it granted.
    """

    tried: frozenset[object] = frozenset()
    granted: int = 0


class PressureRead(Struct, frozen=True):
    """The pressure of every node, read at one moment; with a schedule it has been recorded, and moves come next."""

    readings: tuple[PressureReading, ...]
    rules: RebalanceRules
    schedule: RebalanceSchedule | None = None


class TimePassed(Struct, frozen=True):
    """A moment with something due; `expired` leases were settled in this step already, and what some of them held was
    `freed` since the last scan of the queue."""

    expired: int = 0
    freed: bool = False


Event = (
    ControlPlaneStarted
    | PolicySet
    | NodeDeclared
    | EpochReported
    | AgentRejected
    | NodeForgotten
    | HeartbeatReceived
    | NodeHeard
    | PullWorkerRegistered
    | TaskAsked
    | TaskAskWithdrawn
    | ReassessmentRequested
    | AgentRequested
    | NodeDrained
    | NodeResumed
    | NodeStopped
    | EngineRegistered
    | EngineRemoved
    | EngineObserved
    | GroupBound
    | GroupTermSet
    | GroupRefused
    | GroupFreed
    | LeaseAsked
    | LeaseClaimed
    | ClaimsRead
    | ClaimsChecked
    | RequestRefused
    | AlertChanged
    | ClocksConfirmed
    | LeaseReleased
    | LeaseReclaimed
    | LeaseLost
    | LeaseExtended
    | JobSubmitted
    | JobCancelled
    | JobDetached
    | AttemptStarted
    | AttemptPaused
    | AttemptMarked
    | AttemptOutgrown
    | AttemptEnded
    | AttemptsListed
    | AttemptsGone
    | StartsExpired
    | BlockAsked
    | CopyAdded
    | BlockReleased
    | BlockNamed
    | BlocksRenewed
    | CopyUnwanted
    | CopyNeeded
    | CopyMade
    | CopiesFreed
    | CopyLost
    | MemoryServed
    | MemoryReclaimRequested
    | WorkerRulesSet
    | WorkerRequested
    | WorkerAsked
    | WorkerBooted
    | WorkerJoined
    | WorkerCallFailed
    | WorkerRefused
    | WorkerDrainRequested
    | WorkerEndAnnounced
    | WorkerResumed
    | WorkerTerminationRequested
    | WorkerTerminationAccepted
    | WorkerGone
    | WorkersListed
    | WorkersChecked
    | StrayInstanceFound
    | ScalingRulesSet
    | ScalingEvaluated
    | OutputsCollected
    | MoveRequested
    | MoveChecked
    | MoveShipped
    | MoveFrozen
    | MoveFilesSettled
    | MoveDecided
    | MoveDied
    | MoveThawed
    | MoveFailed
    | MoveCancelled
    | MoveResultsBrought
    | MoveReturned
    | ConsentGiven
    | ConsentWithdrawn
    | AutoOffloadSet
    | OffloadEvaluated
    | CheckpointShipped
    | FilesDelivered
    | FilesDelayed
    | FilesUndeliverable
    | FilesFetched
    | QueueScanned
    | PressureRead
    | TimePassed
)
