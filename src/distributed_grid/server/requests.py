"""What can be asked on the socket, as types: a message that does not fit is refused before anything happens."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from distributed_grid.errors import BadInput

Text = Annotated[str, Meta(max_length=4096)]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Name = Annotated[str, Meta(max_length=128)]
TokenId = Annotated[str, Meta(pattern=r"^[0-9a-f]{8,32}$")]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Meta(ge=0, le=3.2e9)]
T = TypeVar("T")
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class _Op(Struct, frozen=True, tag_field="op", tag=str.lower, forbid_unknown_fields=True):
    """A message of the socket protocol."""


class Hello(_Op, frozen=True):
    """Who connects, and which config it insists on."""

    protocol: int
    version: Name
    config: Name | None = None
    config_path: Text | None = None


class Status(_Op, frozen=True):
    """Everything at a glance."""


class Info(_Op, frozen=True):
    """About the control plane itself."""


class Config(_Op, frozen=True):
    """The config in use, in its normal form."""


class _Wishes(_Op, frozen=True, kw_only=True):
    """What else can be said of a request, with a command or without.

    `resources` is asked for besides the type and the amount. A label is `key=value`, or a key or tag alone; an
    affinity names a node, a job or a group. `deadline` is a moment, in seconds since 1970.
    """

    resources: dict[Name, float] = {}
    gpu_models: tuple[Name, ...] = ()
    gpu_memory_gb: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    strategy: Name = ""
    labels: tuple[Name, ...] = ()
    affinity: tuple[Name, ...] = ()
    anti_affinity: tuple[Name, ...] = ()
    group: Name = ""
    expects_seconds: Seconds = 0.0
    deadline: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    dry_run: bool = False


class Ask(_Wishes, frozen=True):
    """Resources to hold, without a command; a gang is so many leases on as many nodes, all or nothing.

    With `again` the id is a name: where its lease is over, a new one is made instead of telling the old one's end.
    """

    request_id: Id
    resource_type: Name
    amount: float
    priority: Name = "medium"
    prefer: tuple[Name, ...] = ()
    require: tuple[Name, ...] = ()
    wait_seconds: Seconds = 300.0
    duration_seconds: Seconds = 0.0
    target: Name = ""
    gang: Annotated[int, Meta(ge=1, le=1000)] = 1
    again: bool = False


class Release(_Op, frozen=True):
    """Give a lease back; an `exact` id is not taken for the beginning of a longer one."""

    allocation_id: Name
    exact: bool = False


class Extend(_Op, frozen=True):
    """More time for a lease."""

    allocation_id: Name
    seconds: Seconds


class Boost(_Op, frozen=True):
    """Resources of another node for a target node, for a while; `source` is the only one that may lend them."""

    request_id: Id
    target: Name
    resource_type: Name
    amount: float
    priority: Name = "medium"
    duration_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 3600.0
    source: Name = ""
    wait_seconds: Seconds = 0.0
    dry_run: bool = False


class Boosts(_Op, frozen=True):
    """The boosts that hold something, for one node or for all."""

    node: Name = ""


class ReleaseBoost(_Op, frozen=True):
    """Give a boost back before its time is over."""

    boost_id: Name


class ExtendBoost(_Op, frozen=True):
    """More time for a boost, counted from its end."""

    boost_id: Name
    seconds: Seconds


class OneBoost(_Op, frozen=True):
    """One boost, by its id or any unique prefix."""

    boost_id: Name


class RunBoost(_Op, frozen=True, kw_only=True):
    """A command that uses a boost, on the node that lends it."""

    request_id: Id
    boost_id: Name
    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=20_000)]
    job_id: Name = ""
    env: dict[str, str] = {}
    cwd: Text = ""
    workdir: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    given: tuple[Name, ...] = ()

    def problem(self) -> str | None:
        """What the types cannot say."""
        return _problem_of(self)


class Cooldown(_Op, frozen=True):
    """A node gives everything back to its owner and lends nothing until somebody says `off`."""

    node: Name
    off: bool = False
    wait_seconds: Seconds = 300.0


class MemAllocate(_Op, frozen=True):
    """Bytes in the memory of other nodes; `request_id` becomes the block's id.

    Without a ttl it lasts an hour, and with a session another one whenever that is renewed. `home` is for agents: the
    node from which a program asks.
    """

    request_id: Id
    size: int
    preferred_node: Name = ""
    copies: int = 1
    ttl_seconds: Seconds = 0.0
    session: Name = ""
    name: Text = ""
    meta: Text = ""


class MemFind(_Op, frozen=True):
    """Where a block is, and what lets its user read and write it: by its id, any unique prefix, or its name."""

    block_id: Name = ""
    name: Text = ""


class MemFree(_Op, frozen=True):
    """Nobody wants a block any more."""

    block_id: Name = ""
    name: Text = ""


class MemName(_Op, frozen=True):
    """A block goes by a name from now on, and the one that did is freed; with a ttl its time is fixed."""

    block_id: Name
    name: Text
    meta: Text = ""
    ttl_seconds: Seconds = 0.0


class MemRenew(_Op, frozen=True):
    """The program of a session lives."""

    session: Name


class MemList(_Op, frozen=True):
    """Every block."""


class MemStats(_Op, frozen=True):
    """How much of the pool is used, node by node."""


class Submit(_Wishes, frozen=True):
    """A command to run under a lease."""

    request_id: Id
    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=20_000)]
    resource_type: Name = "cpu"
    amount: float = 1.0
    job_id: Name = ""
    priority: Name = "medium"
    prefer: tuple[Name, ...] = ()
    require: tuple[Name, ...] = ()
    wait_seconds: Seconds = 300.0
    env: dict[str, str] = {}
    cwd: Text = ""
    workdir: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    given: tuple[Name, ...] = ()
    timeout_seconds: Seconds = 0.0
    grace_seconds: Seconds = 5.0
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0

    def problem(self) -> str | None:
        """What the types cannot say."""
        return _problem_of(self)


class Jobs(_Op, frozen=True):
    """The jobs that are going on, and those that ended of late."""

    all: bool = False
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 20
    user: Name | None = None
    state: Name | None = None


class Job(_Op, frozen=True):
    """One job."""

    job_id: Name


class Explain(_Op, frozen=True):
    """Why it waits, why it is there, why it was stopped, when it will start: of a job, a lease or a refused request."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    kind: Literal["", "job", "lease"] = ""


class Ledger(_Op, frozen=True):
    """Who lent whom how much; without `by` lender by borrower."""

    since_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 30 * 86_400.0
    by: Literal["", "user", "node", "day"] = ""


class Cancel(_Op, frozen=True):
    """Stop a job for good."""

    job_id: Name


class Wait(_Op, frozen=True):
    """Answer when a job is over, or when this much time is."""

    job_id: Name
    timeout_seconds: Seconds | None = None


class Logs(_Op, frozen=True):
    """The output of a job, and with `follow` all that still comes until it is over."""

    job_id: Name
    follow: bool = False
    tail_bytes: Annotated[int, Meta(ge=0)] | None = None
    stdout_seen: Annotated[int, Meta(ge=0)] = 0
    stderr_seen: Annotated[int, Meta(ge=0)] = 0


class Fetch(_Op, frozen=True):
    """The files that a job has left in its directory and that fit one of the patterns."""

    job_id: Name
    patterns: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=1000)]


class Events(_Op, frozen=True):
    """The audit trail, and with `follow` what still comes."""

    after: Annotated[int, Meta(ge=0)] | None = None
    follow: bool = False
    subject: Name | None = None
    types: tuple[Name, ...] = ()
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 100


class Metrics(_Op, frozen=True):
    """What the nodes do and did; `window` is in minutes."""

    kind: Literal["snapshots", "trend", "summary", "history", "rebalancing", "scheduling", "prometheus"]
    node: Name = ""
    resource_type: Name = ""
    window: Annotated[int, Meta(ge=1, le=1_440)] | None = None


class Cluster(_Op, frozen=True):
    """Install, start, stop or look at the agents of nodes that are reached by SSH; no names are all of them.

    `auth_sock` and `environ` are the caller's: the agent with the keys, and how packages are fetched.
    """

    verb: Literal["install", "start", "stop", "status", "env"]
    nodes: tuple[Name, ...] = ()
    force: bool = False
    purge: bool = False
    ray: bool = False
    auth_sock: Text = ""
    environ: dict[Name, Text] = {}


class Attach(_Op, frozen=True):
    """Use a Ray cluster that already runs: an agent on each of its nodes, and leases as its placement groups.

    `token` is the cluster's, `environ` says how packages are fetched; both are the caller's.
    """

    address: Annotated[str, Meta(min_length=1, max_length=300)]
    token: Text = ""
    environ: dict[Name, Text] = {}


class Detach(_Op, frozen=True):
    """Leave the Ray cluster, and nothing in it or on its nodes; with `force` also one that is not there any more."""

    force: bool = False


class Stay(_Op, frozen=True):
    """Let a control plane that was started on demand stay until it is stopped, and listen there."""

    listen: Name = ""
    tls: bool | None = None
    force_plain: bool = False


class Stop(_Op, frozen=True):
    """End the control plane; jobs go on and are found again by the next one."""


class CreateToken(_Op, frozen=True):
    """A token for a person. The caller makes id and secret, so asking twice makes one; 0 seconds is for good."""

    token_id: TokenId
    secret_hash: Hash
    user: Name
    team: Name = ""
    ttl_seconds: Seconds = 0.0


class ListTokens(_Op, frozen=True):
    """The tokens of people."""


class RevokeToken(_Op, frozen=True):
    """Shut a token out."""

    token_id: Name


class CreateJoinToken(_Op, frozen=True):
    """A token that lets one node join, once. The caller makes id and secret, so asking twice makes one."""

    token_id: TokenId
    secret_hash: Hash
    node: Name = ""
    ttl_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 3600.0


class ListJoinTokens(_Op, frozen=True):
    """The join tokens, and who used them."""


class RevokeJoinToken(_Op, frozen=True):
    """Shut a join token out, and the node that joined with it."""

    token_id: Name


class Join(_Op, frozen=True):
    """A join token for the right to come in with a key; what a node asks over REST."""

    token: Text
    key_hash: Hash
    node: Name = ""
    hostname: Name = ""


def _problem_of(op: Submit | RunBoost) -> str | None:
    if op.job_id and not _JOB_ID.fullmatch(op.job_id):
        return f"the job id {op.job_id!r} may only have letters, digits, '.', '_' and '-'"
    if any("\0" in word for word in (*op.argv, op.cwd, *op.env, *op.env.values())):
        return "a command, directory or variable must not contain a NUL byte"
    if any("=" in name or not name for name in op.env):
        return "the name of a variable must not be empty or contain '='"
    return None


Op = (
    Hello | Status | Info | Config | Ask | Release | Extend | Submit
    | Jobs | Job | Explain | Ledger | Cancel | Wait | Logs | Fetch | Events | Metrics | Cluster | Stay | Stop
    | Attach | Detach
    | Boost | Boosts | ReleaseBoost | ExtendBoost | OneBoost | RunBoost | Cooldown
    | MemAllocate | MemFind | MemFree | MemName | MemRenew | MemList | MemStats
    | CreateToken | ListTokens | RevokeToken | CreateJoinToken | ListJoinTokens | RevokeJoinToken
)  # fmt: skip
_decoder: msgspec.json.Decoder[Op] = msgspec.json.Decoder(Op)


def parse(body: bytes) -> Op:
    """The message in these bytes; BadInput says what does not fit."""
    try:
        op = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadInput(f"the request makes no sense: {error}") from None
    return _checked(op)


def convert(fields: dict[str, Any], kind: type[T]) -> T:
    """The message of this kind with these fields; BadInput says what does not fit."""
    if "op" in fields:
        raise BadInput("the request makes no sense: Object contains unknown field `op`")
    try:
        op = msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"the request makes no sense: {error}") from None
    return _checked(op)


def _checked(op: T) -> T:
    if isinstance(op, Submit | RunBoost) and (problem := op.problem()) is not None:
        raise BadInput(problem)
    return op
