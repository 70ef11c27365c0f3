"""Request types of the control plane's socket and REST: what a request may say, and how it is parsed.

A request that does not fit its type is refused before anything happens. Every concrete subclass of `Message` is a
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
    which it was typed, where the client knows: a preference, ignored where there is no such node.
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


class ClientHello(Message, frozen=True, tag="hello"):
    """The version of a client, and the config it requires; for one that only asks nothing is changed."""

    protocol: int
    version: Name
    config: Name | None = None
    """Digest of the config file's bytes; None: any config will do."""
    config_path: Text | None = None
    """The config that the user has named."""
    query_only: bool = False
    config_variables: Variables = {}
    """The variables that this config names, as the client has them."""


class GetDaemonInfo(Message, frozen=True):
    """About the control plane itself."""


class GetConfig(Message, frozen=True):
    """The config in use, in its normal form."""


class ReloadConfig(Message, frozen=True):
    """Read a config again, and apply what can be applied to a running control plane."""

    config_path: Text
    config_variables: Variables = {}


class KeepRunning(Message, frozen=True):
    """Keep a control plane that was started on demand running until it is stopped, and listen at an address."""

    listen: Name = ""


class StopDaemon(Message, frozen=True):
    """Stop the control plane; jobs go on and are found again by the next one. With `force` also while workers of
    providers go on, which cost money."""

    force: bool = False


class ConfirmClocks(Message, frozen=True):
    """The wall clocks of the control plane and of all nodes are right: end the waits after their jumps."""


# ------------------------------------------------------------------ queries: nothing changes by them


class GetClocks(Message, frozen=True):
    """Pending jumps of wall clocks."""


class GetStatus(Message, frozen=True):
    """Nodes, offers, leases, jobs and recommendations."""


class ListNodes(Message, frozen=True):
    """Every node."""


class GetNode(Message, frozen=True):
    """One node."""

    node: NodeName


class ListOffers(Message, frozen=True):
    """The offers of all nodes."""


class ListRecommendations(Message, frozen=True):
    """Work that should move to another node."""


class Explain(Message, frozen=True):
    """Why a job, a lease or a refused request waits, was placed there, was stopped, and when it starts."""

    id: Annotated[str, Meta(min_length=1, max_length=256, description="Id of a job or a lease, or any unique prefix.")]
    kind: Literal["", "job", "lease"] = ""


class GetLendingReport(Message, frozen=True):
    """Who lent whom how much; without `by` lender by borrower."""

    since_seconds: Annotated[float, Meta(gt=0, le=3.2e9, description="Length of the report, until now.")] = 30 * 86_400.0
    by: Annotated[Literal["", "user", "node", "day"], Meta(description="Sums by this alone.")] = ""


class ListEvents(Message, frozen=True):
    """The audit trail, and with `follow` what still comes."""

    after: Annotated[Count, Meta(description="Only events after this `seq`.")] | None = None
    follow: Follow = False
    subject: Annotated[Name, Meta(description="Only events about this job, lease or node.")] | None = None
    types: Annotated[Names, Meta(description="Only events of these types.")] = ()
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 100


class GetMetrics(Message, frozen=True):
    """Measurements of the nodes, or of one."""

    kind: Literal["snapshots", "levels", "trend", "summary", "history", "rebalancing", "scheduling", "prometheus"]
    node: NodeName = ""
    resource_type: Annotated[Name, Meta(extra_json_schema={"enum": ["cpu", "memory", "gpu"]})] = ""
    window: Annotated[int, Meta(ge=1, le=1_440, description="How far back, in minutes.")] | None = None


# ------------------------------------------------------------------ leases


class RequestLease(PlacementOptions, frozen=True):
    """Resources to hold, without a command; a gang is so many leases on as many nodes, all or nothing.

    With `again` the id is a name: where its lease has ended, a new one is made instead of returning the ended one.
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
    """The leases that hold something."""


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


class RequestBoost(Message, frozen=True):
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
    """The boosts that hold something, for one node or for all."""

    node: Annotated[NodeName, Meta(description="Only boosts of this target node.")] = ""


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


class SubmitJob(PlacementOptions, frozen=True):
    """A command to run under a lease; `target` is the node that it is for, wherever it runs. Without any stated need it
    gets one core, and a memory limit where earlier runs of the command say how much it needs."""

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
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0
    target: Name = ""
    restartable: bool = False
    fetch: Patterns = ()
    """Files to bring back when the job has ended, into `fetch_to` on the control plane's machine."""
    fetch_to: Text = ""
    overwrite: bool = False
    """Replace local files that were edited since they were shipped."""
    umask: Umask = 0o077

    @property
    def states_needs(self) -> bool:
        """Whether it says how much of anything it needs."""
        given = self.resource_type is not None or self.amount is not None
        return given or bool(self.resources or self.gpu_models or self.gpu_memory_gb)

    def problem(self) -> str | None:
        """What the types do not check."""
        return _problem_of(self)


class RunInBoost(Message, frozen=True, kw_only=True):
    """A command that uses a boost, on the node that lends it."""

    request_id: Id
    boost_id: Name
    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=20_000)]
    job_id: Name = ""
    env: dict[str, str] = field(default_factory=dict)
    cwd: Text = ""
    workdir: OptionalHash = ""
    given: Names = ()
    fetch: Patterns = ()
    fetch_to: Text = ""
    overwrite: bool = False
    umask: Umask = 0o077

    def problem(self) -> str | None:
        """What the types do not check."""
        return _problem_of(self)


def _problem_of(op: SubmitJob | RunInBoost) -> str | None:
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
    """The living jobs, and those that ended last."""

    all: bool = False
    limit: Annotated[int, Meta(ge=1, le=10_000, description="Number of ended jobs, the newest ones.")] = 20
    user: Annotated[Name, Meta(description="Only jobs of this user.")] | None = None
    state: Literal["queued", "assigned", "running", "paused", "stopping", "ended"] | None = None


class ListLiveJobs(Message, frozen=True):
    """The uids of the caller's jobs that have not ended, the oldest first: all of them, however many."""


class GetJob(Message, frozen=True):
    """One job."""

    job_id: JobName


class CancelJob(Message, frozen=True):
    """Stop a job for good."""

    job_id: JobName


class DetachJob(Message, frozen=True):
    """Note at a job that the command that followed it has left it running, and why."""

    job_id: Name
    reason: Annotated[str, Meta(max_length=200)]


class WaitForJob(Message, frozen=True):
    """Wait for the end of a job, or for the timeout."""

    job_id: Name
    timeout_seconds: Seconds | None = None


class ReadLogs(Message, frozen=True):
    """The output of a job; with `follow` until it ends."""

    job_id: JobName
    follow: Follow = False
    tail_bytes: Count | None = None
    stdout_seen: Count = 0
    stderr_seen: Count = 0
    notices_seen: Count | None = None
    """The number of the last notice that the reader has; None: it wants none."""


class FetchFiles(Message, frozen=True):
    """The files in a job's directory that match one of the patterns."""

    job_id: Name
    patterns: Annotated[Patterns, Meta(min_length=1)]


class RecordFetch(Message, frozen=True, kw_only=True):
    """The files of a job are in a directory of the caller's, on the disk."""

    job_id: Name
    patterns: Annotated[Patterns, Meta(min_length=1)]
    directory: Text
    files: Count = 0
    bytes: Count = 0


class WaitForDelivery(Message, frozen=True):
    """Wait until the files of an ended job are in their user's directory, at most this long."""

    job_id: Name
    timeout_seconds: Seconds | None = None


# ------------------------------------------------------------------ pull workers and their tasks

_WORKER_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
WorkerId = Annotated[str, Meta(pattern=_WORKER_ID)]
Fence = Annotated[int, Meta(ge=1, le=2**62)]
Nested = Annotated[dict[Name, Any], Meta(max_length=64)]
MAX_PAYLOAD_BYTES = 64 * 1024
"""Of a task and of its result, as JSON."""


class RegisterPullWorker(Message, frozen=True):
    """A worker without an agent: what it has, and which process it is. A number of seconds is how long its work counts
    without a word from it; 0 is as the config says."""

    worker_id: WorkerId
    incarnation: Annotated[str, Meta(min_length=1, max_length=64)]
    resources: Nested
    hostname: Name = ""
    capabilities: Nested = {}
    tags: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    hold_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0


class ReportPullWorker(Message, frozen=True):
    """A heartbeat of a pull worker, with what it has free where that is said anew; no incarnation is any."""

    worker_id: WorkerId
    incarnation: Name = ""
    resources: Nested = {}


class RemovePullWorker(Message, frozen=True):
    """A pull worker leaves, and runs nothing any more."""

    worker_id: WorkerId
    incarnation: Name = ""


class ReassessWorkers(Message, frozen=True):
    """Have every worker say anew what it has."""


class SubmitTask(Message, frozen=True, kw_only=True):
    """A task: what a pull worker gets (`payload`), or a command that any node can run, or both.

    It waits until somebody runs it, unless a number of seconds is said. An admin may submit it for another `user`.
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
        """What the types do not check."""
        if self.task_id and not _JOB_ID.fullmatch(self.task_id):
            return f"the task id {self.task_id!r} may only have {_JOB_ID_WORDS}"
        if not self.argv and self.payload is None:
            return "a task needs a payload or a command"
        return _command_problem(self.argv, self.env, ()) if self.argv else None


class ListTasks(Message, frozen=True):
    """The tasks that wait to be run, the oldest first."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000


class TakeTask(Message, frozen=True):
    """The next task of a pull worker, which has those that are `running`; waited for up to so many seconds."""

    worker_id: WorkerId
    incarnation: Name = ""
    running: Annotated[tuple[Name, ...], Meta(max_length=10_000)] = ()
    wait_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0
    ask_id: Name = ""


class WithdrawAsk(Message, frozen=True):
    """A pull worker is gone that asked: it did not get the answer to the request with this `ask_id`."""

    worker_id: WorkerId
    incarnation: Name = ""
    ask_id: Name = ""


class ReportTask(Message, frozen=True, kw_only=True):
    """How the attempt of a task with this fence ended, as its worker says; `over_limit`: it had too little memory.
    `user` is whose worker it is, where that is known."""

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
    """Hold some of one worker for a task, for an hour, and on while the worker is heard."""

    request_id: Id
    worker_id: Name
    task_id: Name
    requirements: Nested


class CheckWorkerFit(Message, frozen=True):
    """Whether a worker has room for what a task needs now, why not, and how fit it is."""

    worker_id: Name
    requirements: Nested


class ListWorkerResources(Message, frozen=True):
    """What every worker has and has free, and what is reserved or in use for which task."""


# ------------------------------------------------------------------ blocks of the memory pool


class AllocateBlock(Message, frozen=True):
    """Bytes in the memory of other nodes; `request_id` becomes the block's id.

    Without a ttl it lasts an hour, and with a session another one whenever that is renewed.
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
    """Where a block is, and what lets its user read and write it: by its id, any unique prefix, or its name."""

    block_id: Name = ""
    name: Text = ""


class FreeBlock(Message, frozen=True):
    """Free a block."""

    block_id: Name = ""
    name: Text = ""


class NameBlock(Message, frozen=True):
    """Name a block, and free the block that had the name; with a ttl its lifetime is fixed."""

    block_id: Name
    name: Text
    meta: Text = ""
    ttl_seconds: Seconds = 0.0


class RenewBlocks(Message, frozen=True):
    """Renew the blocks of a session whose program is alive."""

    session: Name


class ListBlocks(Message, frozen=True):
    """Every block, in pages by their ids: those `after` an id; the answer says whether there are `more`."""

    after: Name = ""


class GetMemoryStats(Message, frozen=True):
    """How much of the pool is used, node by node."""


# ------------------------------------------------------------------ nodes


class ManageCluster(Message, frozen=True):
    """Install, start, stop or show the agents of nodes that are reached by SSH; no names are all of them.

    `auth_sock` and `environ` are the caller's: the agent with the keys, and how packages are fetched.
    """

    verb: Literal["install", "start", "stop", "status", "env"]
    nodes: Names = ()
    force: bool = False
    purge: bool = False
    discard_results: bool = False
    """With `purge`: also remove results of jobs that were never fetched."""
    ray: bool = False
    auth_sock: Text = ""
    environ: dict[Name, Text] = field(default_factory=dict)


class AttachRay(Message, frozen=True):
    """Use a Ray cluster that already runs: an agent on each of its nodes, and leases as its placement groups.

    `token` is the cluster's, `environ` says how packages are fetched; both are the caller's.
    """

    address: Annotated[str, Meta(min_length=1, max_length=300)]
    token: Text = ""
    environ: dict[Name, Text] = field(default_factory=dict)


class DetachRay(Message, frozen=True):
    """Detach from the Ray cluster, leaving nothing there; with `force` also from one that is gone."""

    force: bool = False
    discard_results: bool = False
    """Also remove results of jobs that were never fetched."""


class DrainNode(Message, frozen=True):
    """Return everything a node lends to its owner, and lend nothing until `off`."""

    node: Name
    off: bool = False
    wait_seconds: Seconds = 300.0


# ------------------------------------------------------------------ workers of providers


class CreateWorkers(Message, frozen=True):
    """Start workers of a provider. The caller makes their ids, so a repeated request starts each once; 0 of a resource
    is as much as the chosen offer has."""

    worker_ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=1000)]
    provider: Name = ""
    worker_type: Name = "cpu"
    cpu: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    memory_gb: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    gpu: Annotated[int, Meta(ge=0, le=1024)] = 0
    dry_run: bool = False


class ListWorkers(Message, frozen=True):
    """The workers that are not proven gone, and with `all` those that were."""

    all: bool = False
    provider: Name = ""


class GetWorker(Message, frozen=True):
    """One worker, by its id or a unique prefix; gone ones, too."""

    worker_id: Name
    provider: Name = ""


class TerminateWorkers(Message, frozen=True):
    """End workers; with `force` also those with leases, which end with them."""

    worker_ids: Annotated[Names, Meta(min_length=1)]
    force: bool = False
    provider: Name = ""
    discard_results: bool = False
    """With `force`: also where results of jobs were neither fetched nor brought here."""


class ListWorkerOffers(Message, frozen=True):
    """What a provider can start."""

    provider: Name = ""


class GetScaling(Message, frozen=True):
    """How scaling stands: workers, utilization, demand, cooldowns and money."""


class PlanScaling(Message, frozen=True):
    """What scaling would do now, why, and what it would cost; nothing is done."""


class RunScaling(Message, frozen=True):
    """Evaluate scaling now, and act."""


# ------------------------------------------------------------------ offloading


class ScanOffload(Message, frozen=True):
    """Work that could run elsewhere: on one node, or on all that are above a mark."""

    node: Annotated[NodeName, Meta(description="This node; empty: all nodes above a mark.")] = ""


class ExecuteOffload(Message, frozen=True):
    """Move a process (its pid) or a job (its id) off its node. The caller makes the move's id, so a repeated request
    moves it once. With `consent` processes of this command shape in this directory may be moved from now on, with these
    variables of their environment; without it, `variables` are none or those that the consent names. `node` is where
    the pid is, where that is not the node on which it was typed (`origin`). With `pid_start` only the process that
    began then is meant, not another one that has its pid by now; with `shape` and `directory` only while its command
    has this shape there, as a scan has shown it."""

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
    """The moves that go on, and with `all` those that have ended last."""

    all: Annotated[bool, Meta(description="Also the newest moves that have ended.")] = False


class GetMove(Message, frozen=True):
    """One move, by its id or a unique prefix; ended ones, too."""

    move_id: MoveName


class CancelMove(Message, frozen=True):
    """Leave the original as it was; refused once that is too late."""

    move_id: MoveName


class ListConsents(Message, frozen=True):
    """The command shapes whose processes may be moved."""


class WithdrawConsent(Message, frozen=True):
    """Processes of this command shape may not be moved any more, whatever their directory."""

    shape: Text


class SetAutoOffload(Message, frozen=True):
    """Switch automatic offloading on or off whatever the config says, or let the config decide again."""

    action: Literal["enable", "disable", "reset"]


class GetAutoOffload(Message, frozen=True):
    """Whether work moves by itself, why, and what it has done."""


class AdviseCommand(Message, frozen=True):
    """Whether a command that is about to start on the node on which it was typed had better start elsewhere."""

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
    """What the next run of a task needs, and how that is known."""


class RecordExecution(TaskDescription, frozen=True, kw_only=True):
    """What a run has used; 0 was not measured. A task and an attempt that is known already changes nothing.

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
    """How much more a type of task takes with another batch size."""

    base_batch_size: Annotated[float, Meta(gt=0, le=1e12)]
    batch_size: Annotated[float, Meta(gt=0, le=1e12)]


class ListTaskTypes(Message, frozen=True):
    """The types of task that have a history, those that ran last first."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100


class TrainPredictor(Message, frozen=True):
    """Learn every type anew from its history; each is reported as it is done."""


# ------------------------------------------------------------------ access tokens


class CreateToken(Message, frozen=True):
    """A token for a user. The caller makes id and secret, so a repeated request makes one; 0 seconds is for ever."""

    token_id: TokenId
    secret_hash: Hash
    user: Name
    team: Name = ""
    ttl_seconds: Seconds = 0.0


class IdentifyToken(Message, frozen=True):
    """Whose token this is, for a server of the same user that checks it; only the hash of its secret is sent."""

    token_id: TokenId
    secret_hash: Hash


class ListTokens(Message, frozen=True):
    """The tokens of users."""


class RevokeToken(Message, frozen=True):
    """Revoke a token."""

    token_id: Name


class CreateJoinToken(Message, frozen=True):
    """A token that lets one node join, once. The caller makes id and secret, so a repeated request makes one."""

    token_id: TokenId
    secret_hash: Hash
    node: Name = ""
    ttl_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 3600.0


class ListJoinTokens(Message, frozen=True):
    """The join tokens, and who used them."""


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
    """The agent's package for a machine like this, for whoever may join; REST only. The token stays unused."""

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
"""The patterns of this module in words, for the message about a value that does not fit."""


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
    """The decoder of one type, made when it is first needed: one for all of them would take long at every start."""
    return msgspec.json.Decoder(kind)


def parse(body: bytes) -> Message:
    """The request in these bytes; BadInput says what does not fit."""
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
    """The problem of a body that msgspec refused, if that is a number such as NaN, Infinity or 1e999; else ""."""
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
    if isinstance(op, SubmitJob | RunInBoost | SubmitTask) and (problem := op.problem()) is not None:
        raise BadInput(problem)
    return op
