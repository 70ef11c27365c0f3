"""Sections of a cluster file: every key with its spellings, the field it sets, in base units, and its default."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from distributed_grid.config.key_tables import ListOf, MapOf, Normal, Section, duration, flattened, setting
from distributed_grid.config.parse_context import KeyPath, ParseContext, ValueKind
from distributed_grid.config.value_kinds import (
    COMMAND,
    CORES,
    CUSTOM_NAME,
    DEVICES,
    FLAG,
    GIB,
    GIGABYTES,
    HOST,
    JUMPS,
    LOGIN,
    MIB,
    NAME_PATTERN,
    NODE_NAME,
    PATH,
    PERCENT,
    PORT,
    RATIO,
    SOME_CORES,
    SOME_GIGABYTES,
    TEXT,
    WEB_ADDRESS,
    Amount,
    Count,
    OneOf,
    PlainNumber,
    Seconds,
    Secret,
    Text,
)
from distributed_grid.config.yaml_document import YamlNode
from distributed_grid.domain import workers
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.prediction.task_runs import (
    DEFAULT_MIN_SAMPLES_FOR_ML,
    DEFAULT_MIN_SAMPLES_FOR_STATS,
    DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD,
    DEFAULT_PREDICTION_UPDATE_INTERVAL,
    LEAST_SAMPLES_FOR_ML,
    LEAST_SAMPLES_FOR_STATS,
)

Part = Annotated[float, Meta(ge=0, le=1)]
Duration = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Whole = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=1, le=65535)]

COUNTS = MapOf(CUSTOM_NAME, Count(), "resource names to counts, such as tpu: 2")
MONEY = PlainNumber("an amount of money")
PROVIDER_NAME = Text("the name of a provider, such as docker_local", re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII))
STEPS = ("throttle", "pause", "evict")


class ThresholdConfig(Section):
    """How idle a machine must be before it lends, and for how long."""

    cpu_used_max: Part = setting(PERCENT, 0.3, "cpu_percent_max")
    cpu_free_min_milli: Whole = setting(CORES, 1000, "cpu_min_cores")
    memory_used_max: Part = setting(PERCENT, 0.5, "memory_percent_max")
    memory_free_min_bytes: Whole = setting(GIGABYTES, 2 * GIB, "memory_min_gb")
    gpu_used_max: Part = setting(PERCENT, 0.2, "gpu_utilization_max")
    gpu_memory_free_min_bytes: Whole = setting(
        Amount(MIB, "an amount of memory in MB"), 1024 * MIB, "gpu_memory_min_mb"
    )
    margin: Part = setting(RATIO, 0.05)
    dwell_seconds: Duration = duration(1200.0, low=0)


class _OnlyStep(ValueKind, frozen=True):
    """The one-word owner policy: that step and no other."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Normal:
        word = OneOf(STEPS).read(node, path, context)
        return {step: step == word for step in STEPS}


class OwnerPolicy(Section):
    """Which steps are taken, gentle ones first, when a machine's owner needs it back."""

    shorthand: ClassVar = _OnlyStep()

    throttle: bool = setting(FLAG, True)
    pause: bool = setting(FLAG, True)
    evict: bool = setting(FLAG, True)
    notice_seconds: Duration = duration(5.0, low=0)
    grace_seconds: Duration = duration(10.0, low=0)


def _pressure_mark(default: float, resource: str, mark: str) -> Any:
    return setting(RATIO, default, f"thresholds.{resource}_pressure_{mark}", f"pressure_thresholds.{resource}.{mark}")


class PressureMarks(Section):
    """Above `high` a node gets more, below `low` it gives that back.

    A node lends only the part of its free share above `excess`; unset, that applies to automatic leases only.
    """

    cpu_high: Part = _pressure_mark(0.8, "cpu", "high")
    cpu_low: Part = _pressure_mark(0.3, "cpu", "low")
    memory_high: Part = _pressure_mark(0.8, "memory", "high")
    memory_low: Part = _pressure_mark(0.3, "memory", "low")
    gpu_high: Part = _pressure_mark(0.8, "gpu", "high")
    gpu_low: Part = _pressure_mark(0.3, "gpu", "low")
    excess: Part | None = setting(RATIO, None, "thresholds.excess_threshold", "pressure_thresholds.excess")


class AutoOffload(Section):
    """When work is moved away from a node without being asked."""

    enabled: bool = setting(FLAG, False)
    cpu_high: Part = setting(RATIO, 0.8, "cpu_threshold")
    memory_high: Part = setting(RATIO, 0.8, "memory_threshold")
    gpu_high: Part = setting(RATIO, 0.8, "gpu_threshold")
    check_interval_seconds: Duration = duration(60.0)
    cooldown_seconds: Duration = duration(300.0, low=0)


class ResourceSharing(Section):
    """How the cluster lends."""

    enabled: bool = setting(FLAG, True)
    mode: Literal["offload_only", "share_and_offload", "dynamic_balancing"] = setting(
        OneOf(("offload_only", "share_and_offload", "dynamic_balancing")), "dynamic_balancing", live=True
    )
    policy: Literal["conservative", "balanced", "aggressive", "predictive"] = setting(
        OneOf(("conservative", "balanced", "aggressive", "predictive")), "balanced"
    )
    strategy: Strategy = setting(
        OneOf(tuple(one for one in Strategy if one is not Strategy.NODE_SPECIFIC)), Strategy.LOAD_BALANCED, live=True
    )
    check_interval_seconds: Duration = duration(60.0, live=True)
    offer_expiry_seconds: Duration = duration(300.0, live=True)
    max_offers_per_node: Whole = setting(Count(1, 1000), 5, live=True)
    rebalance_interval_seconds: Duration = duration(30.0, live=True)
    monitoring_interval_seconds: Duration = duration(10.0)
    thresholds: ThresholdConfig = flattened(ThresholdConfig, "thresholds.", live=True)
    pressure: PressureMarks = flattened(PressureMarks, "", live=True)
    auto_offload: AutoOffload = flattened(AutoOffload, "auto_offload.", live=True)


class NodeSharing(Section):
    """The most one node lends; None is "all it has". The rank is its weight among nodes that are about equally good."""

    can_share: bool = setting(FLAG, True)
    max_share_cpu_milli: Whole | None = setting(CORES, None, "max_share_cpu")
    max_share_memory_bytes: Whole | None = setting(GIGABYTES, None, "max_share_memory_gb")
    max_share_gpu_count: Whole | None = setting(DEVICES, None, "max_share_gpu")
    max_share_custom: dict[str, Whole] = setting(COUNTS, {})
    rank: Whole = setting(Amount(1000), 1000, "priority")


class GpuConfig(Section):
    """One declared GPU."""

    name: str | None = setting(TEXT, None)
    memory_bytes: Whole = setting(GIGABYTES, 0, "memory_gb")


class Background(Section):
    """What the owner of a simulated node uses all the time, as parts of what the node has."""

    cpu_used: Part = setting(PERCENT, 0.0, "cpu")
    memory_used: Part = setting(PERCENT, 0.0, "memory")
    gpu_used: Part = setting(PERCENT, 0.0, "gpu")


class NodeConfig(Section):
    """One machine: how to reach it, what it is declared to have, what it lends at most."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)] = setting(NODE_NAME)
    host: str = setting(HOST, "", "host", "hostname")
    port: Port = setting(PORT, 22)
    user: str | None = setting(LOGIN, None)
    ssh_key_path: str | None = setting(PATH, None, acts=True)
    known_hosts: str | None = setting(PATH, None, acts=True)
    accept_new: bool = setting(FLAG, False, acts=True)
    proxy_jump: str | None = setting(JUMPS, None, acts=True)
    role: Literal["head", "worker"] = setting(OneOf(("head", "worker"), {"master": "head"}), "worker")
    cpu_milli: Whole | None = setting(SOME_CORES, None, "cpu_count")
    memory_bytes: Whole | None = setting(SOME_GIGABYTES, None, "memory_gb")
    gpu_count: Whole | None = setting(DEVICES, None)
    gpus: tuple[GpuConfig, ...] = setting(ListOf(GpuConfig.key_table, "GPUs"), ())
    custom: dict[str, Whole] = setting(COUNTS, {})
    tags: tuple[str, ...] = setting(ListOf(TEXT, "words"), (), live=True)
    labels: dict[str, str] = setting(MapOf(TEXT, TEXT, "names to text"), {}, live=True)
    python: str | None = setting(COMMAND, None, acts=True)
    ray_python: str | None = setting(COMMAND, None, acts=True)
    ray_address: str | None = setting(HOST, None)
    trust_declared: bool = setting(FLAG, False)
    simulated: bool | None = setting(FLAG, None)
    background: Background = setting(Background, Background())
    dedicated: bool = setting(FLAG, False, live=True)
    thresholds: ThresholdConfig | None = setting(ThresholdConfig, None, live=True)
    owner_policy: OwnerPolicy | None = setting(OwnerPolicy, None, live=True)
    resource_sharing: NodeSharing = flattened(NodeSharing, "resource_sharing.", live=True)
    speed_milli: Whole = setting(Amount(1000), 1000, "speed", live=True)
    cost_milli: Whole = setting(Amount(1000), 0, "cost_per_hour", live=True)

    def __post_init__(self) -> None:
        if not self.host:
            force_setattr(self, "host", self.name)
        super().__post_init__()

    @property
    def is_local(self) -> bool:
        """Whether its agent runs on this machine, without SSH."""
        return self.host == "local"

    @property
    def cpu_count(self) -> float | None:
        """Declared cores."""
        return None if self.cpu_milli is None else self.cpu_milli / 1000

    @property
    def memory_gb(self) -> float | None:
        """Declared memory in GB of 1024³ bytes."""
        return None if self.memory_bytes is None else self.memory_bytes / GIB


class Fairness(Section):
    """How fast past use is forgotten, who counts for more, and how long anybody waits before that counts most."""

    half_life_seconds: Duration = setting(Seconds(0, 3600, "hours"), 24 * 3600.0, "half_life_hours")
    weights: dict[str, float] = setting(MapOf(TEXT, PlainNumber(above_zero=True), "users or teams to weights"), {})
    starvation_seconds: Duration = setting(Seconds(1, 3600, "hours"), 48 * 3600.0, "starvation_hours")
    patience_seconds: Duration = duration(30.0, low=0)


class Preemption(Section):
    """Whom urgent work may displace: nobody who has hardly begun, and no job too often."""

    minimum_run_seconds: Duration = duration(1.0, low=0)
    max_per_job: Whole = setting(Count(0, 1000), 3)


class QuotaConfig(Section):
    """The most a user, or the members of a team together, may hold at once; None is "no limit"."""

    members: tuple[str, ...] = setting(ListOf(LOGIN, "users"), ())
    cpu_milli: Whole | None = setting(CORES, None, "cpu")
    memory_bytes: Whole | None = setting(GIGABYTES, None, "memory_gb", "memory")
    gpu_milli: Whole | None = setting(Amount(1000, "a number of GPUs"), None, "gpu")
    custom: dict[str, Whole] = setting(COUNTS, {})
    job_count: Whole | None = setting(Count(), None, "jobs")


class Alerts(Section):
    """When to send an alert, and how."""

    cpu_high: Part | None = setting(RATIO, None, "cpu")
    memory_high: Part | None = setting(RATIO, 0.75, "memory")
    gpu_high: Part | None = setting(RATIO, None, "gpu")
    command: str | None = setting(COMMAND, None, acts=True)
    webhook: Secret | None = setting(WEB_ADDRESS, None, acts=True)


class Scaling(Section):
    """When cloud workers are rented and given back, and what that may cost."""

    provider: str | None = setting(PROVIDER_NAME, None, acts=True)
    min_workers: Whole = setting(Count(0, 10_000), 0, live=True)
    max_workers: Whole = setting(Count(0, 10_000), 10, live=True)
    target_utilization: Part = setting(RATIO, workers.DEFAULT_TARGET_UTILIZATION, live=True)
    scale_up_threshold: Part = setting(RATIO, workers.DEFAULT_SCALE_UP_THRESHOLD, live=True)
    scale_down_threshold: Part = setting(RATIO, workers.DEFAULT_SCALE_DOWN_THRESHOLD, live=True)
    evaluation_window_seconds: Duration = duration(workers.DEFAULT_EVALUATION_WINDOW, live=True)
    scale_up_cooldown_seconds: Duration = duration(workers.DEFAULT_SCALE_UP_COOLDOWN, low=0, live=True)
    scale_down_cooldown_seconds: Duration = duration(workers.DEFAULT_SCALE_DOWN_COOLDOWN, low=0, live=True)
    worker_reassessment_interval_seconds: Duration = duration(workers.DEFAULT_WORKER_REASSESSMENT_INTERVAL)
    history_retention_seconds: Duration = duration(workers.DEFAULT_HISTORY_RETENTION)
    budget_usd_per_hour: Duration | None = setting(MONEY, None, "budget_per_hour", live=True)
    budget_usd_per_day: Duration | None = setting(MONEY, None, "budget_per_day", live=True)


class WorkerTimes(Section):
    """How long a worker of a provider may take to be launched and to join, how far a provider's list may lag, how long
    a call may take, and after how long without a control plane a worker ends itself."""

    launch_seconds: Duration = duration(300.0)
    join_seconds: Duration = duration(900.0)
    consistency_seconds: Duration = duration(30.0, low=0.1)
    call_seconds: Duration = duration(60.0, low=0.1)
    exit_seconds: Duration = duration(600.0)


class Prediction(Section):
    """When earlier runs say enough about the next one, and how often everything is learned anew."""

    confidence_threshold: Part = setting(RATIO, DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD)
    update_interval_seconds: Duration = duration(float(DEFAULT_PREDICTION_UPDATE_INTERVAL), low=1)
    min_samples_for_ml: Whole = setting(Count(LEAST_SAMPLES_FOR_ML, 1_000_000), DEFAULT_MIN_SAMPLES_FOR_ML)
    min_samples_for_stats: Whole = setting(Count(LEAST_SAMPLES_FOR_STATS, 1_000_000), DEFAULT_MIN_SAMPLES_FOR_STATS)


class ServerConfig(Section):
    """Where the control plane listens for REST and for agents that joined; None is "as the address calls for"."""

    host: str = setting(HOST, "127.0.0.1", acts=True)
    port: Annotated[int, Meta(ge=0, le=65535)] | None = setting(Count(0, 65535, "a port number"), None, acts=True)
    names: tuple[str, ...] = setting(ListOf(HOST, "host names or addresses"), (), acts=True)
    tls: bool | None = setting(FLAG, None, acts=True)
    certificate: str | None = setting(PATH, None, acts=True)
    key: str | None = setting(PATH, None, acts=True)
    force_plain: bool = setting(FLAG, False, acts=True)
    max_connections_per_peer: Whole = setting(Count(1, 100_000), 128)


class Ray(Section):
    """How the grid starts Ray on its nodes; None of `python` is "the Ray that the grid installs there"."""

    python: str | None = setting(COMMAND, None, acts=True)
    port: Port = setting(PORT, 6379)
    client_port: Port = setting(PORT, 10001)
    dashboard_port: Port = setting(PORT, 8265)
    dashboard_host: str = setting(HOST, "127.0.0.1", acts=True)
    min_worker_port: Port = setting(PORT, 20000)
    max_worker_port: Port = setting(PORT, 20999)
    object_store_memory_bytes: Whole | None = setting(SOME_GIGABYTES, None, "object_store_memory_gb")
    auth: Literal["token", "none"] = setting(OneOf(("token", "none")), "token", acts=True)
    tls: bool = setting(FLAG, False)


class Logging(Section):
    """What is logged, where and how."""

    level: Literal["debug", "info", "warning", "error"] = setting(
        OneOf(("debug", "info", "warning", "error"), {"warn": "warning"}), "info"
    )
    format: Literal["text", "json"] = setting(OneOf(("text", "json"), {"console": "text"}), "text")
    file: str | None = setting(PATH, None, acts=True)
