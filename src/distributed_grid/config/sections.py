"""Sections of a cluster file. A field is one line: its name in the normal form, its type with its unit, its default,
and its spellings where they differ from the name."""

import re
import sys
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from distributed_grid.config import value_kinds as kinds
from distributed_grid.config.key_tables import Interval, ListOf, MapOf, Normal, Section, setting
from distributed_grid.config.value_kinds import GIB, MIB, KeyPath, ParseContext, Secret, ValueKind
from distributed_grid.config.yaml_document import YamlNode
from distributed_grid.domain import workers
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.prediction import task_runs

FROM_0_TO_1, NOT_NEGATIVE = Meta(ge=0, le=1), Meta(ge=0)
FINITE = Meta(ge=0, le=sys.float_info.max)
MIN_INTERVAL_SECONDS = 0.1  # no loop runs more often than this

RatioPart = Annotated[float, FROM_0_TO_1, kinds.RATIO]
PercentPart = Annotated[float, FROM_0_TO_1, kinds.PERCENT]
LoopSeconds = Annotated[float, FINITE, Interval(MIN_INTERVAL_SECONDS)]
SpanSeconds = Annotated[float, FINITE, Interval()]
Money = Annotated[float, FINITE, kinds.PlainNumber("an amount of money")]
SomeMemoryBytes = Annotated[int, NOT_NEGATIVE, kinds.SOME_GIGABYTES]
MilliCores = Annotated[int, NOT_NEGATIVE, kinds.CORES]
MemoryBytes = Annotated[int, NOT_NEGATIVE, kinds.GIGABYTES]
Thousandths = Annotated[int, NOT_NEGATIVE, kinds.Amount(1000)]
DeviceCount = Annotated[int, NOT_NEGATIVE, kinds.DEVICES]
Workers = Annotated[int, NOT_NEGATIVE, kinds.Count(0, 10_000)]
Port = Annotated[int, Meta(ge=1, le=65535), kinds.PORT]
Command = Annotated[str, kinds.COMMAND]
FilePath = Annotated[str, kinds.PATH]
Host = Annotated[str, kinds.HOST]
CustomCounts = Annotated[
    dict[str, Annotated[int, NOT_NEGATIVE]],
    MapOf(kinds.CUSTOM_NAME, kinds.Count(), "resource names to counts, such as tpu: 2"),
]
PROVIDER_NAME = kinds.Text(
    "the name of a provider, such as docker_local", re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
)
STEPS = ("throttle", "pause", "evict")


class ThresholdConfig(Section):
    """Idleness of a machine before it lends, and for how long."""

    cpu_used_max: PercentPart = setting(0.3, "cpu_percent_max")
    cpu_free_min_milli: MilliCores = setting(1000, "cpu_min_cores")
    memory_used_max: PercentPart = setting(0.5, "memory_percent_max")
    memory_free_min_bytes: MemoryBytes = setting(2 * GIB, "memory_min_gb")
    gpu_used_max: PercentPart = setting(0.2, "gpu_utilization_max")
    gpu_memory_free_min_bytes: Annotated[int, NOT_NEGATIVE, kinds.Amount(MIB, "an amount of memory in MB")] = setting(
        1024 * MIB, "gpu_memory_min_mb"
    )
    margin: RatioPart = 0.05
    dwell_seconds: SpanSeconds = 1200.0


class _OnlyStep(ValueKind, frozen=True):
    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Normal:
        word = kinds.OneOf(STEPS).read(node, path, context)
        return {step: step == word for step in STEPS}


class OwnerPolicy(Section):
    """Steps taken, gentle ones first, when a machine's owner needs it back."""

    shorthand: ClassVar = _OnlyStep()

    throttle: bool = True
    pause: bool = True
    evict: bool = True
    notice_seconds: SpanSeconds = 5.0
    grace_seconds: SpanSeconds = 10.0


class PressureMarks(Section):
    """Above `high` a node gets more, below `low` it gives that back."""

    cpu_high: RatioPart = setting(0.8, "thresholds.cpu_pressure_high", "pressure_thresholds.cpu.high")
    cpu_low: RatioPart = setting(0.3, "thresholds.cpu_pressure_low", "pressure_thresholds.cpu.low")
    memory_high: RatioPart = setting(0.8, "thresholds.memory_pressure_high", "pressure_thresholds.memory.high")
    memory_low: RatioPart = setting(0.3, "thresholds.memory_pressure_low", "pressure_thresholds.memory.low")
    gpu_high: RatioPart = setting(0.8, "thresholds.gpu_pressure_high", "pressure_thresholds.gpu.high")
    gpu_low: RatioPart = setting(0.3, "thresholds.gpu_pressure_low", "pressure_thresholds.gpu.low")
    excess: RatioPart | None = setting(None, "thresholds.excess_threshold", "pressure_thresholds.excess")
    """A node lends only the part of its free share above this; unset, that applies to automatic leases only."""


class AutoOffload(Section):
    """When work is moved away from a node without a request."""

    enabled: bool = False
    cpu_high: RatioPart = setting(0.8, "cpu_threshold")
    memory_high: RatioPart = setting(0.8, "memory_threshold")
    gpu_high: RatioPart = setting(0.8, "gpu_threshold")
    check_interval_seconds: LoopSeconds = 60.0
    cooldown_seconds: SpanSeconds = 300.0


class ResourceSharing(Section):
    """Lending in the cluster."""

    enabled: bool = True
    mode: Literal["offload_only", "share_and_offload", "dynamic_balancing"] = setting("dynamic_balancing", live=True)
    policy: Literal["conservative", "balanced", "aggressive", "predictive"] = "balanced"
    strategy: Annotated[
        Strategy, kinds.OneOf(tuple(word for word in Strategy if word is not Strategy.NODE_SPECIFIC))
    ] = setting(Strategy.LOAD_BALANCED, live=True)
    check_interval_seconds: LoopSeconds = setting(60.0, live=True)
    offer_expiry_seconds: LoopSeconds = setting(300.0, live=True)
    max_offers_per_node: Annotated[int, NOT_NEGATIVE, kinds.Count(1, 1000)] = setting(5, live=True)
    rebalance_interval_seconds: LoopSeconds = setting(30.0, live=True)
    monitoring_interval_seconds: LoopSeconds = 10.0
    thresholds: ThresholdConfig = setting(ThresholdConfig(), prefix="thresholds.", live=True)
    pressure: PressureMarks = setting(PressureMarks(), prefix="", live=True)
    auto_offload: AutoOffload = setting(AutoOffload(), prefix="auto_offload.", live=True)


class NodeSharing(Section):
    """The most one node lends; None is "all it has"."""

    can_share: bool = True
    max_share_cpu_milli: MilliCores | None = setting(None, "max_share_cpu")
    max_share_memory_bytes: MemoryBytes | None = setting(None, "max_share_memory_gb")
    max_share_gpu_count: DeviceCount | None = setting(None, "max_share_gpu")
    max_share_custom: CustomCounts = {}
    rank: Thousandths = setting(1000, "priority")  # weight among nodes that are about equally good


class GpuConfig(Section):
    """One declared GPU."""

    name: str | None = None
    memory_bytes: MemoryBytes = setting(0, "memory_gb")


class Background(Section):
    """Constant use by the owner of a simulated node, as parts of the node's capacity."""

    cpu_used: PercentPart = setting(0.0, "cpu")
    memory_used: PercentPart = setting(0.0, "memory")
    gpu_used: PercentPart = setting(0.0, "gpu")


class NodeConfig(Section):
    """One machine: how to reach it, its declared capacity, and the most it lends."""

    name: Annotated[str, Meta(pattern=kinds.NAME_PATTERN), kinds.NODE_NAME]
    host: Host = setting("", "host", "hostname")
    port: Port = 22
    user: Annotated[str, kinds.LOGIN] | None = None
    ssh_key_path: FilePath | None = setting(None, acts=True)
    known_hosts: FilePath | None = setting(None, acts=True)
    accept_new: bool = setting(False, acts=True)
    proxy_jump: Annotated[str, kinds.JUMPS] | None = setting(None, acts=True)
    role: Annotated[Literal["head", "worker"], kinds.OneOf(("head", "worker"), {"master": "head"})] = "worker"
    cpu_milli: Annotated[int, NOT_NEGATIVE, kinds.SOME_CORES] | None = setting(None, "cpu_count")
    memory_bytes: SomeMemoryBytes | None = setting(None, "memory_gb")
    gpu_count: DeviceCount | None = None
    gpus: Annotated[tuple[GpuConfig, ...], ListOf(GpuConfig.key_table, "GPUs")] = ()
    custom: CustomCounts = {}
    tags: Annotated[tuple[str, ...], ListOf(kinds.TEXT, "words")] = setting((), live=True)
    labels: Annotated[dict[str, str], MapOf(kinds.TEXT, kinds.TEXT, "names to text")] = setting({}, live=True)
    python: Command | None = setting(None, acts=True)
    ray_python: Command | None = setting(None, acts=True)
    ray_address: Host | None = None
    trust_declared: bool = False
    simulated: bool | None = None
    background: Background = Background()
    dedicated: bool = setting(False, live=True)
    thresholds: ThresholdConfig | None = setting(None, live=True)
    owner_policy: OwnerPolicy | None = setting(None, live=True)
    resource_sharing: NodeSharing = setting(NodeSharing(), prefix="resource_sharing.", live=True)
    speed_milli: Thousandths = setting(1000, "speed", live=True)
    cost_milli: Thousandths = setting(0, "cost_per_hour", live=True)

    def __post_init__(self) -> None:
        if not self.host:
            force_setattr(self, "host", self.name)
        super().__post_init__()

    @property
    def is_local(self) -> bool:
        """True if its agent runs on this machine, without SSH."""
        return self.host == "local"

    @property
    def cpu_count(self) -> float | None:
        return None if self.cpu_milli is None else self.cpu_milli / 1000

    @property
    def memory_gb(self) -> float | None:
        return None if self.memory_bytes is None else self.memory_bytes / GIB


class Fairness(Section):
    """Decay of past use, weights of users, and the wait after which nothing else counts."""

    half_life_seconds: Annotated[float, FINITE, kinds.Seconds(0, 3600, "hours")] = setting(
        24 * 3600.0, "half_life_hours"
    )
    weights: Annotated[
        dict[str, float], MapOf(kinds.TEXT, kinds.PlainNumber(above_zero=True), "users or teams to weights")
    ] = {}
    starvation_seconds: Annotated[float, FINITE, kinds.Seconds(1, 3600, "hours")] = setting(
        48 * 3600.0, "starvation_hours"
    )
    patience_seconds: SpanSeconds = 30.0


class Preemption(Section):
    """Limits of displacement by urgent work."""

    minimum_run_seconds: SpanSeconds = 1.0
    max_per_job: Annotated[int, NOT_NEGATIVE, kinds.Count(0, 1000)] = 3


class QuotaConfig(Section):
    """The most a user, or the members of a team together, may hold at once; None is "no limit"."""

    members: Annotated[tuple[str, ...], ListOf(kinds.LOGIN, "users")] = ()
    cpu_milli: MilliCores | None = setting(None, "cpu")
    memory_bytes: MemoryBytes | None = setting(None, "memory_gb", "memory")
    gpu_milli: Annotated[int, NOT_NEGATIVE, kinds.Amount(1000, "a number of GPUs")] | None = setting(None, "gpu")
    custom: CustomCounts = {}
    job_count: Annotated[int, NOT_NEGATIVE, kinds.Count()] | None = setting(None, "jobs")


class Alerts(Section):
    """When to send an alert, and how."""

    cpu_high: RatioPart | None = setting(None, "cpu")
    memory_high: RatioPart | None = setting(0.75, "memory")
    gpu_high: RatioPart | None = setting(None, "gpu")
    command: Command | None = setting(None, acts=True)
    webhook: Annotated[Secret, kinds.WEB_ADDRESS] | None = setting(None, acts=True)


class Scaling(Section):
    """When cloud workers are rented and given back, and what that may cost."""

    provider: Annotated[str, PROVIDER_NAME] | None = setting(None, acts=True)
    min_workers: Workers = setting(0, live=True)
    max_workers: Workers = setting(10, live=True)
    target_utilization: RatioPart = setting(workers.DEFAULT_TARGET_UTILIZATION, live=True)
    scale_up_threshold: RatioPart = setting(workers.DEFAULT_SCALE_UP_THRESHOLD, live=True)
    scale_down_threshold: RatioPart = setting(workers.DEFAULT_SCALE_DOWN_THRESHOLD, live=True)
    evaluation_window_seconds: LoopSeconds = setting(workers.DEFAULT_EVALUATION_WINDOW, live=True)
    scale_up_cooldown_seconds: SpanSeconds = setting(workers.DEFAULT_SCALE_UP_COOLDOWN, live=True)
    scale_down_cooldown_seconds: SpanSeconds = setting(workers.DEFAULT_SCALE_DOWN_COOLDOWN, live=True)
    worker_reassessment_interval_seconds: LoopSeconds = workers.DEFAULT_WORKER_REASSESSMENT_INTERVAL
    history_retention_seconds: LoopSeconds = workers.DEFAULT_HISTORY_RETENTION
    budget_usd_per_hour: Money | None = setting(None, "budget_per_hour", live=True)
    budget_usd_per_day: Money | None = setting(None, "budget_per_day", live=True)


class WorkerTimes(Section):
    """Time limits of the workers of a provider."""

    launch_seconds: LoopSeconds = 300.0
    join_seconds: LoopSeconds = 900.0  # from launch to the agent's first message
    consistency_seconds: LoopSeconds = 30.0  # lag of a provider's list
    call_seconds: LoopSeconds = 60.0  # deadline of one call to a provider
    exit_seconds: LoopSeconds = 600.0  # without a control plane, a worker ends itself


class Prediction(Section):
    """When earlier runs say enough about the next one, and how often everything is learned anew."""

    confidence_threshold: RatioPart = task_runs.DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD
    update_interval_seconds: Annotated[float, FINITE, Interval(1)] = float(task_runs.DEFAULT_PREDICTION_UPDATE_INTERVAL)
    min_samples_for_ml: Annotated[int, NOT_NEGATIVE, kinds.Count(task_runs.LEAST_SAMPLES_FOR_ML, 1_000_000)] = (
        task_runs.DEFAULT_MIN_SAMPLES_FOR_ML
    )
    min_samples_for_stats: Annotated[int, NOT_NEGATIVE, kinds.Count(task_runs.LEAST_SAMPLES_FOR_STATS, 1_000_000)] = (
        task_runs.DEFAULT_MIN_SAMPLES_FOR_STATS
    )


class ServerConfig(Section):
    """Where the control plane listens for REST and for agents that joined; None is "as the address calls for"."""

    host: Host = setting("127.0.0.1", acts=True)
    port: Annotated[int, Meta(ge=0, le=65535), kinds.Count(0, 65535, "a port number")] | None = setting(None, acts=True)
    names: Annotated[tuple[str, ...], ListOf(kinds.HOST, "host names or addresses")] = setting((), acts=True)
    tls: bool | None = setting(None, acts=True)
    certificate: FilePath | None = setting(None, acts=True)
    key: FilePath | None = setting(None, acts=True)
    force_plain: bool = setting(False, acts=True)
    max_connections_per_peer: Annotated[int, NOT_NEGATIVE, kinds.Count(1, 100_000)] = 128


class Ray(Section):
    """How the grid starts Ray on its nodes."""

    python: Command | None = setting(None, acts=True)  # None: the Ray that the grid installs there
    port: Port = 6379
    client_port: Port = 10001
    dashboard_port: Port = 8265
    dashboard_host: Host = setting("127.0.0.1", acts=True)
    min_worker_port: Port = 20000
    max_worker_port: Port = 20999
    object_store_memory_bytes: SomeMemoryBytes | None = setting(None, "object_store_memory_gb")
    auth: Literal["token", "none"] = setting("token", acts=True)
    tls: bool = False


class Logging(Section):
    """Level, format and place of the log."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        kinds.OneOf(("debug", "info", "warning", "error"), {"warn": "warning"}),
    ] = "info"
    format: Annotated[Literal["text", "json"], kinds.OneOf(("text", "json"), {"console": "text"})] = "text"
    file: FilePath | None = setting(None, acts=True)
