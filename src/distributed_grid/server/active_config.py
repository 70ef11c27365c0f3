"""Config of the cluster: which one the daemon uses, how far it is trusted, and its nodes and policies in the ledger.

A file that a user has named (`--config`, `$GRID_CONFIG`, or from Python) counts as it is; its path and digest are
remembered. A file that was only found counts if nobody but its user could have written it, and without the keys that
act (`Section.without_acts`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from distributed_grid.agent.files import job_dir
from distributed_grid.agent.limits import process_tree
from distributed_grid.client.conversation import digest_of
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.config.yaml_document import read_content
from distributed_grid.config_mapping import effective_capacity, joined_node, nodes_from, owner_rules, scheduling_policy
from distributed_grid.control.agent_sessions import NodeRegistry
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import NodeDeclared, NodeForgotten, PolicySet
from distributed_grid.domain.jobs import Attempt
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.rows import decode_row
from distributed_grid.errors import Refused
from distributed_grid.ports import LiveRow, Store
from distributed_grid.posix.private_files import distrust_of, write_private
from distributed_grid.state_dir import StateDir
from distributed_grid.wire import OwnerRules

MAX_NAMED = 100
"""So many named files are remembered, the last ones."""
log = logging.getLogger(__name__)


class SelectedConfig(NamedTuple):
    """A loaded config and where it came from; `inert` are the keys in it that act only once the file is named."""

    config: ClusterConfig
    path: str | None = None
    digest: str | None = None
    inert: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """What the user should know about how this config is used."""
        if not self.inert:
            return []
        verb, command = "acts" if len(self.inert) == 1 else "act", f"grid --config {self.path} daemon start"
        return [f"{', '.join(self.inert)} in {self.path} {verb} only once you have named that file: {command}"]


def select_config(path: str | None, explicit: bool, store: Store, state_dir: StateDir) -> SelectedConfig:
    """The config named by the user; else the one that living leases and jobs were made under; else the one found.

    What the grid borrowed by itself is nobody's: it keeps no config.
    """
    if not explicit and any(_keeps_config(row) for row in store.load().live):
        last = _last_path(state_dir)
        if last != path:
            log.info("leases or jobs are alive: using the previous config, %s", last)
        path = last
    if path is None:
        return SelectedConfig(ClusterConfig.embedded(socket.gethostname()))
    content = read_content(path)
    config, digest = ClusterConfig.from_content(path, content), digest_of(content)
    named = NamedConfigs(state_dir)
    if explicit:
        named.add(path, digest)
    if named.has(path, digest):
        return SelectedConfig(config, path, digest)
    reason = distrust_of(path)
    if reason is not None:
        raise Refused(f"{path} is not used, because {reason}; to use it all the same: grid --config {path} …")
    config, inert = config.without_acts()
    return SelectedConfig(config, path, digest, tuple(inert))


def _keeps_config(row: LiveRow) -> bool:
    if row.kind != "lease" or row.blob is None:
        return row.kind == "job"
    lease = decode_row(row.kind, row.blob)
    return isinstance(lease, Lease) and not is_automatic(lease.request)


class NamedConfigs:
    """The config files that the user has named, each with the digest of what was in it then (0600)."""

    def __init__(self, state_dir: StateDir) -> None:
        self._file = state_dir.host_dir / "named_configs.json"

    def has(self, path: str, digest: str) -> bool:
        """Whether the user has named this file, and it has not changed since."""
        return self._read().get(path) == digest

    def add(self, path: str, digest: str) -> None:
        """Remember a file that was named; what cannot be written is not remembered."""
        known = self._read()
        if known.pop(path, None) == digest:
            return
        kept = dict([*known.items(), (path, digest)][-MAX_NAMED:])
        with contextlib.suppress(OSError):
            write_private(self._file, json.dumps(kept).encode())

    def _read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            return {}


def save_selection(selected: SelectedConfig, state_dir: StateDir, *, stay: bool) -> None:
    """Record the config, and whether to keep running, for the successor of a daemon that crashes."""
    fresh = _note_path(state_dir).with_suffix(".new")  # whole or not at all: a full disk must not empty the note
    with contextlib.suppress(OSError):
        fresh.write_text(json.dumps({"config": selected.path, "stay": stay}))
        fresh.replace(_note_path(state_dir))


def should_keep_running(state_dir: StateDir) -> bool:
    """Whether the last daemon was to keep running, and nobody has stopped it since."""
    return bool(_read_note(state_dir).get("stay"))


def _last_path(state_dir: StateDir) -> str | None:
    found = _read_note(state_dir).get("config")
    return str(found) if found else None


def _read_note(state_dir: StateDir) -> dict[str, Any]:
    try:
        found = json.loads(_note_path(state_dir).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note_path(state_dir: StateDir) -> Path:
    return state_dir.host_dir / "config.json"


class ConfigRegistry(NodeRegistry):
    """What the config says about nodes, for agents that connect."""

    def __init__(
        self, config: ClusterConfig, jobs: Path, *, is_worker: Callable[[str], bool] = lambda name: False
    ) -> None:
        """`is_worker`: whether a node is a machine that a provider started for the grid, which has no owner."""
        self._is_worker = is_worker
        self._config = config
        self._jobs = jobs
        self._nodes = {node.name: node for node in config.nodes}
        self.max_connections_per_peer = config.server.max_connections_per_peer

    def described(self, node: Node, capacity: Capacity) -> Node:
        """The node with what its agent detected; where the declaration is trusted, with that."""
        named = self._nodes.get(node.name)
        return replace(node, capacity=capacity if named is None else effective_capacity(named, capacity))

    def owner_rules(self, name: str) -> OwnerRules | None:
        """How a node gives way to its owner; a node that joined by itself goes by the cluster's rules."""
        named = self._nodes.get(name)
        return owner_rules(self._config, named or NodeConfig(name=name, host=name, dedicated=self._is_worker(name)))

    def newcomer(self, name: str) -> Node | None:
        """A node that joined with a token, as the cluster treats machines it does not name."""
        return joined_node(self._config, name, dedicated=self._is_worker(name))

    def is_running(self, attempt: Attempt) -> bool:
        """Whether its process is there, by its start too, or one that says it belongs to it."""
        found = process_tree.read_process(attempt.pid) if attempt.pid else None
        if found is not None and not found.dead and found.start == attempt.pid_start:
            return True
        work = str(self._jobs / attempt.lease_id / job_dir.WORK)
        return bool(process_tree.find_attempt_processes(attempt.lease_id, work, _is_nobody))

    def memory_certificate(self, node: str) -> tuple[bytes, bytes]:
        """A certificate made for this memory server alone; none where the config says that the network is trusted."""
        if self._config.trusted_network:
            return b"", b""
        from distributed_grid.server.access.certificates import make_certificate  # cryptography: only where it is used

        return make_certificate(f"grid memory {node}", ())


def _is_nobody(proc: process_tree.Proc, *, fresh: bool = False) -> bool:
    return False


async def declare_nodes(grid: Grid, config: ClusterConfig, machine: Capacity) -> None:
    """Declare the config's nodes and policies in the ledger; remote nodes keep the capacity their agents reported."""
    await grid.handle(PolicySet(scheduling_policy(config)))
    nodes = nodes_from(config, machine)
    known = await grid.read(lambda ledger, now: dict(ledger.nodes))
    for node in nodes:
        old = known.get(node.name)
        if node.host != "local" and old is not None:
            node = msgspec.structs.replace(node, capacity=old.capacity)
        await grid.handle(NodeDeclared(node))
    named = {node.name for node in nodes}
    for name, node in known.items():
        if name not in named and not node.joined:
            await grid.handle(NodeForgotten(name))
