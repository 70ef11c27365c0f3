"""Candidates of a replay: strategies by name, and cluster files.

Config and agent are loaded for a cluster file alone: without one, a mistake in the command line is told at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.client.conversation import named_config
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import NOTHING, Capacity
from distributed_grid.domain.scheduling_policy import SchedulingPolicy, Strategy
from distributed_grid.errors import BadInput
from distributed_grid.replay.traces import LoggedJob, Trace

if TYPE_CHECKING:
    from distributed_grid.config import NodeConfig

Machine = Callable[[], Capacity]
"""What this machine has, for nodes whose config says `host: local` and not what they have."""


class Candidate(Struct, frozen=True):
    """A policy with the nodes it would have; a named strategy is used for requests that asked for another, too."""

    name: str
    nodes: tuple[Node, ...]
    policy: SchedulingPolicy
    strategy: Strategy | None = None

    def work(self, work: tuple[LoggedJob, ...]) -> list[LoggedJob]:
        """The work as requested under this policy; names of missing nodes are dropped."""
        names = {node.name for node in self.nodes}
        return [replace(job, request=replace(job.request, **self._changes(job, names))) for job in work]

    def _changes(self, one: LoggedJob, names: set[str]) -> dict[str, object]:
        request = one.request
        required = tuple(name for name in request.require if name in names)
        strategy = request.strategy if self.strategy is None else self.strategy
        if strategy is Strategy.NODE_SPECIFIC and not required:
            strategy = None
        prefer = tuple(name for name in request.prefer if name in names)
        target = request.target if request.target in names else ""
        return {"prefer": prefer, "require": required, "strategy": strategy, "target": target}


def candidates(trace: Trace, config: str | None, compare: tuple[str, ...], machine: Machine) -> list[Candidate]:
    """The candidates: each word of `compare`, or else the config (or the trace's own nodes)."""
    base = _from_config(config, machine) if config else Candidate("as it is", trace.nodes, SchedulingPolicy())
    if not compare:
        return [_with_nodes(base, trace)]
    found = [_candidate(word, base, machine) for word in compare]
    return [_with_nodes(one, trace) for one in found]


def _candidate(word: str, base: Candidate, machine: Machine) -> Candidate:
    if word.endswith((".yaml", ".yml", ".json")) or Path(word).is_file():
        return _from_config(word, machine)
    strategy = Strategy.parse(word)
    if strategy is Strategy.NODE_SPECIFIC:
        raise BadInput("node_specific says nothing about work that names no node: compare others")
    return Candidate(str(strategy), base.nodes, replace(base.policy, strategy=strategy), strategy)


def _with_nodes(candidate: Candidate, trace: Trace) -> Candidate:
    if not candidate.nodes:
        raise BadInput(f"{trace.name} does not say which nodes there were: name some with --config")
    return candidate


def _from_config(path: str, machine: Machine) -> Candidate:
    config = named_config(path)
    from distributed_grid.config_mapping import nodes_from, scheduling_policy

    found = nodes_from(config, NOTHING)
    named = {node.name: node for node in config.nodes}
    nodes = tuple(replace(node, capacity=_capacity(path, named[node.name], machine)) for node in found)
    return Candidate(Path(path).name, nodes, scheduling_policy(config))


def _capacity(path: str, node: NodeConfig, machine: Machine) -> Capacity:
    """Declared capacity of a node; this machine's own for a local node without a declaration."""
    from distributed_grid.config_mapping import effective_capacity

    trusted = replace(node, trust_declared=True)
    declared = effective_capacity(trusted, machine() if node.is_local and node.cpu_milli is None else NOTHING)
    if not declared.cpu_milli and not declared.gpus:
        raise BadInput(f"{path}: {node.name} does not say what it has: add cpu_count and memory_gb to simulate it")
    return declared
