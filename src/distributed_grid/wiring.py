"""From config to values and adapters: the one place that chooses."""

from __future__ import annotations

import logging

from distributed_grid.adapters.probes.machine import MachineCapacity
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.config.sections import Thresholds as ConfiguredThresholds
from distributed_grid.domain.nodes import Caps, Node, Thresholds
from distributed_grid.domain.resources import NOTHING, Capacity, GpuDevice, counts

log = logging.getLogger(__name__)


def nodes_of(config: ClusterConfig, machine: MachineCapacity) -> list[Node]:
    """The nodes a config declares; what a local one has is detected unless its declaration is trusted."""
    return [_node(config, node, machine) for node in config.nodes]


def _node(config: ClusterConfig, node: NodeConfig, machine: MachineCapacity) -> Node:
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
        capacity=_capacity(node, machine),
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


def _capacity(node: NodeConfig, machine: MachineCapacity) -> Capacity:
    if not node.is_local:
        return NOTHING
    cpu, memory = 1000 * len(machine.cpu_cores), machine.memory_bytes
    for what, declared, detected in (("cores", node.cpu_milli, cpu), ("memory", node.memory_bytes, memory)):
        if declared is not None and declared != detected and not node.trust_declared:
            log.warning(
                "%s declares other %s than detected (%d, %d): detection wins", node.name, what, declared, detected
            )
    if node.trust_declared:
        cpu = node.cpu_milli if node.cpu_milli is not None else cpu
        memory = node.memory_bytes if node.memory_bytes is not None else memory
    return Capacity(cpu, memory, _gpus(node), counts(node.custom))


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
    )
