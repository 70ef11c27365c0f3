"""Reports of the SSH and Ray children about nodes, and the failure of an operation on a node."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from distributed_grid.adapters.child_process import ChildAnswer, ChildCommand, FilePath, Name, Report, Seconds, Text
from distributed_grid.errors import GridError, Refused

MAX_DATA_BYTES = 1024 * 1024
log = logging.getLogger(__name__)


class NodeOperationFailed(GridError):
    """A node could not be reached, or an operation on it failed; `final`: trying again will not help by itself."""

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


class NodeTarget(Struct, frozen=True, kw_only=True):
    """A node with an agent of this grid, and the socket of this machine that the agent's connection leads to.

    The agent ends when it has been without a link for `linger` seconds and runs nothing; 0 is never.
    """

    name: Name
    grid: Name
    local_socket: FilePath
    linger: Seconds = 0.0


class NodeFacts(Struct, frozen=True):
    """Facts of a node, at the last inspection."""

    python: Name = ""
    machine: Name = ""
    libc: Name = ""
    libc_version: Name = ""
    executable: FilePath = ""
    version: Name = ""
    running: Name = ""


class DropAgentLink(ChildCommand, frozen=True):
    """Drop the link to a node; its agent stays. Dropping an unknown link is harmless."""

    node: Name


class AgentLinkChanged(Report, frozen=True):
    """How a link is: `connecting`, `up` or `down`, and why. `final`: trying again will not help by itself."""

    node: Name
    state: Name
    detail: Text = ""
    final: bool = False
    facts: NodeFacts | None = None


class RunFinished(ChildAnswer, frozen=True):
    """End of an operation on a node; `problem` is its failure, `summary` its result."""

    problem: Text = ""
    summary: Text = ""
    facts: NodeFacts | None = None
    data: Annotated[bytes, Meta(max_length=MAX_DATA_BYTES)] = b""

    @property
    def answer(self) -> dict[str, Any]:
        """The node's answer, from `pack_answer`."""
        try:
            return msgspec.msgpack.decode(self.data, type=dict[str, Any]) if self.data else {}
        except (msgspec.DecodeError, RecursionError) as broken:
            raise Refused(f"the answer of the node is damaged: {broken}") from None


def pack_answer(answer: dict[str, Any]) -> bytes:
    """The answer of a node, as `RunFinished` carries it."""
    packed = msgspec.msgpack.encode(answer)
    if len(packed) > MAX_DATA_BYTES:
        raise NodeOperationFailed(f"the node answered with {len(packed):,} bytes, {MAX_DATA_BYTES:,} are allowed")
    return packed


class LinkStates:
    """The last report on the link of each node that is kept, and the facts that came with one."""

    def __init__(self) -> None:
        self.links: dict[str, AgentLinkChanged] = {}
        self.facts: dict[str, NodeFacts] = {}

    def record(self, link: AgentLinkChanged) -> None:
        before = self.links.get(link.node)
        if before is None or (before.state, before.detail) != (link.state, link.detail):
            log.info("link to %s: %s %s", link.node, link.state, link.detail)
        self.links[link.node] = link
        if link.facts is not None:
            self.facts[link.node] = link.facts
