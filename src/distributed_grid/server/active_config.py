"""Config of the cluster: the choice of the config in use, its trust, and its nodes and policies in the ledger.

A file that a user has named (`--config`, `$GRID_CONFIG`, or from Python) is used as it is; its path and digest are
remembered. A file that was only found is used if nobody but its user could have written it, and without the keys that
act (`Section.without_acts`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.agent.files import job_dir
from distributed_grid.agent.limits import process_tree
from distributed_grid.client.conversation import digest_of
from distributed_grid.client.daemon_start import LAST_CONFIG
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.config.cluster_config import KeyDifference, differences, meaning_digest
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
from distributed_grid.errors import BadInput, Refused
from distributed_grid.ports import LiveRow, Store
from distributed_grid.posix.private_files import distrust_of, write_private
from distributed_grid.server.workers.provider_registry import CredentialMask
from distributed_grid.state_dir import NO_CONFIG, StateDir
from distributed_grid.wire import OwnerRules

MAX_NAMED = 100  # remembered files, the last ones
NOTE_FILE = "config.json"
log = logging.getLogger(__name__)


class SelectedConfig(NamedTuple):
    """A loaded config and its origin."""

    config: ClusterConfig
    path: str | None = None
    digest: str | None = None
    """Digest of the file's bytes."""
    inert: tuple[str, ...] = ()
    """Keys that act only once the user has named the file."""
    problem: str = ""
    """Reason why the file cannot be used at present; the config is then the one that was used last."""
    passed_over: str | None = None
    """The file that was found and is not used, because leases or jobs of another config are alive."""

    @property
    def is_whole(self) -> bool:
        """True if the file can be used, with all of its keys."""
        return not self.inert and not self.problem

    def notes(self) -> list[str]:
        """Notes for the user about the use of this config."""
        notes = [problem_note(self.problem)] if self.problem else []
        if self.passed_over is not None:
            used = self.path or "this machine alone"
            notes.append(
                f"{self.passed_over} is not used while jobs or leases of {used} are alive; "
                f"to use it: grid --config {self.passed_over} daemon start"
            )
        if self.inert:
            verb, command = "acts" if len(self.inert) == 1 else "act", f"grid --config {self.path} daemon start"
            notes.append(f"{', '.join(self.inert)} in {self.path} {verb} only once you have named that file: {command}")
        return notes


def select_config(path: str | None, explicit: bool, store: Store, state_dir: StateDir) -> SelectedConfig:
    """The config named by the user; else the one of living leases and jobs; else the one that was found.

    Automatic leases keep no config. While leases or jobs live, an unusable file of theirs is replaced by the copy that
    was used last: so they can be seen and ended.
    """
    path = None if path == NO_CONFIG else path
    is_busy = any(_keeps_config(row) for row in store.load().live)
    if not explicit and is_busy:
        last = SelectionNote.read(state_dir).config
        if path is not None and last != path:
            log.info("leases or jobs are alive: using the previous config, %s", last)
            return _select(last, explicit, is_busy, state_dir)._replace(passed_over=path)
        path = last
    return _select(path, explicit, is_busy, state_dir)


def _select(path: str | None, explicit: bool, is_busy: bool, state_dir: StateDir) -> SelectedConfig:
    if path is None:
        return SelectedConfig(embedded_config())
    problem = ""
    try:
        content = read_content(path)
        config = ClusterConfig.from_content(path, content)
    except BadInput as failure:
        if not is_busy or path != SelectionNote.read(state_dir).config:
            raise
        try:
            content, problem = (state_dir.host_dir / LAST_CONFIG).read_bytes(), first_line(failure)
        except OSError:
            raise failure from None
        config = ClusterConfig.from_content(path, content)
        log.warning("%s; using the copy of the config that was used last", problem)
    digest, meaning = digest_of(content), meaning_digest(config)
    named = NamedConfigs(state_dir)
    if explicit and not problem:
        named.add(path, digest, meaning)
    if named.has(path, digest, meaning):
        _save_content(state_dir, config, content)
        return SelectedConfig(config, path, digest, problem=problem)
    reason = None if problem else distrust_of(path)
    if reason is not None:
        raise Refused(f"{path} is not used, because {reason}; to use it all the same: grid --config {path} …")
    _save_content(state_dir, config, content)
    config, inert = config.without_acts()
    return SelectedConfig(config, path, digest, tuple(inert), problem)


def problem_note(problem: str) -> str:
    """Note about a named config that cannot be used."""
    return f"{problem}; the control plane goes on with the config it has read before"


def embedded_config() -> ClusterConfig:
    return ClusterConfig.embedded(socket.gethostname())


def first_line(failure: BadInput) -> str:
    """The first problem of a config, and the number of the others."""
    first, *others = str(failure).splitlines() or [""]
    return f"{first} (and {len(others)} more)" if others else first


class ConfigComparison(NamedTuple):
    """A config that a command has named, compared with the one in use."""

    path: str
    config: ClusterConfig | None
    """None: it cannot be used."""
    digest: str = ""
    problem: str = ""
    keys: tuple[KeyDifference, ...] = ()
    inert: frozenset[str] = frozenset()
    """Keys that differ only because the file in use was found, not named."""

    @property
    def shown_path(self) -> str:
        return f"--config {NO_CONFIG}" if self.path == NO_CONFIG else self.path

    @property
    def live(self) -> list[str]:
        """The keys that differ and can be applied to a running control plane."""
        return [key for key, live in self.keys if live]

    @property
    def fixed(self) -> list[str]:
        """The keys that differ and take effect with a new control plane."""
        return [key for key, live in self.keys if not live]

    @property
    def blocking(self) -> list[str]:
        """Fixed keys that contradict the config in use."""
        return [key for key in self.fixed if key not in self.inert]


def compare_config(selected: SelectedConfig, path: str, variables: Mapping[str, str]) -> ConfigComparison:
    """A named config compared with the one in use, by meaning.

    A variable that the caller does not have keeps the value with which the control plane was started.
    """
    if path == NO_CONFIG:
        config = embedded_config()
        return ConfigComparison(path, config, keys=tuple(differences(selected.config, config)))
    try:
        content = read_content(path)
        digest = digest_of(content)
        is_known = selected.is_whole and (path, digest) == (selected.path, selected.digest)
        if is_known and all(os.environ.get(name) == value for name, value in variables.items()):
            return ConfigComparison(path, selected.config, digest)
        config = ClusterConfig.from_content(path, content, {**os.environ, **variables})
    except BadInput as failure:
        return ConfigComparison(path, None, problem=first_line(failure))
    keys = tuple(differences(selected.config, config))
    inert: set[str] = set()
    if selected.inert:
        inert = {key for key, _ in keys} - {key for key, _ in differences(selected.config, config.without_acts()[0])}
    return ConfigComparison(path, config, digest, keys=keys, inert=frozenset(inert))


def _keeps_config(row: LiveRow) -> bool:
    if row.kind != "lease" or row.blob is None:
        return row.kind == "job"
    lease = decode_row(row.kind, row.blob)
    return isinstance(lease, Lease) and not is_automatic(lease.request)


class NamedConfigs:
    """The config files that the user has named, each with the digests of its bytes and of their meaning then (0600)."""

    def __init__(self, state_dir: StateDir) -> None:
        self._file = state_dir.host_dir / "named_configs.json"

    def has(self, path: str, digest: str, meaning: str) -> bool:
        """True if the user has named this file, and neither its bytes nor their meaning have changed since."""
        known = self._read().get(path, "").split()
        return digest in known or meaning in known

    def add(self, path: str, digest: str, meaning: str) -> None:
        """Remember a named file, if that can be written."""
        known, value = self._read(), f"{digest} {meaning}"
        if known.pop(path, None) == value:
            return
        kept = dict([*known.items(), (path, value)][-MAX_NAMED:])
        with contextlib.suppress(OSError):
            write_private(self._file, json.dumps(kept).encode())

    def _read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            return {}


class SelectionNote(Struct):
    """Note for the successor of a daemon that crashes."""

    config: str | None = None
    stay: bool = False  # keep running when idle, until somebody stops the daemon

    @classmethod
    def read(cls, state_dir: StateDir) -> SelectionNote:
        try:
            return msgspec.json.decode((state_dir.host_dir / NOTE_FILE).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return cls()


def save_selection(selected: SelectedConfig, state_dir: StateDir, *, stay: bool) -> None:
    note = state_dir.host_dir / NOTE_FILE
    fresh = note.with_suffix(".new")  # whole or not at all: a full disk must not empty the note
    with contextlib.suppress(OSError):
        fresh.write_bytes(msgspec.json.encode(SelectionNote(selected.path, stay)))
        fresh.replace(note)


def _save_content(state_dir: StateDir, config: ClusterConfig, content: bytes) -> None:
    """Keep a copy of the config in use for the case that its file cannot be used later; none if it has credentials
    written into it."""
    copy, text = state_dir.host_dir / LAST_CONFIG, content.decode(errors="replace")
    with contextlib.suppress(OSError):
        if CredentialMask.of_providers(config).text(text) == text:
            write_private(copy, content)
        else:
            copy.unlink(missing_ok=True)


def save_content(state_dir: StateDir, path: str, digest: str) -> None:
    """Keep a copy of a config that was adopted without a restart, if its file still has these bytes."""
    with contextlib.suppress(BadInput):
        content = read_content(path)
        if digest_of(content) == digest:
            _save_content(state_dir, ClusterConfig.from_content(path, content), content)


class ConfigRegistry(NodeRegistry):
    """Facts about nodes from the config, for agents that connect."""

    def __init__(
        self, config: ClusterConfig, jobs: Path, *, is_worker: Callable[[str], bool] = lambda name: False
    ) -> None:
        """`is_worker` is true for a machine that a provider started for the grid: it has no owner."""
        self._is_worker = is_worker
        self._jobs = jobs
        self.set_config(config)
        self.max_connections_per_peer = config.server.max_connections_per_peer

    def set_config(self, config: ClusterConfig) -> None:
        self._config = config
        self._nodes = {node.name: node for node in config.nodes}
        self.max_output_bytes, self.max_files_bytes = config.max_output_bytes, config.max_files_bytes

    def described(self, node: Node, capacity: Capacity) -> Node:
        """The node with its detected capacity, or with the declared one if the declaration is trusted."""
        named = self._nodes.get(node.name)
        return replace(node, capacity=capacity if named is None else effective_capacity(named, capacity))

    def owner_rules(self, name: str) -> OwnerRules | None:
        """Owner rules of a node; those of the cluster for a node that joined by itself."""
        named = self._nodes.get(name)
        return owner_rules(self._config, named or NodeConfig(name=name, host=name, dedicated=self._is_worker(name)))

    def newcomer(self, name: str) -> Node | None:
        """A node that joined with a token, with the settings for machines that the config does not name."""
        return joined_node(self._config, name, dedicated=self._is_worker(name))

    def is_running(self, attempt: Attempt) -> bool:
        """True if its process runs, identified by its start, or another one that belongs to the attempt."""
        process = process_tree.read_process(attempt.pid) if attempt.pid else None
        if process is not None and not process.dead and process.start == attempt.pid_start:
            return True
        work = str(self._jobs / attempt.lease_id / job_dir.WORK)
        return bool(process_tree.find_attempt_processes(attempt.lease_id, work, lambda proc, *, fresh=False: False))

    def memory_certificate(self, node: str) -> tuple[bytes, bytes]:
        """A certificate for this memory server alone; none if the config trusts the network."""
        if self._config.trusted_network:
            return b"", b""
        from distributed_grid.server.access.tls import make_certificate  # cryptography: only where it is used

        return make_certificate(f"grid memory {node}", ())


async def declare_nodes(grid: Grid, config: ClusterConfig, machine: Capacity) -> list[str]:
    """Declare the config's nodes and policies in the ledger; names of the nodes that keep their old limits because
    they have lent more.

    A node on another machine keeps the capacity that its agent reported there; one that was elsewhere, or simulated,
    until now has none until its agent reports it.
    """
    await grid.handle(PolicySet(scheduling_policy(config)))
    nodes = nodes_from(config, machine)
    known = await grid.read(lambda ledger, now: dict(ledger.nodes))
    for node in nodes:
        old = known.get(node.name)
        if node.host != "local" and old is not None and old.host == node.host:
            node = msgspec.structs.replace(node, capacity=old.capacity)
        await grid.handle(NodeDeclared(node))
    named = {node.name for node in nodes}
    for name, node in known.items():
        if name not in named and not node.joined:
            await grid.handle(NodeForgotten(name))
    caps = {node.name: node.caps for node in nodes}
    declared = await grid.read(lambda ledger, now: {name: node.caps for name, node in ledger.nodes.items()})
    return [name for name, wanted in caps.items() if name in declared and declared[name] != wanted]
