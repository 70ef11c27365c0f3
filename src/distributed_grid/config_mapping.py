"""Domain values from a cluster config: nodes, capacities, scheduling policy, owner rules, rebalance rules."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from distributed_grid.agent.owner.usage_meter import OwnerBackground, SimulatedNode
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.config.providers import SlurmSettings
from distributed_grid.config.sections import Background
from distributed_grid.config.sections import ThresholdConfig as ConfiguredThresholds
from distributed_grid.domain.jobs import MAX_RUN_MS
from distributed_grid.domain.moves import OffloadRules
from distributed_grid.domain.nodes import Caps, Node, OfferThresholds
from distributed_grid.domain.rebalancing import SHARING_POLICIES, RebalanceRules, SharingMode, Watermarks
from distributed_grid.domain.resources import NOTHING, Capacity, GpuDevice, normalized_custom
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.domain.workers import ScalingRules, WorkerRules
from distributed_grid.prediction.task_runs import TierSettings
from distributed_grid.wire import OwnerRules

DEFAULT_EXCESS = 0.2
"""What a node keeps free of automatic leases by default."""
log = logging.getLogger(__name__)


def nodes_from(config: ClusterConfig, machine: Capacity) -> list[Node]:
    """The nodes of a config; the capacity of a local one is detected unless its declaration is trusted.

    The machine's own GPUs belong to its one node; where several share the machine, only declared ones count.
    """
    if sum(node.is_local for node in config.nodes) > 1:
        machine = replace(machine, gpus=())
    return [_node(config, node, machine) for node in config.nodes]


def joined_node(config: ClusterConfig, name: str, *, dedicated: bool = False) -> Node:
    """A node that no config names, as other machines are treated by default; a dedicated one has no owner."""
    named = NodeConfig(name=name, host=name, dedicated=dedicated)
    return replace(_node(config, named, None), host="joined", joined=True, wanted=True)


def simulated_nodes(config: ClusterConfig, nodes: Iterable[Node]) -> dict[str, SimulatedNode]:
    """The simulated ones of these nodes; one that the config does not name any more has no background."""
    named = {node.name: _background(node.background) for node in config.nodes}
    simulated = (node for node in nodes if node.simulated)
    return {node.name: SimulatedNode(node.capacity, named.get(node.name, OwnerBackground())) for node in simulated}


def _background(owner: Background) -> OwnerBackground:
    return OwnerBackground(_milli(owner.cpu_used), _milli(owner.memory_used), _milli(owner.gpu_used))


def tier_settings(config: ClusterConfig) -> TierSettings:
    """When a tier of the predictor may predict."""
    given = config.prediction
    return TierSettings(given.confidence_threshold, given.min_samples_for_ml, given.min_samples_for_stats)


def owner_rules(config: ClusterConfig, node: NodeConfig) -> OwnerRules | None:
    """How a node gives way to its owner; None where it does not.

    A node with a policy of its own and no thresholds goes by the cluster's; a simulated one has no owner to watch.
    """
    policy = config.owner_policy_for(node)
    limits = _thresholds(config.thresholds_for(node) or config.thresholds)
    if policy is None or limits is None or config.is_simulated(node):
        return None
    return OwnerRules(
        cpu_busy_max_milli=limits.cpu_busy_max_milli,
        memory_used_max_milli=limits.memory_used_max_milli,
        memory_min_bytes=limits.memory_min_bytes,
        gpu_busy_max_milli=limits.gpu_busy_max_milli,
        gpu_memory_min_bytes=limits.gpu_memory_min_bytes,
        throttle=policy.throttle,
        pause=policy.pause,
        evict=policy.evict,
        notice_ms=round(1000 * policy.notice_seconds),
        grace_ms=round(1000 * policy.grace_seconds),
    )


def rebalance_rules(config: ClusterConfig) -> RebalanceRules | None:
    """How the grid is balanced; None where nothing is shared at all."""
    sharing = config.resource_sharing
    if not sharing.enabled:
        return None
    marks = sharing.pressure
    return RebalanceRules(
        mode=SharingMode(sharing.mode),
        policy=SHARING_POLICIES[sharing.policy],
        interval_ms=round(1000 * sharing.rebalance_interval_seconds),
        memory=Watermarks(_milli(marks.memory_high), _milli(marks.memory_low)),
        cpu=Watermarks(_milli(marks.cpu_high), _milli(marks.cpu_low)),
        gpu=Watermarks(_milli(marks.gpu_high), _milli(marks.gpu_low)),
        excess_milli=_milli(DEFAULT_EXCESS if marks.excess is None else marks.excess),
    )


def offload_rules(config: ClusterConfig) -> OffloadRules:
    """When work leaves a node by itself."""
    auto = config.resource_sharing.auto_offload
    return OffloadRules(
        enabled=auto.enabled,
        cpu_high=_milli(auto.cpu_high),
        memory_high=_milli(auto.memory_high),
        gpu_high=_milli(auto.gpu_high),
        interval_ms=round(1000 * auto.check_interval_seconds),
        cooldown_ms=round(1000 * auto.cooldown_seconds),
    )


def scheduling_policy(config: ClusterConfig) -> SchedulingPolicy:
    """What holds for everybody: how places are chosen, who has how much right to them, and who must yield them."""
    fairness = config.fairness
    return SchedulingPolicy(
        strategy=config.resource_sharing.strategy,
        half_life_ms=round(1000 * fairness.half_life_seconds),
        weights=tuple(sorted((who, max(_milli(weight), 1)) for who, weight in fairness.weights.items())),
        quotas=tuple(
            Quota(
                name=name,
                members=quota.members,
                cpu_milli=quota.cpu_milli,
                memory_bytes=quota.memory_bytes,
                gpu_milli=quota.gpu_milli,
                custom=tuple(sorted(quota.custom.items())),
                leases=quota.job_count,
            )
            for name, quota in sorted(config.quotas.items())
        ),
        reserve_after_ms=round(1000 * fairness.patience_seconds),
        starvation_ms=round(1000 * fairness.starvation_seconds),
        minimum_run_ms=round(1000 * config.preemption.minimum_run_seconds),
        preemptions_max=config.preemption.max_per_job,
    )


def _milli(part: float) -> int:
    return round(1000 * part)


def _node(config: ClusterConfig, node: NodeConfig, machine: Capacity | None) -> Node:
    sharing, cluster = node.resource_sharing, config.resource_sharing
    caps = Caps(
        can_share=sharing.can_share,
        cpu_milli=sharing.max_share_cpu_milli,
        memory_bytes=sharing.max_share_memory_bytes,
        gpu_count=sharing.max_share_gpu_count,
        custom=normalized_custom(sharing.max_share_custom) if sharing.max_share_custom else None,
    )
    capacity = NOTHING
    if machine is not None and node.is_local:  # the declaration of a simulated one counts
        trusted = node.trust_declared or config.is_simulated(node)
        capacity = effective_capacity(replace(node, trust_declared=trusted), machine)
    return Node(
        name=node.name,
        capacity=capacity,
        caps=caps,
        thresholds=_thresholds(config.thresholds_for(node), cluster.pressure.excess or 0.0),
        rank=sharing.rank,
        labels=tuple(sorted(node.labels.items())),
        tags=node.tags,
        role=node.role,
        host=node.host,
        hold_ms=0 if node.is_local else round(1000 * config.hold_seconds),
        start_ms=min(round(1000 * config.start_seconds), MAX_RUN_MS),
        offer_ms=round(1000 * cluster.offer_expiry_seconds),
        refresh_ms=round(1000 * cluster.check_interval_seconds),
        speed_milli=node.speed_milli,
        cost_milli=node.cost_milli,
        simulated=config.is_simulated(node),
    )


def effective_capacity(node: NodeConfig, found: Capacity) -> Capacity:
    """Effective capacity of a node: the one found there, unless its declaration is trusted.

    GPUs that are declared and not found count only on trust, on other machines; custom resources are always declared.
    """
    cpu, memory, gpus = found.cpu_milli, found.memory_bytes, found.gpus
    declared_gpus = tuple(GpuDevice(index, gpu.memory_bytes, gpu.name or "") for index, gpu in enumerate(node.gpus))
    declared_gpus = declared_gpus or tuple(GpuDevice(index) for index in range(node.gpu_count or 0))
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
    return Capacity(cpu, memory, gpus, normalized_custom(node.custom))


def _thresholds(configured: ConfiguredThresholds | None, excess: float = 0.0) -> OfferThresholds | None:
    if configured is None:
        return None
    return OfferThresholds(
        cpu_busy_max_milli=round(1000 * configured.cpu_used_max),
        cpu_min_milli=configured.cpu_free_min_milli,
        memory_used_max_milli=round(1000 * configured.memory_used_max),
        memory_min_bytes=configured.memory_free_min_bytes,
        gpu_busy_max_milli=round(1000 * configured.gpu_used_max),
        gpu_memory_min_bytes=configured.gpu_memory_free_min_bytes,
        margin_milli=round(1000 * configured.margin),
        dwell_ms=round(1000 * configured.dwell_seconds),
        excess_milli=_milli(excess),
    )


def scaling_rules(config: ClusterConfig) -> ScalingRules:
    """When workers are started and given back; which ones there are is the provider's to say."""
    scaling = config.scaling
    return ScalingRules(
        provider=scaling.provider or "",
        min_workers=scaling.min_workers,
        max_workers=scaling.max_workers,
        target_milli=_milli(scaling.target_utilization),
        up_milli=_milli(scaling.scale_up_threshold),
        down_milli=_milli(scaling.scale_down_threshold),
        window_ms=round(1000 * scaling.evaluation_window_seconds),
        up_cooldown_ms=round(1000 * scaling.scale_up_cooldown_seconds),
        down_cooldown_ms=round(1000 * scaling.scale_down_cooldown_seconds),
    )


def worker_rules(config: ClusterConfig) -> WorkerRules:
    """The budgets and times of workers."""
    scaling, times = config.scaling, config.workers
    return WorkerRules(
        budget_per_hour_micro=_micro(scaling.budget_usd_per_hour),
        budget_per_day_micro=_micro(scaling.budget_usd_per_day),
        launch_ms=round(1000 * times.launch_seconds),
        join_ms=round(1000 * times.join_seconds),
        consistency_ms=round(1000 * times.consistency_seconds),
        call_ms=round(1000 * times.call_seconds),
        exit_ms=round(1000 * times.exit_seconds),
        core_hour_budgets=_core_hour_budgets(config),
    )


def _core_hour_budgets(config: ClusterConfig) -> dict[str, int]:
    """The core-hours that workers of a provider may use on a day, in thousandths, where the config limits them."""
    written = config.providers.get("slurm")
    if not isinstance(written, Mapping) or written.get("budget_core_hours") is None:
        return {}
    settings = config.provider("slurm")
    assert isinstance(settings, SlurmSettings)
    return {} if settings.budget_core_hours is None else {"slurm": round(1000 * settings.budget_core_hours)}


def _micro(usd: float | None) -> int | None:
    return None if usd is None else round(1_000_000 * usd)
