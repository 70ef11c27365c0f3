"""What happens to nodes: their agents, the Ray cluster they belong to, and giving everything back."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from distributed_grid.api.requests.message import Message, Name, Seconds, Text


class Cluster(Message, frozen=True):
    """Install, start, stop or look at the agents of nodes that are reached by SSH; no names are all of them.

    `auth_sock` and `environ` are the caller's: the agent with the keys, and how packages are fetched.
    """

    verb: Literal["install", "start", "stop", "status", "env"]
    nodes: tuple[Name, ...] = ()
    force: bool = False
    purge: bool = False
    ray: bool = False
    auth_sock: Text = ""
    environ: dict[Name, Text] = field(default_factory=dict)


class Attach(Message, frozen=True):
    """Use a Ray cluster that already runs: an agent on each of its nodes, and leases as its placement groups.

    `token` is the cluster's, `environ` says how packages are fetched; both are the caller's.
    """

    address: Annotated[str, Meta(min_length=1, max_length=300)]
    token: Text = ""
    environ: dict[Name, Text] = field(default_factory=dict)


class Detach(Message, frozen=True):
    """Leave the Ray cluster, and nothing in it or on its nodes; with `force` also one that is not there any more."""

    force: bool = False


class Cooldown(Message, frozen=True):
    """A node gives everything back to its owner and lends nothing until somebody says `off`."""

    node: Name
    off: bool = False
    wait_seconds: Seconds = 300.0
