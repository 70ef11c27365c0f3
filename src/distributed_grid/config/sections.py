"""The parts of the normal form: frozen values in base units, each with its defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from distributed_grid.config.kinds.numbers import GIB, MIB
from distributed_grid.domain.scheduling_policy import Strategy

Part = Annotated[float, Field(ge=0, le=1)]
"""A ratio from 0 to 1."""
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]


class Frozen(BaseModel):
    """A value: it never changes, and knows no field it was not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ThresholdConfig(Frozen):
    """How idle a machine must be before it lends, and for how long."""

    cpu_used_max: Part = 0.3
    cpu_free_min_milli: Whole = 1000
    memory_used_max: Part = 0.5
    memory_free_min_bytes: Whole = 2 * GIB
    gpu_used_max: Part = 0.2
    gpu_memory_free_min_bytes: Whole = 1024 * MIB
    margin: Part = 0.05
    dwell_seconds: Duration = 1200.0


class OwnerPolicy(Frozen):
    """Which steps are taken, gentle ones first, when a machine's owner needs it back."""

    throttle: bool = True
    pause: bool = True
    evict: bool = True
    notice_seconds: Duration = 5.0
    grace_seconds: Duration = 10.0


class PressureMarks(Frozen):
    """Above `high` a node gets more, below `low` it gives that back.

    A node lends only the part of its free share above `excess`. Where nobody set that, it holds for automatic leases.
    """

    cpu_high: Part = 0.8
    cpu_low: Part = 0.3
    memory_high: Part = 0.8
    memory_low: Part = 0.3
    gpu_high: Part = 0.8
    gpu_low: Part = 0.3
    excess: Part | None = None


class AutoOffload(Frozen):
    """When work is moved away from a node without being asked."""

    enabled: bool = False
    cpu_high: Part = 0.8
    memory_high: Part = 0.8
    gpu_high: Part = 0.8
    check_interval_seconds: Duration = 60.0
    cooldown_seconds: Duration = 300.0


class ResourceSharing(Frozen):
    """How the cluster lends."""

    enabled: bool = True
    mode: Literal["offload_only", "share_and_offload", "dynamic_balancing"] = "dynamic_balancing"
    policy: Literal["conservative", "balanced", "aggressive", "predictive"] = "balanced"
    strategy: Strategy = Strategy.LOAD_BALANCED
    check_interval_seconds: Duration = 60.0
    offer_expiry_seconds: Duration = 300.0
    max_offers_per_node: Whole = 5
    rebalance_interval_seconds: Duration = 30.0
    monitoring_interval_seconds: Duration = 10.0
    thresholds: ThresholdConfig = ThresholdConfig()
    pressure: PressureMarks = PressureMarks()
    auto_offload: AutoOffload = AutoOffload()


class NodeSharing(Frozen):
    """The most one node lends; None is "all it has". The higher its rank, the sooner it is asked."""

    can_share: bool = True
    max_share_cpu_milli: Whole | None = None
    max_share_memory_bytes: Whole | None = None
    max_share_gpu_count: Whole | None = None
    max_share_custom: dict[str, Whole] = {}
    rank: Whole = 1000


class Fairness(Frozen):
    """How fast past use is forgotten, who counts for more, and how long anybody waits before that counts most."""

    half_life_seconds: Duration = 24 * 3600.0
    weights: dict[str, float] = {}
    starvation_seconds: Duration = 48 * 3600.0
    patience_seconds: Duration = 30.0


class Preemption(Frozen):
    """Whom urgent work may displace: nobody who has hardly begun, and no job too often."""

    minimum_run_seconds: Duration = 1.0
    max_per_job: Whole = 3


class QuotaConfig(Frozen):
    """The most a user, or the members of a team together, may hold at once; None is "no limit"."""

    members: tuple[str, ...] = ()
    cpu_milli: Whole | None = None
    memory_bytes: Whole | None = None
    gpu_milli: Whole | None = None
    custom: dict[str, Whole] = {}
    job_count: Whole | None = None


class Alerts(Frozen):
    """When to tell somebody, and how."""

    cpu_high: Part | None = None
    memory_high: Part | None = 0.75
    gpu_high: Part | None = None
    command: str | None = None
    webhook: SecretStr | None = None


class Scaling(Frozen):
    """When cloud workers are rented and given back, and what that may cost."""

    provider: Literal["aws", "gcp", "docker_local"] | None = None
    min_workers: Whole = 0
    max_workers: Whole = 10
    target_utilization: Part = 0.7
    scale_up_threshold: Part = 0.8
    scale_down_threshold: Part = 0.3
    evaluation_window_seconds: Duration = 300.0
    scale_up_cooldown_seconds: Duration = 300.0
    scale_down_cooldown_seconds: Duration = 600.0
    worker_reassessment_interval_seconds: Duration = 3600.0
    history_retention_seconds: Duration = 86400.0
    budget_usd_per_hour: Duration | None = None
    budget_usd_per_day: Duration | None = None


class ServerConfig(Frozen):
    """Where the control plane listens for REST and for agents that joined; None is "as the address calls for"."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    names: tuple[str, ...] = ()
    tls: bool | None = None
    certificate: str | None = None
    key: str | None = None
    force_plain: bool = False


Port = Annotated[int, Field(ge=1, le=65535)]


class Ray(Frozen):
    """How the grid starts Ray on its nodes; None of `python` is "the Ray that the grid installs there"."""

    python: str | None = None
    port: Port = 6379
    client_port: Port = 10001
    dashboard_port: Port = 8265
    dashboard_host: str = "127.0.0.1"
    min_worker_port: Port = 20000
    max_worker_port: Port = 20999
    object_store_memory_bytes: Whole | None = None
    auth: Literal["token", "none"] = "token"
    tls: bool = False


class Logging(Frozen):
    """What is logged, where and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    file: str | None = None
