"""Every key of a cluster file: all its spellings, its unit, and the one field it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed_grid.config.kinds.containers import Key, KeyTable, ListOf, MapOf, Normal, key
from distributed_grid.config.kinds.numbers import GIB, MIB, Amount, Count, Percent, Plain, Ratio, Seconds
from distributed_grid.config.kinds.text import (
    COMMAND,
    CUSTOM_NAME,
    FLAG,
    JUMPS,
    LOGIN,
    NODE_NAME,
    PATH,
    TEXT,
    WEB_ADDRESS,
    ChoiceText,
    HostText,
)
from distributed_grid.config.parse_context import KeyPath, ParseContext
from distributed_grid.config.providers import PROVIDERS
from distributed_grid.config.yaml_document import YamlNode
from distributed_grid.domain.scheduling_policy import Strategy

CORES = Amount(1000, "a number of CPU cores")
GIGABYTES = Amount(GIB, "an amount of memory in GB")
DEVICES = Count(0, 1024, "a whole number of GPUs")
GPUS = Amount(1000, "a number of GPUs")
RATIO, PERCENT = Ratio(), Percent()
COUNTS = MapOf(CUSTOM_NAME, Count(), "resource names to counts, such as tpu: 2")
TICK = 0.1
"""No loop turns faster than this, in seconds."""


def seconds(name: str, low: float = TICK) -> Key:
    """A duration, with or without `_seconds` at the end of its name."""
    return key(f"{name}_seconds", Seconds(low), also=(name,))


IDLE_KEYS = (
    key("cpu_percent_max", PERCENT, to="cpu_used_max"),
    key("cpu_min_cores", CORES, to="cpu_free_min_milli"),
    key("memory_percent_max", PERCENT, to="memory_used_max"),
    key("memory_min_gb", GIGABYTES, to="memory_free_min_bytes"),
    key("gpu_utilization_max", PERCENT, to="gpu_used_max"),
    key("gpu_memory_min_mb", Amount(MIB, "an amount of memory in MB"), to="gpu_memory_free_min_bytes"),
    key("margin", RATIO),
    seconds("dwell", low=0),
)
IDLE = KeyTable(IDLE_KEYS)

PRESSURE_KEYS = tuple(
    Key(
        f"pressure.{resource}_{mark}",
        RATIO,
        (f"thresholds.{resource}_pressure_{mark}", f"pressure_thresholds.{resource}.{mark}"),
    )
    for resource in ("cpu", "memory", "gpu")
    for mark in ("high", "low")
)

RESOURCE_SHARING = KeyTable(
    (
        key("enabled", FLAG),
        key("mode", ChoiceText(("offload_only", "share_and_offload", "dynamic_balancing"))),
        key("policy", ChoiceText(("conservative", "balanced", "aggressive", "predictive"))),
        key("strategy", ChoiceText(tuple(one for one in Strategy if one is not Strategy.NODE_SPECIFIC))),
        seconds("check_interval"),
        seconds("offer_expiry"),
        key("max_offers_per_node", Count(1, 1000)),
        seconds("rebalance_interval"),
        seconds("monitoring_interval"),
        *(Key(f"thresholds.{k.field}", k.kind, tuple(f"thresholds.{s}" for s in k.spellings)) for k in IDLE_KEYS),
        *PRESSURE_KEYS,
        key("thresholds.excess_threshold", RATIO, to="pressure.excess", also=("pressure_thresholds.excess",)),
        key("auto_offload.enabled", FLAG),
        key("auto_offload.cpu_threshold", RATIO, to="auto_offload.cpu_high"),
        key("auto_offload.memory_threshold", RATIO, to="auto_offload.memory_high"),
        key("auto_offload.gpu_threshold", RATIO, to="auto_offload.gpu_high"),
        seconds("auto_offload.check_interval"),
        seconds("auto_offload.cooldown", low=0),
    )
)

STEPS = ("throttle", "pause", "evict")


@dataclass(frozen=True, slots=True)
class OnlyStep:
    """The one-word owner policy: that step and no other."""

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> Normal:
        word = ChoiceText(STEPS).read(spot, place, desk)
        return {step: step == word for step in STEPS}

    def show(self, value: Any) -> Any:
        return value


OWNER_POLICY = KeyTable(
    (*(key(step, FLAG) for step in STEPS), seconds("notice", low=0), seconds("grace", low=0)),
    shorthand=OnlyStep(),
)

NODE = KeyTable(
    (
        key("name", NODE_NAME),
        key("host", HostText(), also=("hostname",)),
        key("port", Count(1, 65535, "a port number")),
        key("user", LOGIN),
        key("ssh_key_path", PATH),
        key("known_hosts", PATH),
        key("accept_new", FLAG),
        key("proxy_jump", JUMPS),
        key("role", ChoiceText(("head", "worker"), {"master": "head"})),
        key("cpu_count", Amount(1000, "a number of CPU cores", above_zero=True), to="cpu_milli"),
        key("memory_gb", Amount(GIB, "an amount of memory in GB", above_zero=True), to="memory_bytes"),
        key("gpu_count", DEVICES),
        key("gpus", ListOf(KeyTable((key("name", TEXT), key("memory_gb", GIGABYTES, to="memory_bytes"))), "GPUs")),
        key("custom", COUNTS),
        key("tags", ListOf(TEXT, "words")),
        key("labels", MapOf(TEXT, TEXT, "names to text")),
        key("python", COMMAND),
        key("ray_python", COMMAND),
        key("ray_address", HostText()),
        key("trust_declared", FLAG),
        key("dedicated", FLAG),
        key("thresholds", IDLE),
        key("owner_policy", OWNER_POLICY),
        key("resource_sharing.can_share", FLAG),
        key("resource_sharing.max_share_cpu", CORES, to="resource_sharing.max_share_cpu_milli"),
        key("resource_sharing.max_share_memory_gb", GIGABYTES, to="resource_sharing.max_share_memory_bytes"),
        key(
            "resource_sharing.max_share_gpu",
            DEVICES,
            to="resource_sharing.max_share_gpu_count",
        ),
        key("resource_sharing.max_share_custom", COUNTS),
        key("resource_sharing.priority", Amount(1000, "a number"), to="resource_sharing.rank"),
        key("speed", Amount(1000, "a number"), to="speed_milli"),
        key("cost_per_hour", Amount(1000, "a number"), to="cost_milli"),
    ),
    required=("name",),
)

QUOTA = KeyTable(
    (
        key("members", ListOf(LOGIN, "users")),
        key("cpu", CORES, to="cpu_milli"),
        key("memory_gb", GIGABYTES, to="memory_bytes", also=("memory",)),
        key("gpu", GPUS, to="gpu_milli"),
        key("custom", COUNTS),
        key("jobs", Count(), to="job_count"),
    )
)

ALERTS = KeyTable(
    (
        key("cpu", RATIO, to="cpu_high"),
        key("memory", RATIO, to="memory_high"),
        key("gpu", RATIO, to="gpu_high"),
        key("command", COMMAND),
        key("webhook", WEB_ADDRESS),
    )
)

SCALING = KeyTable(
    (
        key("provider", ChoiceText(("aws", "gcp", "docker_local"))),
        key("min_workers", Count(0, 10_000)),
        key("max_workers", Count(0, 10_000)),
        key("target_utilization", RATIO),
        key("scale_up_threshold", RATIO),
        key("scale_down_threshold", RATIO),
        seconds("evaluation_window"),
        seconds("scale_up_cooldown", low=0),
        seconds("scale_down_cooldown", low=0),
        seconds("worker_reassessment_interval"),
        seconds("history_retention"),
        key("budget_per_hour", Plain("an amount of money"), to="budget_usd_per_hour"),
        key("budget_per_day", Plain("an amount of money"), to="budget_usd_per_day"),
    )
)

FAIRNESS = KeyTable(
    (
        key("half_life_hours", Seconds(0, 3600, "hours"), to="half_life_seconds"),
        key("weights", MapOf(TEXT, Plain(above_zero=True), "users or teams to weights")),
        key("starvation_hours", Seconds(1, 3600, "hours"), to="starvation_seconds"),
        seconds("patience", low=0),
    )
)

PREEMPTION = KeyTable((seconds("minimum_run", low=0), key("max_per_job", Count(0, 1000))))

LOGGING = KeyTable(
    (
        key("level", ChoiceText(("debug", "info", "warning", "error"), {"warn": "warning"})),
        key("format", ChoiceText(("text", "json"), {"console": "text"})),
        key("file", PATH),
    )
)

SERVER = KeyTable(
    (
        key("host", HostText()),
        key("port", Count(0, 65535, "a port number")),
        key("names", ListOf(HostText(), "host names or addresses")),
        key("tls", FLAG),
        key("certificate", PATH),
        key("key", PATH),
        key("force_plain", FLAG),
    )
)

PORT = Count(1, 65535, "a port number")

RAY = KeyTable(
    (
        key("python", COMMAND),
        key("port", PORT),
        key("client_port", PORT),
        key("dashboard_port", PORT),
        key("dashboard_host", HostText()),
        key("min_worker_port", PORT),
        key("max_worker_port", PORT),
        key(
            "object_store_memory_gb",
            Amount(GIB, "an amount of memory in GB", above_zero=True),
            to="object_store_memory_bytes",
        ),
        key("auth", ChoiceText(("token", "none"))),
        key("tls", FLAG),
    )
)

CLUSTER = KeyTable(
    (
        key("name", TEXT),
        key("nodes", ListOf(NODE, "nodes")),
        key("custom_resources", ListOf(CUSTOM_NAME, "resource names")),
        key("resource_sharing", RESOURCE_SHARING),
        key("execution.resource_sharing", RESOURCE_SHARING, to="resource_sharing", overrides=True),
        key("hold_seconds", Seconds(1)),
        key("trusted_network", FLAG),
        key("owner_policy", OWNER_POLICY),
        key("fairness", FAIRNESS),
        key("preemption", PREEMPTION),
        key("quotas", MapOf(TEXT, QUOTA, "users or teams to quotas")),
        key("alerts", ALERTS),
        key("scaling", SCALING),
        key("server", SERVER),
        key("ray", RAY),
        key("logging", LOGGING),
        key("providers", PROVIDERS),
    )
)
