"""Cluster configuration: the normal form of a cluster file, the checks between values, and differences by meaning.

Comments, the order of keys, spellings and defaults that are written out make no difference; expanded variables do.
Nodes are compared by name; their order counts only where it makes another node the head.
"""

import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Meta, ValidationError
from msgspec.structs import asdict, force_setattr, replace

from distributed_grid.config import sections
from distributed_grid.config.key_tables import ListOf, MapOf, Section, derived, known_paths, setting
from distributed_grid.config.providers import (
    PROVIDERS,
    Provider,
    ProviderSettings,
    open_plugged_in,
    open_provider,
)
from distributed_grid.config.sections import NodeConfig
from distributed_grid.config.value_kinds import (
    CUSTOM_NAME,
    DISK_GIGABYTES,
    GIB,
    TEXT,
    KeyPath,
    ParseContext,
    Seconds,
    Secret,
)
from distributed_grid.config.yaml_document import (
    ConfigProblem,
    ConfigProblems,
    YamlNode,
    decode_content,
    from_plain,
    parse,
    read_content,
)
from distributed_grid.number_text import plain_number

SUSPECT_SECONDS = 6  # a node is suspect after this silence; a hold much shorter ends leases on every hiccup

NodeSeconds = Annotated[float, Meta(ge=1, le=sys.float_info.max), Seconds(1)]
DiskBytes = Annotated[int, Meta(ge=0), DISK_GIGABYTES]
PlacedNode = tuple[str, dict[str, Any]]  # normal path and values of a node


class ClusterConfig(Section, dict=True):
    """A whole cluster; there is always at least one node."""

    name: str = "grid"
    nodes: Annotated[tuple[NodeConfig, ...], ListOf(NodeConfig.key_table, "nodes")] = ()
    custom_resources: Annotated[tuple[str, ...], ListOf(CUSTOM_NAME, "resource names")] = ()
    resource_sharing: sections.ResourceSharing = setting(
        sections.ResourceSharing(), overridden_at="execution.resource_sharing"
    )
    hold_seconds: NodeSeconds = 60.0
    max_output_bytes: DiskBytes = setting(10 * GIB, "max_output_gb", live=True)
    max_files_bytes: DiskBytes = setting(100 * GIB, "max_files_gb", live=True)
    start_seconds: NodeSeconds = 60.0
    trusted_network: bool = setting(False, acts=True)
    owner_policy: sections.OwnerPolicy = setting(sections.OwnerPolicy(), live=True)
    fairness: sections.Fairness = setting(sections.Fairness(), live=True)
    preemption: sections.Preemption = setting(sections.Preemption(), live=True)
    quotas: Annotated[
        dict[str, sections.QuotaConfig], MapOf(TEXT, sections.QuotaConfig.key_table, "users or teams to quotas")
    ] = setting({}, live=True)
    alerts: sections.Alerts = setting(sections.Alerts(), live=True)
    scaling: sections.Scaling = sections.Scaling()
    workers: sections.WorkerTimes = sections.WorkerTimes()
    prediction: sections.Prediction = sections.Prediction()
    server: sections.ServerConfig = sections.ServerConfig()
    ray: sections.Ray = sections.Ray()
    logging: sections.Logging = sections.Logging()
    providers: Annotated[dict[str, dict[str, Any]], ProviderSettings()] = setting({}, acts=True)
    warnings: tuple[str, ...] = derived(())
    source: ClassVar[str | None] = None
    """The file this was read from; not part of the values: it does not count in comparisons, and a copy has none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.nodes:
            raise ValidationError("ClusterConfig.nodes: expected at least one node")

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All fields but the providers, whose settings may have credentials in them."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "providers"]

    def __repr__(self) -> str:
        return f"ClusterConfig({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    @classmethod
    def from_yaml(cls, path: str | Path, env: Mapping[str, str] | None = None) -> Self:
        """Raises `ConfigProblems` with every mistake of the file."""
        return cls.from_content(path, read_content(path), env)

    @classmethod
    def from_content(cls, path: str | Path, content: bytes, env: Mapping[str, str] | None = None) -> Self:
        config = cls.from_text(decode_content(content, str(path)), str(path), env)
        force_setattr(config, "source", str(Path(path).absolute()))
        return config

    @classmethod
    def from_text(cls, text: str, file: str = "<text>", env: Mapping[str, str] | None = None) -> Self:
        return cls._from_document(parse(text, file), file, env)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Self:
        return cls._from_document(from_plain(dict(values)), "<mapping>", env)

    @classmethod
    def embedded(cls, hostname: str) -> Self:
        """The grid of one's own machine: no thresholds and no owner policy, because you are the owner."""
        return cls(nodes=(NodeConfig(**_machine_node(hostname)),))

    @classmethod
    def _from_document(cls, root: YamlNode, file: str, env: Mapping[str, str] | None) -> Self:
        if root.value is None:
            message = "is empty, expected at least one key, such as nodes"
            raise ConfigProblems(
                [ConfigProblem(file=file, found="nothing", expected="at least one key", message=message)]
            )
        if not isinstance(root.value, dict):
            message = "the top level must be a mapping with keys such as nodes and resource_sharing"
            raise ConfigProblems(
                [ConfigProblem(file=file, line=root.line, found="no mapping", expected="a mapping", message=message)]
            )
        if root.value and root.value.keys() <= PROVIDERS.keys():  # a providers file
            root = YamlNode({"providers": YamlNode(root.value, root.line)}, root.line)
        paths = known_paths(cls.key_table) | {name: [f"providers.{name}"] for name in PROVIDERS}
        context = ParseContext(file, os.environ if env is None else env, known_paths=paths)
        values = cls.key_table.read(root, KeyPath(), context)
        _check_agreement(values, context)
        context.raise_problems()
        defaults = {
            "thresholds": values.get("resource_sharing", {}).get("thresholds", {}),
            "owner_policy": values.get("owner_policy", {}),
        }
        for node in values.get("nodes", ()):  # a node that sets a part of these has the rest from the cluster
            node |= {name: {**cluster, **node[name]} for name, cluster in defaults.items() if name in node}
        if not values.get("nodes"):
            values["nodes"] = [_machine_node(socket.gethostname())]
        try:
            return cls(**values, warnings=tuple(context.warnings))
        except ValidationError as error:
            raise ConfigProblems([ConfigProblem(file=file, message=str(error))]) from None

    @property
    def thresholds(self) -> sections.ThresholdConfig:
        """Required idleness of nodes on other machines."""
        return self.resource_sharing.thresholds

    def thresholds_for(self, node: NodeConfig) -> sections.ThresholdConfig | None:
        """The node's own thresholds, else the cluster's, which hold only for other machines that have an owner."""
        return node.thresholds or (None if node.is_local or node.dedicated else self.thresholds)

    def owner_policy_for(self, node: NodeConfig) -> sections.OwnerPolicy | None:
        """The node's own policy, else the cluster's, which holds only for other machines that have an owner."""
        return node.owner_policy or (None if node.is_local or node.dedicated else self.owner_policy)

    def is_simulated(self, node: NodeConfig) -> bool:
        """True for a node of this machine that stands for a machine of its own, with its declared capacity only.

        Unless the node says so itself, each of several local nodes is; a single one is measured, as it has an owner.
        """
        several = sum(other.is_local for other in self.nodes) > 1
        return node.is_local and (several if node.simulated is None else node.simulated)

    @property
    def head(self) -> NodeConfig:
        heads = [node for node in self.nodes if node.role == "head"]
        local = [node for node in self.nodes if node.is_local]
        return (heads or local or list(self.nodes))[0]

    def provider(self, name: str, env: Mapping[str, str] | None = None) -> Provider:
        return open_provider(name, self.providers, env)

    def plugged_in_provider(self, name: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
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
        return self.key_table.show(self)


def load_cluster_config(path: str | Path) -> ClusterConfig:
    return ClusterConfig.from_yaml(path)


def check_config(path: str | Path) -> list[ConfigProblem]:
    """Every problem of a file; an empty list means it can be used."""
    try:
        ClusterConfig.from_yaml(path)
    except ConfigProblems as problems:
        return list(problems.problems)
    return []


def cluster_template() -> str:
    return Path(__file__).with_name("template.yaml").read_text(encoding="utf-8")


def _machine_node(hostname: str) -> dict[str, Any]:
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", hostname).lstrip("-_.")[:63]
    return {"name": name or "localhost", "host": "local"}


def _check_agreement(values: dict[str, Any], context: ParseContext) -> None:
    """Report contradictions between values, and warn of unusual ones; invalid values were dropped before."""
    nodes = [(f"nodes.{index}", node) for index, node in enumerate(values.get("nodes") or ()) if node]
    seen: dict[str, str] = {}
    head = ""
    for place, entry in nodes:
        name = entry.get("name")
        if name in seen:
            line = context.lines[seen[name]][1]
            context.report_at(f"{place}.name", f"'{name}' is taken by the node on line {line}, expected another name")
        elif name:
            seen[name] = f"{place}.name"
        if entry.get("role") == "head":
            if head:
                context.report_at(f"{place}.role", f"a second head beside '{head}', expected at most one")
            head = head or str(name)
    several = sum(node.get("host") == "local" for _, node in nodes) > 1
    for at, node in nodes:
        _check_node(at, node, context, is_one_of_several=several)
    _check_custom(values, nodes, context)
    _check_sharing(values.get("resource_sharing", {}), context)
    _check_scaling(values, context)
    server = values.get("server", {})
    for name, other in (("certificate", "key"), ("key", "certificate")):
        if server.get(name) and not server.get(other):
            context.report_at(f"server.{name}", f"there is no {other} to go with it")
    for key, plain in (("tls", False), ("force_plain", True)):
        if server.get(key) is plain:
            context.report_at(f"server.{key}", "there is no connection without TLS: remove this key")
    _check_ray(values.get("ray", {}), context)
    if values.get("hold_seconds", SUSPECT_SECONDS) < SUSPECT_SECONDS:
        context.warn_at("hold_seconds", f"shorter than {SUSPECT_SECONDS} s, so a short silence ends leases")
    if not nodes and "thresholds" in values.get("resource_sharing", {}):
        context.warn_at(
            "resource_sharing.thresholds",
            "no nodes are named, so this machine is the whole grid, and it lends whatever its load; "
            "idle thresholds hold for other machines",
        )


def _check_node(at: str, node: dict[str, Any], context: ParseContext, *, is_one_of_several: bool) -> None:
    if (gpus := node.get("gpus")) is not None:
        declared = node.setdefault("gpu_count", len(gpus))
        if declared != len(gpus):
            context.report_at(f"{at}.gpu_count", f"found {declared}, but gpus: lists {len(gpus)}")
    sharing = node.get("resource_sharing", {})
    for cap, have, shown in (
        ("max_share_cpu_milli", "cpu_milli", "cpu_count"),
        ("max_share_memory_bytes", "memory_bytes", "memory_gb"),
        ("max_share_gpu_count", "gpu_count", "gpu_count"),
    ):
        limit, capacity = sharing.get(cap), node.get(have)
        if limit is not None and capacity is not None and limit > capacity:
            context.warn_at(f"{at}.resource_sharing.{cap}", f"more than the node's {shown}; it lends what it has")
    for name, limit in sharing.get("max_share_custom", {}).items():
        if limit is not None and limit > node.get("custom", {}).get(name, 0):
            context.warn_at(
                f"{at}.resource_sharing.max_share_custom",
                f"more '{name}' than the node's custom: has; it lends that",
            )
    if node.get("host") in {"localhost", "127.0.0.1", "::1"} and not node.get("port") and not node.get("user"):
        context.warn_at(f"{at}.host", "reached over SSH; for an agent on this machine without SSH write local")
    is_local = node.get("host") == "local"
    if node.get("simulated") and not is_local:
        context.report_at(f"{at}.simulated", "only a node on this machine (host: local) can be simulated")
    if any(node.get("background", {}).values()) and not node.get("simulated", is_local and is_one_of_several):
        context.report_at(f"{at}.background", "only a simulated node has one; the use of others is measured")


def _check_custom(values: dict[str, Any], nodes: list[PlacedNode], context: ParseContext) -> None:
    """Without a list of custom resources, those of the nodes are the list."""
    on_nodes = {name: None for _, node in nodes for name in node.get("custom", {})}
    declared = values.get("custom_resources")
    known = [name for name in dict.fromkeys(on_nodes if declared is None else declared) if name]
    used: list[tuple[str, str]] = []  # normal path and name
    for at, node in nodes:
        used += ((f"{at}.custom.{name}", name) for name in node.get("custom", {}))
        caps = node.get("resource_sharing", {}).get("max_share_custom", {})
        used += ((f"{at}.resource_sharing.max_share_custom.{name}", name) for name in caps)
    for owner, quota in values.get("quotas", {}).items():
        used += ((f"quotas.{owner}.custom.{name}", name) for name in quota.get("custom", {}))
    for at, name in used:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "declare it under custom_resources"
            context.report_at(at, f"'{name}' is no declared resource; {hint}")
    if known:
        values["custom_resources"] = known


def _check_sharing(sharing: dict[str, Any], context: ParseContext) -> None:
    marks, defaults = sharing.get("pressure", {}), sections.PressureMarks()
    for resource in ("cpu", "memory", "gpu"):
        low = marks.get(f"{resource}_low", getattr(defaults, f"{resource}_low"))
        high = marks.get(f"{resource}_high", getattr(defaults, f"{resource}_high"))
        if low >= high:
            blamed = "high" if f"{resource}_high" in marks else "low"
            context.report_at(
                f"resource_sharing.pressure.{resource}_{blamed}",
                f"the low mark {low} must be below the high mark {high}",
                expected="a low mark below the high mark",
            )
    age = sharing.get("check_interval_seconds", sections.ResourceSharing().check_interval_seconds)
    expiry = sharing.get("offer_expiry_seconds", sections.ResourceSharing().offer_expiry_seconds)
    if expiry < age:
        context.warn_at(
            "resource_sharing.offer_expiry_seconds",
            f"offers end after {plain_number(expiry)} s but are computed anew only every {plain_number(age)} s",
        )


def _check_scaling(values: dict[str, Any], context: ParseContext) -> None:
    given = values.get("scaling", {})
    scaling = asdict(sections.Scaling()) | given
    for small, large, meaning in (
        ("min_workers", "max_workers", "at most"),
        ("scale_down_threshold", "target_utilization", "below"),
        ("target_utilization", "scale_up_threshold", "at most"),
    ):
        low, high = scaling[small], scaling[large]
        if low > high or (low == high and meaning == "below"):
            blamed = small if small in given else large
            context.report_at(
                f"scaling.{blamed}", f"{small} {plain_number(low)} must be {meaning} {large} {plain_number(high)}"
            )
    provider = given.get("provider")
    if provider and provider not in (values.get("providers") or {}):
        context.warn_at("scaling.provider", f"there is no {provider} under providers")


def _check_ray(given: dict[str, Any], context: ParseContext) -> None:
    """Every port of Ray is its own, and those of its workers are a range apart from the others."""
    ray = asdict(sections.Ray()) | given
    low, high = ray["min_worker_port"], ray["max_worker_port"]
    if low > high:
        blamed = "max_worker_port" if "max_worker_port" in given else "min_worker_port"
        context.report_at(f"ray.{blamed}", f"min_worker_port {low} must be at most max_worker_port {high}")
    taken: dict[int, str] = {}
    for name in ("port", "client_port", "dashboard_port"):
        port = ray[name]
        other = taken.setdefault(port, name)
        if low <= port <= high:
            other = "the ports of the workers"
        if other != name:
            blamed = name if name in given else next((key for key in given if key.endswith("port")), name)
            context.report_at(f"ray.{blamed}", f"{port} is taken by {other}, expected another port")
    if ray["auth"] == "none":
        context.warn_at("ray.auth", "anyone who reaches Ray's ports can run anything as you on every node")


NODES = "nodes"
SectionT = TypeVar("SectionT", bound=Section)


class KeyDifference(NamedTuple):
    key: str
    live: bool  # a running control plane applies the other value


def meaning_digest(config: ClusterConfig) -> str:
    """Digest of all values, secrets included; the same for two files that mean the same."""

    def encode_secret(value: Any) -> str:
        assert isinstance(value, Secret)
        return value.reveal()

    content = msgspec.json.encode(replace(config, warnings=()), enc_hook=encode_secret, order="deterministic")
    return hashlib.sha256(content).hexdigest()


def differences(old: ClusterConfig, new: ClusterConfig) -> list[KeyDifference]:
    """The keys with other values in `new`, in the order of the key table."""
    keys = list(_section_differences(old, new, "", live=False))
    if not any(key.startswith(NODES) for key, _ in keys) and old.head.name != new.head.name:
        keys.append(KeyDifference(NODES, False))
    return keys


def _section_differences(old: Section, new: Section, path: str, *, live: bool) -> Iterator[KeyDifference]:
    for key in old.key_table.keys:
        if key.overrides:
            continue
        before: Any = old
        after: Any = new
        for name in key.field.split("."):
            before, after = getattr(before, name), getattr(after, name)
        if before == after:
            continue
        spelling, is_live = f"{path}{key.spellings[0]}", live or key.live
        if isinstance(before, Section) and isinstance(after, Section):
            yield from _section_differences(before, after, f"{spelling}.", live=is_live)
        elif spelling == NODES:
            old_nodes, new_nodes = ({node.name: node for node in nodes} for nodes in (before, after))
            for name in old_nodes | new_nodes:
                if name in old_nodes and name in new_nodes:
                    inner = f"{NODES}.{name}."
                    yield from _section_differences(old_nodes[name], new_nodes[name], inner, live=False)
                else:
                    yield KeyDifference(f"{NODES}.{name}", False)
        elif isinstance(before, dict) and isinstance(after, dict):
            for entry in sorted(before.keys() | after.keys()):
                if before.get(entry) != after.get(entry):
                    yield KeyDifference(f"{spelling}.{entry}", is_live)
        else:
            yield KeyDifference(spelling, is_live)


def with_live_keys(old: ClusterConfig, new: ClusterConfig) -> ClusterConfig:
    return replace(_merged(old, new), warnings=new.warnings)


def _merged(old: SectionT, new: SectionT) -> SectionT:
    changes: dict[str, Any] = {}
    for name, declared in old.settings.items():
        before, after = getattr(old, name), getattr(new, name)
        if declared.live:
            changes[name] = after
        elif name == NODES:
            nodes = {node.name: node for node in after}
            changes[name] = tuple(_merged(node, nodes[node.name]) if node.name in nodes else node for node in before)
        elif isinstance(before, Section) and isinstance(after, Section):
            changes[name] = _merged(before, after)
    return replace(old, **changes)
