"""The one normal form of a configuration: whatever the file's spelling, this is what the grid sees."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from distributed_grid.config.errors import ConfigProblem, ConfigProblems
from distributed_grid.config.key_aliases import CLUSTER
from distributed_grid.config.kinds.numbers import GIB
from distributed_grid.config.kinds.text import NAME_PATTERN
from distributed_grid.config.loader import LoadedConfig, load_file, load_mapping, load_text, machine_node
from distributed_grid.config.providers import Provider, open_provider
from distributed_grid.config.sections import (
    Alerts,
    Fairness,
    Frozen,
    Logging,
    NodeSharing,
    OwnerPolicy,
    Preemption,
    QuotaConfig,
    Ray,
    ResourceSharing,
    Scaling,
    ServerConfig,
    ThresholdConfig,
    Whole,
)


class GpuConfig(Frozen):
    """One declared GPU."""

    name: str | None = None
    memory_bytes: Whole = 0


class NodeConfig(Frozen):
    """One machine: how to reach it, what it is said to have, what it lends at most."""

    name: str = Field(pattern=NAME_PATTERN)
    host: str
    port: int = Field(default=22, ge=1, le=65535)
    user: str | None = None
    ssh_key_path: str | None = None
    known_hosts: str | None = None
    accept_new: bool = False
    proxy_jump: str | None = None
    role: Literal["head", "worker"] = "worker"
    cpu_milli: Whole | None = None
    memory_bytes: Whole | None = None
    gpu_count: Whole | None = None
    gpus: tuple[GpuConfig, ...] = ()
    custom: dict[str, Whole] = Field(default_factory=dict)
    tags: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    python: str | None = None
    ray_python: str | None = None
    ray_address: str | None = None
    trust_declared: bool = False
    dedicated: bool = False
    speed_milli: Whole = 1000
    cost_milli: Whole = 0
    thresholds: ThresholdConfig | None = None
    owner_policy: OwnerPolicy | None = None
    resource_sharing: NodeSharing = NodeSharing()

    @model_validator(mode="before")
    @classmethod
    def _host_defaults_to_the_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("host"):
            return {**values, "host": values.get("name")}
        return values

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


class ClusterConfig(Frozen):
    """A whole cluster; there is always at least one node."""

    name: str = "grid"
    nodes: tuple[NodeConfig, ...] = Field(min_length=1)
    custom_resources: tuple[str, ...] = ()
    resource_sharing: ResourceSharing = ResourceSharing()
    hold_seconds: float = Field(default=60.0, ge=1, allow_inf_nan=False)
    trusted_network: bool = False
    owner_policy: OwnerPolicy = OwnerPolicy()
    fairness: Fairness = Fairness()
    preemption: Preemption = Preemption()
    quotas: dict[str, QuotaConfig] = Field(default_factory=dict)
    alerts: Alerts = Alerts()
    scaling: Scaling = Scaling()
    server: ServerConfig = ServerConfig()
    ray: Ray = Ray()
    logging: Logging = Logging()
    providers: dict[str, dict[str, Any]] = Field(default={}, repr=False)
    warnings: tuple[str, ...] = ()
    source: ClassVar[str | None] = None
    """The file this was read from; a fact about where it came from, not a part of what it says."""

    @classmethod
    def from_yaml(cls, path: str | Path, env: Mapping[str, str] | None = None) -> Self:
        """The configuration in a YAML or JSON file, or `ConfigProblems` with everything that is wrong."""
        config = cls._from_loaded(load_file(path, env))
        object.__setattr__(config, "source", str(Path(path).absolute()))
        return config

    @classmethod
    def from_text(cls, text: str, file: str = "<text>", env: Mapping[str, str] | None = None) -> Self:
        """The configuration in a text; `file` is the name problems are told under."""
        return cls._from_loaded(load_text(text, file, env))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Self:
        """The configuration in plain data, spelled as in a file."""
        return cls._from_loaded(load_mapping(values, env))

    @classmethod
    def embedded(cls, hostname: str) -> Self:
        """The grid of one's own machine: no thresholds and no owner policy, because you are the owner."""
        return cls.model_validate({"nodes": [machine_node(hostname)]})

    @classmethod
    def _from_loaded(cls, loaded: LoadedConfig) -> Self:
        try:
            return cls.model_validate({**loaded.values, "warnings": loaded.warnings})
        except ValidationError as error:
            raise ConfigProblems(
                ConfigProblem(loaded.file, 0, ".".join(map(str, slip["loc"])), "", "", slip["msg"])
                for slip in error.errors(include_input=False, include_url=False)
            ) from None

    @property
    def thresholds(self) -> ThresholdConfig:
        """How idle nodes on other machines must be; see `thresholds_for`."""
        return self.resource_sharing.thresholds

    def thresholds_for(self, node: NodeConfig) -> ThresholdConfig | None:
        """The node's own thresholds, else the cluster's, which hold only for other machines that have an owner."""
        return node.thresholds or (None if node.is_local or node.dedicated else self.thresholds)

    def owner_policy_for(self, node: NodeConfig) -> OwnerPolicy | None:
        """The node's own policy, else the cluster's, which holds only for other machines that have an owner."""
        return node.owner_policy or (None if node.is_local or node.dedicated else self.owner_policy)

    @property
    def head(self) -> NodeConfig:
        """The node that is named the head, else the first on this machine, else the first."""
        heads = [node for node in self.nodes if node.role == "head"]
        local = [node for node in self.nodes if node.is_local]
        return (heads or local or list(self.nodes))[0]

    def provider(self, name: str, env: Mapping[str, str] | None = None) -> Provider:
        """A cloud provider's settings with its variables filled in; a missing variable is named."""
        return open_provider(name, self.providers, env)

    def file_for(self, folder: Path) -> str:
        """A file that holds this config: the one it was read from, else one written to `folder` (mode 0600)."""
        if self.source is not None:
            return self.source
        text = json.dumps(self.as_dict(), indent=2)
        path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)
        return str(path)

    def as_dict(self) -> dict[str, Any]:
        """The normal form as a user would write it, defaults included and secrets masked."""
        return CLUSTER.show(self)


def load_cluster_config(path: str | Path) -> ClusterConfig:
    """The configuration in a file; the same as `ClusterConfig.from_yaml`."""
    return ClusterConfig.from_yaml(path)


def check_config(path: str | Path) -> list[ConfigProblem]:
    """Every problem of a file; an empty list means it can be used."""
    try:
        ClusterConfig.from_yaml(path)
    except ConfigProblems as found:
        return list(found.problems)
    return []
