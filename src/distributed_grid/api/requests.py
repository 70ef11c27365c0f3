"""Request types of the control plane's socket and REST, with the bounds of their fields, and their parser.

An invalid request is refused before anything happens. Every concrete subclass of `Message` is a
request; its `op` on the wire is its name in snake case. The service method that answers it declares itself with
`@endpoint` (`server/endpoints.py`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from distributed_grid.api.command_limits import command_problem
from distributed_grid.api.framing import non_finite_number
from distributed_grid.errors import BadInput
from distributed_grid.validation_text import describe_patterns

Text = Annotated[str, Meta(max_length=4096)]
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
Id = Annotated[str, Meta(pattern=ID_PATTERN)]
Name = Annotated[str, Meta(max_length=128)]
Names = Annotated[tuple[Name, ...], Meta(max_length=20_000)]
NodeName = Annotated[Name, Meta(description="Name of a node.")]
LeaseName = Annotated[Name, Meta(description="Id of a lease, or any unique prefix.")]
BoostName = Annotated[Name, Meta(description="Id of a boost, or any unique prefix.")]
JobName = Annotated[Name, Meta(description="Id or uid of a job, or any unique prefix.")]
MoveName = Annotated[Name, Meta(description="Id of a move, or any unique prefix.")]
_HEX_ID = r"^[0-9a-f]{8,32}$"
TokenId = Annotated[str, Meta(pattern=_HEX_ID)]
_HASH, _NO_HASH = r"^[0-9a-f]{64}$", r"^([0-9a-f]{64})?$"
Hash = Annotated[str, Meta(pattern=_HASH)]
OptionalHash = Annotated[str, Meta(pattern=_NO_HASH)]
Seconds = Annotated[float, Meta(ge=0, le=3.2e9)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
MAX_PAGE, MAX_SHORT_PAGE = 10_000, 1_000
PageSize = Annotated[int, Meta(ge=1, le=MAX_PAGE, description="Rows of a page, at most.")]
ShortPageSize = Annotated[int, Meta(ge=1, le=MAX_SHORT_PAGE, description="Rows of a page, at most.")]
Cursor = Annotated[str, Meta(max_length=1024, description="`next` of the page before; none for the first page.")]
Follow = Annotated[bool, Meta(description="Continue with new entries or output, until the end.")]
Quantity = Annotated[int, Meta(ge=0, le=2**60)]
Patterns = Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=500)]
Umask = Annotated[int, Meta(ge=0, le=0o777)]
Variables = Annotated[dict[Name, Annotated[str, Meta(max_length=1 << 17)]], Meta(max_length=1000)]
T = TypeVar("T")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(Struct, frozen=True, tag_field="op", tag=_snake_case, forbid_unknown_fields=True):
    """A request on the socket."""


class PlacementOptions(Message, frozen=True, kw_only=True):
    """Options of a request for resources, with a command or without.

    `resources` is requested besides the type and the amount. A label is `key=value`, or a key or tag alone; an
    affinity names a node, a job or a group. `deadline` is a moment, in seconds since 1970. `origin` is the node on
    which it was typed, if the client knows it: a preference, ignored for an unknown node.
    """

    resources: Annotated[dict[Name, float], Meta(max_length=256)] = {}
    gpu_models: Names = ()
    gpu_memory_gb: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    strategy: Name = ""
    labels: Names = ()
    affinity: Names = ()
    anti_affinity: Names = ()
    group: Name = ""
    expects_seconds: Seconds = 0.0
    deadline: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    dry_run: bool = False
    origin: Name = ""


# ------------------------------------------------------------------ the control plane itself


class ClientHello(Message, frozen=True, kw_only=True, tag="hello"):
    """Version of a client and the config that it requires; a query changes nothing."""

    protocol: int
    version: Name
    config: Name | None = None  # digest of the config file's bytes; None: any config will do
    config_path: Text | None = None  # the config that the user has named
    query_only: bool = False
    config_variables: Variables = {}  # values of the client for the variables in this config


class GetDaemonInfo(Message, frozen=True):
    """About the control plane itself."""


class GetConfig(Message, frozen=True):
    """The config in use, in its normal form."""


class ReloadConfig(Message, frozen=True):
    """Read a config again, and apply the keys that a running control plane can take over."""

    config_path: Text
    config_variables: Variables = {}


class KeepRunning(Message, frozen=True):
    """Keep a control plane that was started on demand running until it is stopped, and listen at an address."""

    listen: Name = ""


class StopDaemon(Message, frozen=True):
    """Stop the control plane; the next one finds its jobs, which continue. With `force` also while workers of providers
    run, which cost money."""

    force: bool = False


class ConfirmClocks(Message, frozen=True):
    """The wall clocks of the control plane and of all nodes are right: end the waits after their jumps."""


# ------------------------------------------------------------------ queries: nothing changes by them


class GetClocks(Message, frozen=True):
    """Pending jumps of wall clocks."""


class GetStatus(Message, frozen=True):
    """Nodes, offers, leases, jobs and recommendations."""


class ListNodes(Message, frozen=True):
    """A page of the nodes, by name."""

    limit: PageSize = 1_000
    cursor: Cursor = ""


class GetNode(Message, frozen=True):
    """One node."""

    node: NodeName


class ListOffers(Message, frozen=True):
    """A page of the offers, by node; those of one node are in one page."""

    limit: PageSize = 1_000
    cursor: Cursor = ""


class ListRecommendations(Message, frozen=True):
    """A page of the work that should move to another node, by node."""

    limit: PageSize = 1_000
    cursor: Cursor = ""


class Explain(Message, frozen=True):
    """Why a job, a lease or a refused request waits, was placed there, was stopped, and when it starts."""

    id: Annotated[str, Meta(min_length=1, max_length=256, description="Id of a job or a lease, or any unique prefix.")]
    kind: Literal["", "job", "lease"] = ""


class GetLendingReport(Message, frozen=True):
    """Lent amounts, by lender and borrower, or by one of them or the day alone (`by`)."""

    since_seconds: Annotated[float, Meta(gt=0, le=3.2e9, description="The period until now.")] = 30 * 86_400.0
    by: Annotated[Literal["", "user", "node", "day"], Meta(description="Sums by this alone.")] = ""


class ListEvents(Message, frozen=True):
    """The audit trail, and with `follow` also new events."""

    after: Annotated[Count, Meta(description="Only events after this `seq`.")] | None = None
    follow: Follow = False
    subject: Annotated[Name, Meta(description="Only events about this job, lease or node.")] | None = None
    types: Annotated[
        tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=50, description="Only events of these types.")
    ] = ()
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 100


class GetMetrics(Message, frozen=True):
    """Measurements of the nodes, or of one."""

    kind: Literal["snapshots", "levels", "trend", "summary", "history", "rebalancing", "scheduling", "prometheus"]
    node: NodeName = ""
    resource_type: Annotated[Name, Meta(extra_json_schema={"enum": ["cpu", "memory", "gpu"]})] = ""
    window: Annotated[int, Meta(ge=1, le=1_440, description="How far back, in minutes.")] | None = None


# ------------------------------------------------------------------ leases


class RequestLease(PlacementOptions, frozen=True, kw_only=True):
    """Resources to hold, without a command; a gang has a lease on each of several nodes, all or nothing.

    With `again` the id is a name: an ended lease with it is replaced by a new one instead of being returned.
    """

    request_id: Id
    resource_type: Name
    amount: float
    priority: Name = "medium"
    prefer: Names = ()
    require: Names = ()
    wait_seconds: Seconds = 300.0
    duration_seconds: Seconds = 0.0
    target: Name = ""
    gang: Annotated[int, Meta(ge=1, le=1000)] = 1
    again: bool = False


class ListLeases(Message, frozen=True):
    """A page of the leases that hold something, the oldest first."""

    limit: PageSize = 1_000
    cursor: Cursor = ""


class GetLease(Message, frozen=True):
    """One lease, alive or ended, by its id or any unique prefix."""

    allocation_id: LeaseName


class ReleaseLease(Message, frozen=True):
    """Release a lease; an `exact` id is not a prefix."""

    allocation_id: LeaseName
    exact: bool = False


class ExtendLease(Message, frozen=True):
    """More time for a lease; the same request id counts once."""

    request_id: Id
    allocation_id: LeaseName
    seconds: Seconds


# ------------------------------------------------------------------ boosts


class RequestBoost(Message, frozen=True, kw_only=True):
    """Resources of another node for a target node, for a while; `source` is preferred, or with `only` required."""

    request_id: Id
    target: Name
    resource_type: Name
    amount: float
    priority: Name = "medium"
    duration_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 3600.0
    source: Name = ""
    wait_seconds: Seconds = 0.0
    dry_run: bool = False
    only: bool = False


class ListBoosts(Message, frozen=True):
    """A page of the boosts that hold something, for one node or for all, the oldest first."""

    node: Annotated[NodeName, Meta(description="Only boosts of this target node.")] = ""
    limit: ShortPageSize = 1_000
    cursor: Cursor = ""


class GetBoost(Message, frozen=True):
    """One boost, by its id or any unique prefix."""

    boost_id: BoostName


class ReleaseBoost(Message, frozen=True):
    """Release a boost before its end."""

    boost_id: BoostName


class ExtendBoost(Message, frozen=True):
    """More time for a boost, counted from its end; the same request id counts once."""

    request_id: Id
    boost_id: BoostName
    seconds: Seconds


# ------------------------------------------------------------------ jobs

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_JOB_ID_WORDS = "letters, digits, '.', '_' and '-' (at most 128, the first a letter or digit), such as train-7"


class SubmitJob(PlacementOptions, frozen=True, kw_only=True):
    """A command to run under a lease; `target` is the node that it works for, wherever it runs. Without stated needs it
    gets one core, and a memory limit if earlier runs of the command have measured it."""

    request_id: Id
    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=20_000)]
    resource_type: Name | None = None
    amount: float | None = None
    job_id: Name = ""
    priority: Name = "medium"
    prefer: Names = ()
    require: Names = ()
    wait_seconds: Seconds | None = 300.0  # None: until it starts or is cancelled
    env: dict[str, str] = field(default_factory=dict)
    cwd: Text = ""
    workdir: OptionalHash = ""
    given: Names = ()
    timeout_seconds: Seconds = 0.0
    grace_seconds: Seconds = 5.0
    merge: bool = False  # stderr is written into stdout
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0
    target: Name = ""
    restartable: bool = False
    fetch: Patterns = ()
    """Patterns of files that are brought to `fetch_to` on the control plane's machine at the end of the job."""
    fetch_to: Text = ""
    overwrite: bool = False
    """Replace local files that were edited since they were shipped."""
    umask: Umask = 0o077

    @property
    def states_needs(self) -> bool:
        """True if it states an amount of any resource."""
        given = self.resource_type is not None or self.amount is not None
        return given or bool(self.resources or self.gpu_models or self.gpu_memory_gb)

    def problem(self) -> str | None:
        """Violation of a rule that the types do not express, or None."""
        return _problem_of(self)


class CommandInLease(Message, frozen=True, kw_only=True):
    """A command that uses what its user has leased."""

    request_id: Id
    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=20_000)]
    job_id: Name = ""
    env: dict[str, str] = field(default_factory=dict)
    cwd: Text = ""
    workdir: OptionalHash = ""
    given: Names = ()
    timeout_seconds: Seconds = 0.0
    grace_seconds: Seconds = 5.0
    merge: bool = False
    fetch: Patterns = ()
    fetch_to: Text = ""
    overwrite: bool = False
    umask: Umask = 0o077

    def problem(self) -> str | None:
        """Violation of a rule that the types do not express, or None."""
        return _problem_of(self)


class RunInBoost(CommandInLease, frozen=True, kw_only=True):
    """A command that uses a boost, on the node that lends it."""

    boost_id: Name


class RunInLease(CommandInLease, frozen=True, kw_only=True):
    """A command that uses a lease of its user, on the node of the lease; one at a time."""

    allocation_id: LeaseName


def _problem_of(op: SubmitJob | CommandInLease) -> str | None:
    if op.job_id and not _JOB_ID.fullmatch(op.job_id):
        return f"the job id {op.job_id!r} may only have {_JOB_ID_WORDS}"
    if op.fetch_to and not op.fetch_to.startswith("/"):
        return f"the directory of fetched files must be an absolute path, not {op.fetch_to!r}"
    if "\0" in op.cwd or "\0" in op.fetch_to:
        return "a directory must not contain a NUL byte"
    return _command_problem(op.argv, op.env, op.given)


def _command_problem(argv: tuple[str, ...], env: dict[str, str], given: tuple[str, ...]) -> str | None:
    if any("\0" in word for word in (*argv, *env, *env.values())):
        return "a command, directory or variable must not contain a NUL byte"
    if any("=" in name or not name for name in env):
        return "the name of a variable must not be empty or contain '='"
    return command_problem(argv, env, given)


class ListJobs(Message, frozen=True):
    """A page of the jobs: first those that have not ended, the newest first, then the others, the last ended first.

    The rows of a page stand in the opposite order, the newest job last. `all` changes nothing any more.
    """

    all: bool = False
    limit: PageSize = 200
    user: Annotated[Name, Meta(description="Only jobs of this user.")] | None = None
    state: Literal["queued", "assigned", "running", "paused", "stopping", "ended"] | None = None
    cursor: Cursor = ""


class ListLiveJobs(Message, frozen=True):
    """A page of the uids of the caller's jobs that have not ended, the oldest first."""

    limit: PageSize = MAX_PAGE
    cursor: Cursor = ""


class GetJob(Message, frozen=True):
    """One job."""

    job_id: JobName


class CancelJob(Message, frozen=True):
    """Stop a job for good."""

    job_id: JobName


class DetachJob(Message, frozen=True):
    """Record why the command that followed a job left it running."""

    job_id: Name
    reason: Annotated[str, Meta(max_length=200)]


class WaitForJob(Message, frozen=True):
    """Wait for the end of a job, up to the timeout."""

    job_id: Name
    timeout_seconds: Seconds | None = None


class ReadLogs(Message, frozen=True, kw_only=True):
    """The output of a job; with `follow` until it ends."""

    job_id: JobName
    follow: Follow = False
    tail_bytes: Count | None = None
    stdout_seen: Count = 0
    stderr_seen: Count = 0
    notices_seen: Count | None = None  # number of the reader's last notice; None: it takes none


class FetchFiles(Message, frozen=True):
    """The files in a job's directory that match one of the patterns."""

    job_id: Name
    patterns: Annotated[Patterns, Meta(min_length=1)]


class RecordFetch(Message, frozen=True, kw_only=True):
    """The files of a job are stored in a directory of the caller."""

    job_id: Name
    patterns: Annotated[Patterns, Meta(min_length=1)]
    directory: Text
    files: Count = 0
    bytes: Count = 0


class WaitForDelivery(Message, frozen=True):
    """Wait until the files of an ended job are in their user's directory, up to the timeout."""

    job_id: Name
    timeout_seconds: Seconds | None = None


# ------------------------------------------------------------------ pull workers and their tasks

_WORKER_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
WorkerId = Annotated[str, Meta(pattern=_WORKER_ID)]
Fence = Annotated[int, Meta(ge=1, le=2**62)]
Nested = Annotated[dict[Name, Any], Meta(max_length=64)]
MAX_PAYLOAD_BYTES = 64 * 1024
"""Limit of a task and of its result, as JSON."""


class RegisterPullWorker(Message, frozen=True, kw_only=True):
    """A worker without an agent: its resources and its process (`incarnation`). Without reports its work counts for
    `hold_seconds`; 0 is the value of the config."""

    worker_id: WorkerId
    incarnation: Annotated[str, Meta(min_length=1, max_length=64)]
    resources: Nested
    hostname: Name = ""
    capabilities: Nested = {}
    tags: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    hold_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0


class ReportPullWorker(Message, frozen=True):
    """Heartbeat of a pull worker, with its free resources if they changed; an empty incarnation is any."""

    worker_id: WorkerId
    incarnation: Name = ""
    resources: Nested = {}


class RemovePullWorker(Message, frozen=True):
    """A pull worker leaves; it runs nothing any more."""

    worker_id: WorkerId
    incarnation: Name = ""


class ReassessWorkers(Message, frozen=True):
    """Ask every worker for its resources."""


class SubmitTask(Message, frozen=True, kw_only=True):
    """A task: a payload for a pull worker, or a command that any node can run, or both.

    Without `wait_seconds` it waits until a node runs it. An admin may submit it for another `user`.
    """

    request_id: Id
    user: Name = ""
    task_id: Name = ""
    payload: Any = None
    argv: Annotated[tuple[str, ...], Meta(max_length=20_000)] = ()
    env: dict[str, str] = field(default_factory=dict)
    requirements: Nested = {}
    priority: Name = "medium"
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0
    timeout_seconds: Seconds = 0.0
    labels: Names = ()
    wait_seconds: Seconds | None = None

    def problem(self) -> str | None:
        """Violation of a rule that the types do not express, or None."""
        if self.task_id and not _JOB_ID.fullmatch(self.task_id):
            return f"the task id {self.task_id!r} may only have {_JOB_ID_WORDS}"
        if not self.argv and self.payload is None:
            return "a task needs a payload or a command"
        return _command_problem(self.argv, self.env, ()) if self.argv else None


class ListTasks(Message, frozen=True):
    """A page of the waiting tasks, the oldest first."""

    limit: ShortPageSize = 1_000
    cursor: Cursor = ""


class TakeTask(Message, frozen=True):
    """The next task of a pull worker besides its `running` ones, awaited for up to `wait_seconds`."""

    worker_id: WorkerId
    incarnation: Name = ""
    running: Annotated[tuple[Name, ...], Meta(max_length=10_000)] = ()
    wait_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0
    ask_id: Name = ""


class WithdrawAsk(Message, frozen=True):
    """A pull worker left before it got the answer to the request with this `ask_id`."""

    worker_id: WorkerId
    incarnation: Name = ""
    ask_id: Name = ""


class ReportTask(Message, frozen=True, kw_only=True):
    """End of the attempt of a task with this fence, by its worker; `over_limit`: it had too little memory. `user` is
    the owner of the worker, if known."""

    worker_id: WorkerId
    task_id: Name
    fence: Fence
    succeeded: bool
    user: Name = ""
    over_limit: bool = False
    result: Any = None
    error: Annotated[str, Meta(max_length=65_536)] = ""
    cpu_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    peak_memory_mb: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class ReserveOnWorker(Message, frozen=True):
    """Hold resources of one worker for a task, for an hour and longer while the worker reports."""

    request_id: Id
    worker_id: Name
    task_id: Name
    requirements: Nested


class CheckWorkerFit(Message, frozen=True):
    """Whether a worker has room for a task now, the reasons against it, and a score."""

    worker_id: Name
    requirements: Nested


class ListWorkerResources(Message, frozen=True):
    """A page of the workers by name: total, free, reserved and used resources, by task."""

    limit: ShortPageSize = 1_000
    cursor: Cursor = ""


# ------------------------------------------------------------------ blocks of the memory pool


class AllocateBlock(Message, frozen=True, kw_only=True):
    """Bytes in the memory of other nodes; `request_id` becomes the block's id.

    Without a ttl it lasts an hour; each renewal of its session adds one.
    """

    request_id: Id
    size: int
    preferred_node: Name = ""
    copies: int = 1
    ttl_seconds: Seconds = 0.0
    session: Name = ""
    name: Text = ""
    meta: Text = ""


class FindBlock(Message, frozen=True):
    """Places of a block and the keys for its user to read and write it: by its id, any unique prefix, or its name."""

    block_id: Name = ""
    name: Text = ""


class FreeBlock(Message, frozen=True):
    """Free a block."""

    block_id: Name = ""
    name: Text = ""


class NameBlock(Message, frozen=True):
    """Name a block, and free the former block of that name; a ttl fixes its lifetime."""

    block_id: Name
    name: Text
    meta: Text = ""
    ttl_seconds: Seconds = 0.0


class RenewBlocks(Message, frozen=True):
    """Renew the blocks of a live session."""

    session: Name


class ListBlocks(Message, frozen=True):
    """Every block, in pages by their ids: those `after` an id; the answer says whether there are `more`."""

    after: Name = ""


class GetMemoryStats(Message, frozen=True):
    """Use of the pool, node by node."""


# ------------------------------------------------------------------ nodes


class ManageCluster(Message, frozen=True, kw_only=True):
    """Install, start, stop or show the agents of nodes with SSH; without names all of them.

    `auth_sock` and `environ` are the caller's: the agent with the keys, and settings for package downloads.
    """

    verb: Literal["install", "start", "stop", "status", "env"]
    nodes: Names = ()
    force: bool = False
    purge: bool = False
    discard_results: bool = False  # with `purge`: also remove results of jobs that were never fetched
    ray: bool = False
    auth_sock: Text = ""
    environ: dict[Name, Text] = field(default_factory=dict)


class AttachRay(Message, frozen=True):
    """Use a running Ray cluster: an agent on each of its nodes, and leases as its placement groups.

    `token` is the cluster's, `environ` has settings for package downloads; both are the caller's.
    """

    address: Annotated[str, Meta(min_length=1, max_length=300)]
    token: Text = ""
    environ: dict[Name, Text] = field(default_factory=dict)


class DetachRay(Message, frozen=True):
    """Detach from the Ray cluster and remove everything there; with `force` also from an unreachable one."""

    force: bool = False
    discard_results: bool = False  # also remove results of jobs that were never fetched


class DrainNode(Message, frozen=True):
    """Return all loans of a node to its owner, and lend nothing until `off`."""

    node: Name
    off: bool = False
    wait_seconds: Seconds = 300.0


# ------------------------------------------------------------------ workers of providers


class CreateWorkers(Message, frozen=True, kw_only=True):
    """Start workers of a provider. The caller makes their ids, so a repeated request starts each once; 0 of a resource
    is the amount of the chosen offer."""

    worker_ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=1000)]
    provider: Name = ""
    worker_type: Name = "cpu"
    cpu: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    memory_gb: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    gpu: Annotated[int, Meta(ge=0, le=1024)] = 0
    dry_run: bool = False


class ListWorkers(Message, frozen=True):
    """A page of the workers that are not proven gone, and with `all` then of the others, the last gone first."""

    all: bool = False
    provider: Name = ""
    limit: ShortPageSize = 200
    cursor: Cursor = ""


class GetWorker(Message, frozen=True):
    """One worker, also a gone one, by its id or a unique prefix."""

    worker_id: Name
    provider: Name = ""


class TerminateWorkers(Message, frozen=True):
    """End workers; with `force` also those with leases, which end with them."""

    worker_ids: Annotated[Names, Meta(min_length=1)]
    force: bool = False
    provider: Name = ""
    discard_results: bool = False  # with `force`: also with results of jobs that were not collected


class ListWorkerOffers(Message, frozen=True):
    """Offers of workers, of one provider or all."""

    provider: Name = ""


class GetScaling(Message, frozen=True):
    """State of scaling: workers, utilization, demand, cooldowns and costs."""


class PlanScaling(Message, frozen=True):
    """The present plan of scaling with its reasons and costs, without acting."""


class RunScaling(Message, frozen=True):
    """Evaluate scaling now, and act on it."""


# ------------------------------------------------------------------ offloading


class ScanOffload(Message, frozen=True):
    """Work that could run elsewhere: of one node, or of all above a mark."""

    node: Annotated[NodeName, Meta(description="This node; empty: all nodes above a mark.")] = ""


class ExecuteOffload(Message, frozen=True, kw_only=True):
    """Move a process (its pid) or a job (its id) off its node. The caller makes the move's id, so a repeated request
    moves it once.

    With `consent` processes of this command shape in this directory may be moved from now on, with these variables of
    their environment; without it `variables` is empty or equals those of the consent. `node` is the node of the pid, by
    default the one on which the request was typed (`origin`). `pid_start` guards against another process with the
    same pid; `shape` and `directory` against another command than a scan has shown."""

    move_id: Id
    subject: Name
    node: Name = ""
    target: Name = ""
    consent: bool = False
    variables: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    freeze_seconds: Annotated[float, Meta(ge=0.5, le=60)] = 10.0
    origin: Name = ""
    pid_start: Annotated[int, Meta(ge=0, le=2**62)] = 0
    shape: Text = ""
    directory: Text = ""


class ListMoves(Message, frozen=True):
    """A page of the active moves, and with `all` then of the others, the last ended first."""

    all: Annotated[bool, Meta(description="Also the moves that have ended.")] = False
    limit: ShortPageSize = 200
    cursor: Cursor = ""


class GetMove(Message, frozen=True):
    """One move, also an ended one, by its id or a unique prefix."""

    move_id: MoveName


class CancelMove(Message, frozen=True):
    """Cancel a move and leave the original as it was; refused once that is too late."""

    move_id: MoveName


class ListConsents(Message, frozen=True):
    """A page of the consents to move processes, by user, directory and command shape."""

    limit: ShortPageSize = 1_000
    cursor: Annotated[str, Meta(max_length=65_536)] = ""  # it has a directory and a command shape


class WithdrawConsent(Message, frozen=True):
    """Withdraw the consents for a command shape, in all directories."""

    shape: Text


class SetAutoOffload(Message, frozen=True):
    """Switch automatic offloading on or off whatever the config says, or let the config decide again."""

    action: Literal["enable", "disable", "reset"]


class GetAutoOffload(Message, frozen=True):
    """State of automatic offloading, with its reasons and its last decisions."""


class AdviseCommand(Message, frozen=True):
    """Advice on where to start a command that was typed on a node."""

    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=20_000)]
    origin: Name = ""


# ------------------------------------------------------------------ prediction


class TaskDescription(Message, frozen=True, kw_only=True):
    """A task to predict or to remember: a command, or else a type with parameters.

    Numbers among the parameters are features of the run; `model`, `precision` and the like make a type of their own.
    """

    argv: Annotated[tuple[Text, ...], Meta(max_length=20_000)] = ()
    task_type: Name = ""
    parameters: Annotated[dict[Name, float | Name], Meta(max_length=64)] = {}
    input_bytes: Quantity = 0


class PredictTask(TaskDescription, frozen=True, kw_only=True):
    """Predicted needs of the next run of a task, and their source."""


class RecordExecution(TaskDescription, frozen=True, kw_only=True):
    """Measured use of a run; 0 is unknown. A known attempt of a task changes nothing.

    A run that was `cut_short` has used at least this much.
    """

    task_id: Annotated[str, Meta(min_length=1, max_length=200)]
    attempt: Annotated[int, Meta(ge=0, le=1_000_000)] = 1
    memory_bytes: Quantity = 0
    cpu_ms: Quantity = 0
    run_ms: Quantity = 0
    gpu_memory_bytes: Quantity = 0
    cut_short: bool = False


class GetBatchScaling(TaskDescription, frozen=True, kw_only=True):
    """Factor between two batch sizes of a type of task."""

    base_batch_size: Annotated[float, Meta(gt=0, le=1e12)]
    batch_size: Annotated[float, Meta(gt=0, le=1e12)]


class ListTaskTypes(Message, frozen=True):
    """Types of task with a history, the last to run first."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100


class TrainPredictor(Message, frozen=True):
    """Train every type from its history, with a report for each."""


# ------------------------------------------------------------------ access tokens


class CreateToken(Message, frozen=True):
    """A token for a user, without end for 0 s. The caller makes id and secret, so a repeated request makes one."""

    token_id: TokenId
    secret_hash: Hash
    user: Name
    team: Name = ""
    ttl_seconds: Seconds = 0.0


class IdentifyToken(Message, frozen=True):
    """User of a token, for another server of the same user; only the hash of its secret is sent."""

    token_id: TokenId
    secret_hash: Hash


class ListTokens(Message, frozen=True):
    """The tokens of users."""


class RevokeToken(Message, frozen=True):
    """Revoke a token."""

    token_id: Name


class CreateJoinToken(Message, frozen=True):
    """A token with which one node joins, once. The caller makes id and secret, so a repeated request makes one."""

    token_id: TokenId
    secret_hash: Hash
    node: Name = ""
    ttl_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 3600.0


class ListJoinTokens(Message, frozen=True):
    """The join tokens and the nodes that used them."""


class RevokeJoinToken(Message, frozen=True):
    """Revoke a join token, and disconnect the node that joined with it."""

    token_id: Name


class JoinRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Exchange a join token for the right to connect with a key; REST only."""

    token: Text
    key_hash: Hash
    node: Name = ""
    hostname: Name = ""


_PYTHON_VERSION = r"^[0-9]{1,2}\.[0-9]{1,3}(\.[0-9]{1,3}[a-z0-9+]{0,12})?$"
_MACHINE = r"^[A-Za-z0-9_]{1,32}$"
_LIBC_VERSION = r"^([0-9]{1,3}\.[0-9]{1,3}(\.[0-9]{1,3})?)?$"


class FetchAgentPackage(Struct, frozen=True, forbid_unknown_fields=True):
    """The agent's package for a kind of machine, for a holder of a join token, which stays unused; REST only."""

    token: Text
    python: Annotated[str, Meta(pattern=_PYTHON_VERSION)]
    machine: Annotated[str, Meta(pattern=_MACHINE)]
    libc: Literal["glibc", "musl"] = "glibc"
    libc_version: Annotated[str, Meta(pattern=_LIBC_VERSION)] = ""


# ------------------------------------------------------------------ parsing


PATTERN_WORDS = {
    ID_PATTERN: "1 to 64 letters, digits, '-' and '_', the first a letter or digit, such as sweep-7",
    _WORKER_ID: "1 to 64 letters, digits, '.', '-' and '_', the first a letter or digit, such as gpu-box.2",
    _HEX_ID: "the id of a token: 8 to 32 of the digits 0-9 and a-f, such as 3f9a07c2",
    _HASH: "a SHA-256 digest: 64 of the digits 0-9 and a-f",
    _NO_HASH: "nothing, or a SHA-256 digest: 64 of the digits 0-9 and a-f",
    _PYTHON_VERSION: "a version of Python, such as 3.12.1",
    _MACHINE: "1 to 32 letters, digits and '_', such as x86_64",
    _LIBC_VERSION: "nothing, or a version such as 2.35",
}
"""The patterns of this module in words, for messages about invalid values."""


def _concrete(kind: type[Message]) -> Iterator[type[Message]]:
    for subclass in kind.__subclasses__():
        if subclass.__subclasses__():
            yield from _concrete(subclass)
        else:
            yield subclass


REQUEST_TYPES = tuple(_concrete(Message))
_TYPES_BY_TAG = {str(kind.__struct_config__.tag): kind for kind in REQUEST_TYPES}


class _Tag(Struct):
    """The one field that every request has."""

    op: str


_tag_decoder = msgspec.json.Decoder(_Tag)


@functools.cache
def _decoder_of(kind: type[Message]) -> msgspec.json.Decoder[Message]:
    """The decoder of one type, made at first use: all of them at the start would take long."""
    return msgspec.json.Decoder(kind)


def parse(body: bytes) -> Message:
    """The request in these bytes; BadInput for an invalid one."""
    try:
        tag = _tag_decoder.decode(body).op
        if (kind := _TYPES_BY_TAG.get(tag)) is None:
            raise BadInput(f"invalid request: Invalid value {tag[:80]!r} - at `$.op`")
        op = _decoder_of(kind).decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = non_finite_in(body) or describe_patterns(str(error), PATTERN_WORDS)
        raise BadInput(f"invalid request: {reason}") from None
    return _checked(op)


def non_finite_in(body: bytes) -> str:
    """The message about NaN, Infinity or 1e999 in a refused body, or ""."""
    try:
        return non_finite_number(json.loads(body))
    except (ValueError, RecursionError):
        return ""


def convert(fields: dict[str, Any], kind: type[T], *, strict: bool = True) -> T:
    """The request of this type with these fields, texts unless `strict`; BadInput for an invalid one."""
    if "op" in fields:
        raise BadInput("invalid request: Object contains unknown field `op`")
    try:
        op = msgspec.convert(fields, kind, strict=strict)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"invalid request: {describe_patterns(str(error), PATTERN_WORDS)}") from None
    return _checked(op)


def _checked(op: T) -> T:
    if isinstance(op, SubmitJob | CommandInLease | SubmitTask) and (problem := op.problem()) is not None:
        raise BadInput(problem)
    return op
