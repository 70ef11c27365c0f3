"""From config to values and adapters: the one place that chooses."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.config.sections import Thresholds as ConfiguredThresholds
from distributed_grid.domain.nodes import Caps, Node, Thresholds
from distributed_grid.domain.resources import NOTHING, Capacity, GpuDevice, counts
from distributed_grid.wire import OwnerRules

log = logging.getLogger(__name__)


def nodes_of(config: ClusterConfig, machine: Capacity) -> list[Node]:
    """The nodes a config declares; what a local one has is detected unless its declaration is trusted.

    The machine's own GPUs belong to its one node; where several share the machine, only declared ones count.
    """
    if sum(node.is_local for node in config.nodes) > 1:
        machine = replace(machine, gpus=())
    return [_node(config, node, machine) for node in config.nodes]


def newcomer(config: ClusterConfig, name: str) -> Node:
    """A node that no config names, as other machines are treated by default."""
    return replace(_node(config, NodeConfig(name=name, host=name), None), host="joined", joined=True, wanted=True)


def owner_rules(config: ClusterConfig, node: NodeConfig) -> OwnerRules | None:
    """How a node gives way to its owner; None where it does not."""
    policy, limits = config.owner_policy_for(node), _thresholds(config.thresholds_for(node))
    if policy is None or limits is None:
        return None
    return OwnerRules(
        limits.cpu_busy_max_milli,
        limits.memory_used_max_milli,
        limits.memory_min_bytes,
        limits.gpu_busy_max_milli,
        limits.gpu_memory_min_bytes,
        policy.throttle,
        policy.pause,
        policy.evict,
        round(1000 * policy.notice_seconds),
        round(1000 * policy.grace_seconds),
    )


def _node(config: ClusterConfig, node: NodeConfig, machine: Capacity | None) -> Node:
    sharing, cluster = node.resource_sharing, config.resource_sharing
    caps = Caps(
        can_share=sharing.can_share,
        cpu_milli=sharing.max_share_cpu_milli,
        memory_bytes=sharing.max_share_memory_bytes,
        gpu_count=sharing.max_share_gpu_count,
        custom=counts(sharing.max_share_custom) if sharing.max_share_custom else None,
    )
    return Node(
        node.name,
        capacity=NOTHING if machine is None or not node.is_local else capacity_of(node, machine),
        caps=caps,
        thresholds=_thresholds(config.thresholds_for(node)),
        rank=sharing.rank,
        labels=tuple(sorted(node.labels.items())),
        tags=node.tags,
        role=node.role,
        host=node.host,
        hold_ms=0 if node.is_local else round(1000 * config.hold_seconds),
        offer_ms=round(1000 * cluster.offer_expiry_seconds),
        refresh_ms=round(1000 * cluster.check_interval_seconds),
    )


def capacity_of(node: NodeConfig, found: Capacity) -> Capacity:
    """What counts as a node's capacity: what was found there, unless its declaration is trusted.

    GPUs that are declared and not found count only on trust, on other machines; custom resources are always declared.
    """
    cpu, memory, gpus = found.cpu_milli, found.memory_bytes, found.gpus
    declared_gpus = _gpus(node)
    for what, declared, detected in (
        ("millicores", node.cpu_milli, cpu),
        ("bytes of memory", node.memory_bytes, memory),
        ("GPUs", None if node.is_local else len(declared_gpus) or None, len(gpus)),
    ):
        if declared is not None and declared != detected and not node.trust_declared:
            log.warning("%s: %d %s declared, %d detected: detection wins", node.name, declared, what, detected)
    if node.trust_declared:
        cpu = node.cpu_milli if node.cpu_milli is not None else cpu
        memory = node.memory_bytes if node.memory_bytes is not None else memory
    if declared_gpus and (node.trust_declared or node.is_local):
        gpus = declared_gpus
    return Capacity(cpu, memory, gpus, counts(node.custom))


def _gpus(node: NodeConfig) -> tuple[GpuDevice, ...]:
    if node.gpus:
        return tuple(GpuDevice(index, gpu.memory_bytes, gpu.name or "") for index, gpu in enumerate(node.gpus))
    return tuple(GpuDevice(index) for index in range(node.gpu_count or 0))


def _thresholds(configured: ConfiguredThresholds | None) -> Thresholds | None:
    if configured is None:
        return None
    return Thresholds(
        cpu_busy_max_milli=round(1000 * configured.cpu_used_max),
        cpu_min_milli=configured.cpu_free_min_milli,
        memory_used_max_milli=round(1000 * configured.memory_used_max),
        memory_min_bytes=configured.memory_free_min_bytes,
        gpu_busy_max_milli=round(1000 * configured.gpu_used_max),
        gpu_memory_min_bytes=configured.gpu_memory_free_min_bytes,
        margin_milli=round(1000 * configured.margin),
        dwell_ms=round(1000 * configured.dwell_seconds),
    )
