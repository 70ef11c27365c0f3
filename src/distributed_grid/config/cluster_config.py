"""Cluster configuration: the one normal form of a cluster file, whatever its spelling."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta, ValidationError
from msgspec.structs import force_setattr

from distributed_grid.config.key_tables import ListOf, MapOf, Section, setting
from distributed_grid.config.loader import load_values, machine_node
from distributed_grid.config.providers import Provider, ProviderSettings, open_plugged_in, open_provider
from distributed_grid.config.sections import (
    Alerts,
    Fairness,
    Logging,
    NodeConfig,
    OwnerPolicy,
    Prediction,
    Preemption,
    QuotaConfig,
    Ray,
    ResourceSharing,
    Scaling,
    ServerConfig,
    ThresholdConfig,
    WorkerTimes,
)
from distributed_grid.config.value_kinds import CUSTOM_NAME, DISK_GIGABYTES, FLAG, GIB, TEXT, Seconds
from distributed_grid.config.yaml_document import (
    ConfigProblem,
    ConfigProblems,
    YamlNode,
    decode_content,
    from_plain,
    read_content,
)


class ClusterConfig(Section, dict=True):
    """A whole cluster; there is always at least one node."""

    name: str = setting(TEXT, "grid")
    nodes: tuple[NodeConfig, ...] = setting(ListOf(NodeConfig.key_table, "nodes"), ())
    custom_resources: tuple[str, ...] = setting(ListOf(CUSTOM_NAME, "resource names"), ())
    resource_sharing: ResourceSharing = setting(
        ResourceSharing, ResourceSharing(), overridden_at="execution.resource_sharing"
    )
    hold_seconds: Annotated[float, Meta(ge=1, le=sys.float_info.max)] = setting(Seconds(1), 60.0)
    max_output_bytes: Annotated[int, Meta(ge=0)] = setting(DISK_GIGABYTES, 10 * GIB, "max_output_gb", live=True)
    max_files_bytes: Annotated[int, Meta(ge=0)] = setting(DISK_GIGABYTES, 100 * GIB, "max_files_gb", live=True)
    start_seconds: Annotated[float, Meta(ge=1, le=sys.float_info.max)] = setting(Seconds(1), 60.0)
    trusted_network: bool = setting(FLAG, False, acts=True)
    owner_policy: OwnerPolicy = setting(OwnerPolicy, OwnerPolicy(), live=True)
    fairness: Fairness = setting(Fairness, Fairness(), live=True)
    preemption: Preemption = setting(Preemption, Preemption(), live=True)
    quotas: dict[str, QuotaConfig] = setting(
        MapOf(TEXT, QuotaConfig.key_table, "users or teams to quotas"), {}, live=True
    )
    alerts: Alerts = setting(Alerts, Alerts(), live=True)
    scaling: Scaling = setting(Scaling, Scaling())
    workers: WorkerTimes = setting(WorkerTimes, WorkerTimes())
    prediction: Prediction = setting(Prediction, Prediction())
    server: ServerConfig = setting(ServerConfig, ServerConfig())
    ray: Ray = setting(Ray, Ray())
    logging: Logging = setting(Logging, Logging())
    providers: dict[str, dict[str, Any]] = setting(ProviderSettings(), {}, acts=True)
    warnings: tuple[str, ...] = ()
    source: ClassVar[str | None] = None
    """The file this was read from; not part of the values: it does not count in comparisons, and a copy has none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.nodes:
            raise ValidationError("ClusterConfig.nodes: expected at least one node")

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What is shown of it: everything but the providers, whose settings may have credentials in them."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "providers"]

    def __repr__(self) -> str:
        return f"ClusterConfig({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    @classmethod
    def from_yaml(cls, path: str | Path, env: Mapping[str, str] | None = None) -> Self:
        """The configuration in a YAML or JSON file, or `ConfigProblems` with everything that is wrong."""
        return cls.from_content(path, read_content(path), env)

    @classmethod
    def from_content(cls, path: str | Path, content: bytes, env: Mapping[str, str] | None = None) -> Self:
        """The configuration in a file whose bytes were read already."""
        config = cls.from_text(decode_content(content, str(path)), str(path), env)
        force_setattr(config, "source", str(Path(path).absolute()))
        return config

    @classmethod
    def from_text(cls, text: str, file: str = "<text>", env: Mapping[str, str] | None = None) -> Self:
        """The configuration in a text; `file` is the name in reports of problems."""
        from distributed_grid.config.yaml_parser import parse

        return cls._from_document(parse(text, file), file, env)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Self:
        """The configuration in plain data, spelled as in a file."""
        return cls._from_document(from_plain(dict(values)), "<mapping>", env)

    @classmethod
    def embedded(cls, hostname: str) -> Self:
        """The grid of one's own machine: no thresholds and no owner policy, because you are the owner."""
        return cls(nodes=(NodeConfig(**machine_node(hostname)),))

    @classmethod
    def _from_document(cls, root: YamlNode, file: str, env: Mapping[str, str] | None) -> Self:
        values = load_values(root, file, cls.key_table, env)
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigProblems([ConfigProblem(file, 0, "", "", "", str(error))]) from None

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

    def is_simulated(self, node: NodeConfig) -> bool:
        """Whether a node of this machine stands for a machine of its own, with what is declared for it and no more.

        Unless the node says so itself, each of several local nodes is; a single one is measured, as it has an owner.
        """
        several = sum(one.is_local for one in self.nodes) > 1
        return node.is_local and (several if node.simulated is None else node.simulated)

    @property
    def head(self) -> NodeConfig:
        """The node that is named the head, else the first on this machine, else the first."""
        heads = [node for node in self.nodes if node.role == "head"]
        local = [node for node in self.nodes if node.is_local]
        return (heads or local or list(self.nodes))[0]

    def provider(self, name: str, env: Mapping[str, str] | None = None) -> Provider:
        """A cloud provider's settings with its variables expanded; a missing variable is named."""
        return open_provider(name, self.providers, env)

    def plugged_in_provider(self, name: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The settings of another package's provider with its variables expanded."""
        return open_plugged_in(name, self.providers, env)

    def file_for(self, folder: Path) -> str:
        """A file that holds this config: the one it was read from, else one written to `folder` (mode 0600)."""
        if self.source is not None:
            return self.source
        text = json.dumps(self.as_dict() | {"providers": self.providers}, indent=2)
        path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)
        return str(path)

    def as_dict(self) -> dict[str, Any]:
        """The normal form as a user would write it, defaults included and secrets masked."""
        return self.key_table.show(self)


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


def cluster_template() -> str:
    """A commented cluster file that loads: what `grid init` writes."""
    return Path(__file__).with_name("template.yaml").read_text(encoding="utf-8")
