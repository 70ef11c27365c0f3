"""Candidates of a replay: strategies by name, and cluster files.

Config and agent are loaded for a cluster file alone: without one, an error in the command line is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.client.conversation import named_config
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import NOTHING, Capacity
from distributed_grid.domain.scheduling_policy import SchedulingPolicy, Strategy
from distributed_grid.errors import BadInput
from distributed_grid.replay.traces import LoggedJob, Trace

Machine = Callable[[], Capacity]
"""Capacity of this machine, for nodes with `host: local` and without a declared capacity."""


class Candidate(Struct, frozen=True):
    """A policy with the nodes it would have; a named strategy is used for requests that asked for another, too."""

    name: str
    nodes: tuple[Node, ...]
    policy: SchedulingPolicy
    strategy: Strategy | None = None

    def work(self, work: tuple[LoggedJob, ...]) -> list[LoggedJob]:
        """The work as requested under this policy; names of missing nodes are dropped."""
        names = {node.name for node in self.nodes}
        jobs: list[LoggedJob] = []
        for job in work:
            request = job.request
            required = tuple(name for name in request.require if name in names)
            strategy = request.strategy if self.strategy is None else self.strategy
            if strategy is Strategy.NODE_SPECIFIC and not required:
                strategy = None
            prefer = tuple(name for name in request.prefer if name in names)
            target = request.target if request.target in names else ""
            request = replace(request, prefer=prefer, require=required, strategy=strategy, target=target)
            jobs.append(replace(job, request=request))
        return jobs


def candidates(trace: Trace, config: str | None, compare: tuple[str, ...], machine: Machine) -> list[Candidate]:
    """The candidates: each word of `compare`, or else the config (or the trace's own nodes)."""
    base = _from_config(config, machine) if config else Candidate("as it is", trace.nodes, SchedulingPolicy())
    chosen = [] if compare else [base]
    for word in compare:
        if word.endswith((".yaml", ".yml", ".json")) or Path(word).is_file():
            chosen.append(_from_config(word, machine))
            continue
        strategy = Strategy.parse(word)
        if strategy is Strategy.NODE_SPECIFIC:
            raise BadInput("node_specific says nothing about work that names no node: compare others")
        chosen.append(Candidate(str(strategy), base.nodes, replace(base.policy, strategy=strategy), strategy))
    if not all(candidate.nodes for candidate in chosen):
        raise BadInput(f"{trace.name} does not say which nodes there were: name some with --config")
    return chosen


def _from_config(path: str, machine: Machine) -> Candidate:
    """The policy and nodes of a cluster file; a local node without a declared capacity has that of this machine."""
    config = named_config(path)
    from distributed_grid.config_mapping import effective_capacity, nodes_from, scheduling_policy

    declared = {node.name: node for node in config.nodes}
    nodes: list[Node] = []
    for node in nodes_from(config, NOTHING):
        trusted = replace(declared[node.name], trust_declared=True)
        detected = machine() if trusted.is_local and trusted.cpu_milli is None else NOTHING
        capacity = effective_capacity(trusted, detected)
        if not capacity.cpu_milli and not capacity.gpus:
            raise BadInput(f"{path}: {node.name} does not say what it has: add cpu_count and memory_gb to simulate it")
        nodes.append(replace(node, capacity=capacity))
    return Candidate(Path(path).name, tuple(nodes), scheduling_policy(config))
