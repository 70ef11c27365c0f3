"""Requests for jobs and leases, built from the options of a program or of a command line.

The one place where a submission is put together: `grid.run`, `GridOrchestrator` and `grid run-shared` all use it. No
msgspec and no asyncio here, so that a program starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from distributed_grid.client.job_payload import (
    NONE,
    caller_environment,
    check_command,
    check_ship,
    require_utf8,
    upload_workdir,
)
from distributed_grid.client.placement_arguments import (
    PlacementArguments,
    check_names,
    finite_amount,
    placement_fields,
    positive_seconds,
    resource_name,
)
from distributed_grid.errors import BadInput
from distributed_grid.number_text import GIB
from distributed_grid.quantities import parse_seconds, parse_size

if TYPE_CHECKING:
    from distributed_grid.domain.resources import Priority
    from distributed_grid.quantities import Size, Span
    from distributed_grid.state_dir import StateDir

Command = str | Sequence[str]
"""A list of words, or one string that is split as a shell would."""
WAIT_SECONDS = 300.0
"""Wait for resources of a command that is followed; a detached one waits until it starts or is cancelled."""
LEASE_SECONDS = 3600.0
"""The default duration; a lease without an end would outlive a program that dies."""
GRACE_SECONDS = 5.0


class ResourceOptions(PlacementArguments, total=False):
    """Amounts and places of a request; omitted options do not matter."""

    cpus: float | None  # cores; 1 where nothing is said, and 0 for none
    mem: Size | None  # "512M", "1.5GiB", or GB
    gpus: float | None
    node: str | Sequence[str]  # preferred, or with strategy="node_specific" required
    target_node: str  # the node whose work it is, wherever it runs
    priority: Priority | str
    wait: Span | None  # for resources; 0 refuses at once


class CommandOptions(TypedDict, total=False):
    """Options of a command that runs as a job."""

    shell: bool  # the command is one string for sh -c
    check: bool  # raise JobFailed where it does not exit with 0
    env: Mapping[str, str] | None  # added to a clean base
    workdir: str | os.PathLike[str] | None  # shipped to another machine; "none": nothing. Default: the current one
    isolated: bool  # an empty private directory instead
    ship: Sequence[str]  # patterns of files to ship though they look like secrets
    fetch: Sequence[str]  # patterns of files to bring back
    overwrite: bool  # also over local files that were edited meanwhile
    timeout: Span | None  # stops the job; 0 and None: never
    grace: Span  # from the request to stop until the kill
    merge: bool  # write stderr into stdout, in the order of writing
    job_id: str  # a name of your own


class JobOptions(ResourceOptions, CommandOptions, total=False):
    """Options of `run` and `submit`."""

    retries: int
    restartable: bool  # it may be started again from the beginning on another node


class LeaseOptions(ResourceOptions, total=False):
    """Options of `borrow`."""

    duration: Span | None  # it ends by itself after this time; an hour by default


class JobRequest(NamedTuple):
    """A submission: its fields, and the working directory that travels with it."""

    fields: dict[str, Any]
    workdir: str | None = None
    here: str | None = None  # the directory in which the command was typed
    isolated: bool = False
    ship: Sequence[str] = ()
    check: bool = False
    lease_node: str = ""  # of a command that runs in a lease: there is no other node for it

    @property
    def uid(self) -> str:
        """The uid that the job will have."""
        uid: str = self.fields["request_id"]
        return uid

    def upload(self, state_dir: StateDir, welcome: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[str]]:
        """Upload the working directory if the job may run on another machine; all fields, and notes for the user."""
        require = (self.lease_node,) if self.lease_node else self.fields.get("require", ())
        upload = upload_workdir(
            self.workdir,
            state_dir,
            nodes=welcome.get("nodes", ()),
            far=welcome.get("far_nodes", ()),
            require=require,
            isolated=self.isolated,
            here=self.here,
            ship=self.ship,
        )
        fields = {**self.fields, "workdir": upload.workdir}
        if "require" in fields:
            fields["require"] = list(upload.require)
        return fields, upload.notes


def job_request(command: Command, options: JobOptions, *, wait_seconds: float | None) -> JobRequest:
    """The request of `run` or `submit`, which waits for resources by default as long as `wait_seconds`."""
    check_names(options, JobOptions, "option")
    wait = options.get("wait")
    fields = {
        **_resource_fields(options),
        "wait_seconds": wait_seconds if wait is None else parse_seconds(wait, "the wait for resources"),
        "retries": options.get("retries", 0),
        "restartable": options.get("restartable", False),
    }
    return command_request(command, options, fields)


def lease_fields(options: LeaseOptions) -> dict[str, Any]:
    """The fields of `borrow`."""
    check_names(options, LeaseOptions, "option")
    wait, duration = options.get("wait"), options.get("duration")
    return {
        "request_id": os.urandom(16).hex(),
        **_resource_fields(options, resource_type="cpu", amount=1.0),
        "wait_seconds": WAIT_SECONDS if wait is None else parse_seconds(wait, "the wait for resources"),
        "duration_seconds": LEASE_SECONDS if duration is None else positive_seconds(duration, "a duration"),
    }


def command_request(
    command: Command, options: CommandOptions | JobOptions, fields: Mapping[str, Any], lease_node: str = ""
) -> JobRequest:
    """The request of a command with these further fields."""
    shell, env, workdir = options.get("shell", False), options.get("env") or {}, options.get("workdir")
    given: Mapping[Any, Any] = env
    for name, value in given.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise BadInput(f"env maps names to texts, not {name!r} to {value!r}")
    isolated, ship = options.get("isolated", False), _patterns(options.get("ship", ()))
    directory = None if workdir is None else os.fspath(workdir)
    fetch = _patterns(options.get("fetch", ()))
    works_in = ""
    if directory not in (None, NONE):
        works_in = os.path.abspath(directory or "")
    elif fetch or not isolated:
        works_in = current_directory()
    submitted = {
        **fields,
        **command_fields(
            argv_of(command, shell=shell),
            env,
            job_id=options.get("job_id", ""),
            directory=works_in,
            isolated=isolated,
            ship=ship,
            fetch=fetch,
            overwrite=options.get("overwrite", False),
        ),
        "timeout_seconds": parse_seconds(options.get("timeout") or 0.0, "a timeout"),
        "grace_seconds": parse_seconds(options.get("grace", GRACE_SECONDS), "a grace time"),
        "merge": options.get("merge", False),
    }
    return JobRequest(
        submitted,
        directory,
        works_in or None,
        isolated=isolated,
        ship=ship,
        check=options.get("check", False),
        lease_node=lease_node,
    )


def command_fields(
    argv: Sequence[str],
    variables: Mapping[str, str],
    *,
    job_id: str,
    directory: str,
    isolated: bool,
    ship: Sequence[str] = (),
    fetch: Sequence[str] = (),
    fetch_to: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """The fields of a submission about its command, with a new request id; `directory` is where it was typed."""
    require_utf8(job_id, directory)
    check_ship(ship)
    env = caller_environment(dict(variables))
    check_command(argv, env, variables)
    return {
        "request_id": os.urandom(16).hex(),
        "argv": list(argv),
        "job_id": job_id,
        "env": env,
        "given": list(variables),
        "cwd": "" if isolated else directory,
        **fetch_fields(fetch, directory if fetch_to is None else fetch_to, overwrite=overwrite),
    }


def fetch_fields(patterns: Sequence[str], directory: str, *, overwrite: bool) -> dict[str, Any]:
    """The fields of a submission about the files that come back into a directory when the job has ended."""
    if not patterns:
        return {}
    from distributed_grid.trees.file_return import current_umask  # most jobs fetch nothing

    return {"fetch": list(patterns), "fetch_to": directory, "overwrite": overwrite, "umask": current_umask()}


def argv_of(command: Command | Any, *, shell: bool) -> list[str]:
    """The words of a command; one string is split as a shell would, or with `shell` is left to `sh -c`."""
    if isinstance(command, str):
        if shell:
            return ["/bin/sh", "-c", command]
        import shlex  # the command line has words

        try:
            words = shlex.split(command)
        except ValueError as error:
            raise BadInput(f"the command cannot be split into words ({error}): give a list, or shell=True") from None
    elif shell:
        raise BadInput("with shell=True the command is one string")
    elif isinstance(command, Sequence) and not isinstance(command, bytes | bytearray):
        words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in command]
    else:
        raise BadInput(f"a command is a list of words, or one string, not {type(command).__name__}")
    if not words:
        raise BadInput("the command is empty")
    return words


def current_directory() -> str:
    """The current directory, as the working directory of a job."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        raise BadInput("the current directory does not exist any more; use --isolated") from None
    require_utf8(directory)
    return directory


def _resources(options: ResourceOptions) -> tuple[dict[str, Any], dict[str, float]]:
    """The fields of the main resource of a request, none where nothing is said of the cores, and the others."""
    mem = options.get("mem")
    named = {
        "cpu": options.get("cpus"),
        "memory": None if mem is None else parse_size(mem, "mem") / GIB,
        "gpu": options.get("gpus"),
    }
    stated = {kind: finite_amount(amount) for kind, amount in named.items() if amount is not None}
    others = {resource_name(kind): finite_amount(amount) for kind, amount in options.get("also", {}).items()}
    if twice := sorted(stated.keys() & others.keys()):
        raise BadInput(f"a resource is asked for twice: {', '.join(twice)}")
    amounts = {**stated, **others}
    if "cpu" not in amounts:
        return {}, amounts
    if not amounts["cpu"]:
        del amounts["cpu"]
        if not amounts:
            raise BadInput("a request needs an amount of something: cpus, mem or gpus")
    kind = next(iter(amounts))
    return {"resource_type": kind, "amount": amounts.pop(kind)}, amounts


def _resource_fields(options: ResourceOptions, **default: Any) -> dict[str, Any]:
    """The fields of a request about its resources and its place."""
    main, others = _resources(options)
    placing: Any = {name: value for name, value in options.items() if name in PlacementArguments.__optional_keys__}
    placing["also"] = others
    node, priority = options.get("node") or (), options.get("priority", "medium")
    return {
        **placement_fields(placing, [node] if isinstance(node, str) else node),
        **(main or default),
        "priority": priority if isinstance(priority, str) else priority.name.lower(),
        "target": options.get("target_node", ""),
    }


def _patterns(patterns: Sequence[str]) -> list[str]:
    """Patterns of files; one string stands for itself."""
    return [patterns] if isinstance(patterns, str) else [str(pattern) for pattern in patterns]
