"""Loader of a configuration: a parsed document to values of the normal form, and the checks between values."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from msgspec.structs import asdict

from distributed_grid.config.key_tables import KeyTable, known_paths
from distributed_grid.config.parse_context import KeyPath, ParseContext
from distributed_grid.config.providers import PROVIDERS
from distributed_grid.config.sections import PressureMarks, Ray, ResourceSharing, Scaling
from distributed_grid.config.yaml_document import ConfigProblem, ConfigProblems, YamlNode
from distributed_grid.number_text import plain_number

SUSPECT_SECONDS = 6
"""A node is suspect after this silence; a hold much shorter ends leases on every hiccup."""


def load_values(root: YamlNode, file: str, table: KeyTable, env: Mapping[str, str] | None) -> dict[str, Any]:
    """The values of the normal form in a document, with `warnings`; raises `ConfigProblems`."""
    if root.value is None:
        message = "is empty, expected at least one key, such as nodes"
        raise ConfigProblems([ConfigProblem(file, 0, "", "nothing", "at least one key", message)])
    if not isinstance(root.value, dict):
        message = "the top level must be a mapping with keys such as nodes and resource_sharing"
        raise ConfigProblems([ConfigProblem(file, root.line, "", "no mapping", "a mapping", message)])
    if root.value and root.value.keys() <= PROVIDERS.keys():  # a providers file
        root = YamlNode({"providers": YamlNode(root.value, root.line)}, root.line)
    paths = known_paths(table) | {name: [f"providers.{name}"] for name in PROVIDERS}
    context = ParseContext(file, os.environ if env is None else env, known_paths=paths)
    values = table.read(root, KeyPath(), context)
    _check_agreement(values, context)
    context.raise_problems()
    for node in values.get("nodes", ()):
        _fill_from_cluster(node, values)
    if not values.get("nodes"):
        values["nodes"] = [machine_node(socket.gethostname())]
    return {**values, "warnings": tuple(context.warnings)}


def machine_node(hostname: str) -> dict[str, Any]:
    """This machine as a node, under a valid name."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", hostname).lstrip("-_.")[:63]
    return {"name": name or "localhost", "host": "local"}


def _fill_from_cluster(node: dict[str, Any], values: dict[str, Any]) -> None:
    """A node that sets a part of the thresholds or of the owner policy takes the rest from the cluster."""
    for name, cluster in (
        ("thresholds", values.get("resource_sharing", {}).get("thresholds", {})),
        ("owner_policy", values.get("owner_policy", {})),
    ):
        if name in node:
            node[name] = {**cluster, **node[name]}


def _check_agreement(values: dict[str, Any], context: ParseContext) -> None:
    """Report contradictions between values, and warn of what is unusual; invalid values were dropped before."""
    nodes = [(f"nodes.{index}", node) for index, node in enumerate(values.get("nodes") or ()) if node]
    _check_names(nodes, context)
    for at, node in nodes:
        _check_gpus(at, node, context)
        _check_caps(at, node, context)
        _check_host(at, node, context)
        _check_simulated(at, node, nodes, context)
    _check_custom(values, nodes, context)
    _check_pressure(values.get("resource_sharing", {}), context)
    _check_scaling(values, context)
    _check_server(values.get("server", {}), context)
    _check_ray(values.get("ray", {}), context)
    if values.get("hold_seconds", SUSPECT_SECONDS) < SUSPECT_SECONDS:
        context.warn_at("hold_seconds", f"shorter than {SUSPECT_SECONDS} s, so a short silence ends leases")
    if not nodes and "thresholds" in values.get("resource_sharing", {}):
        context.warn_at(
            "resource_sharing.thresholds",
            "no nodes are named, so this machine is the whole grid, and it lends whatever its load; "
            "idle thresholds hold for other machines",
        )


def _check_names(nodes: Iterable[tuple[str, dict[str, Any]]], context: ParseContext) -> None:
    seen: dict[str, str] = {}
    head = ""
    for at, node in nodes:
        name = node.get("name")
        if name in seen:
            line = context.lines[seen[name]][1]
            context.report_at(f"{at}.name", f"'{name}' is taken by the node on line {line}, expected another name")
        elif name:
            seen[name] = f"{at}.name"
        if node.get("role") == "head":
            if head:
                context.report_at(f"{at}.role", f"a second head beside '{head}', expected at most one")
            head = head or str(name)


def _check_gpus(at: str, node: dict[str, Any], context: ParseContext) -> None:
    gpus = node.get("gpus")
    if gpus is None:
        return
    declared = node.setdefault("gpu_count", len(gpus))
    if declared != len(gpus):
        context.report_at(f"{at}.gpu_count", f"found {declared}, but gpus: lists {len(gpus)}")


def _check_caps(at: str, node: dict[str, Any], context: ParseContext) -> None:
    sharing = node.get("resource_sharing", {})
    for cap, have, shown in (
        ("max_share_cpu_milli", "cpu_milli", "cpu_count"),
        ("max_share_memory_bytes", "memory_bytes", "memory_gb"),
        ("max_share_gpu_count", "gpu_count", "gpu_count"),
    ):
        most, capacity = sharing.get(cap), node.get(have)
        if most is not None and capacity is not None and most > capacity:
            context.warn_at(f"{at}.resource_sharing.{cap}", f"more than the node's {shown}; it lends what it has")
    for name, most in sharing.get("max_share_custom", {}).items():
        if most is not None and most > node.get("custom", {}).get(name, 0):
            context.warn_at(
                f"{at}.resource_sharing.max_share_custom",
                f"more '{name}' than the node's custom: has; it lends that",
            )


def _check_host(at: str, node: dict[str, Any], context: ParseContext) -> None:
    if node.get("host") in {"localhost", "127.0.0.1", "::1"} and not node.get("port") and not node.get("user"):
        context.warn_at(f"{at}.host", "reached over SSH; for an agent on this machine without SSH write local")


def _check_simulated(
    at: str, node: dict[str, Any], nodes: Iterable[tuple[str, dict[str, Any]]], context: ParseContext
) -> None:
    """Only a node on this machine can be simulated, and only a simulated one has a declared background."""
    is_local = node.get("host") == "local"
    if node.get("simulated") and not is_local:
        context.report_at(f"{at}.simulated", "only a node on this machine (host: local) can be simulated")
    several = sum(one.get("host") == "local" for _, one in nodes) > 1
    if any(node.get("background", {}).values()) and not node.get("simulated", is_local and several):
        context.report_at(f"{at}.background", "only a simulated node has one; the use of others is measured")


def _custom_names(values: dict[str, Any], nodes: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str]]:
    for at, node in nodes:
        yield from ((f"{at}.custom.{name}", name) for name in node.get("custom", {}))
        caps = node.get("resource_sharing", {}).get("max_share_custom", {})
        yield from ((f"{at}.resource_sharing.max_share_custom.{name}", name) for name in caps)
    for who, quota in values.get("quotas", {}).items():
        yield from ((f"quotas.{who}.custom.{name}", name) for name in quota.get("custom", {}))


def _check_custom(values: dict[str, Any], nodes: list[tuple[str, dict[str, Any]]], context: ParseContext) -> None:
    """Without a list of custom resources, what the nodes have is the list."""
    on_nodes = {name: None for _, node in nodes for name in node.get("custom", {})}
    declared = values.get("custom_resources")
    known = [name for name in dict.fromkeys(on_nodes if declared is None else declared) if name]
    for at, name in _custom_names(values, nodes):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "declare it under custom_resources"
            context.report_at(at, f"'{name}' is no declared resource; {hint}")
    if known:
        values["custom_resources"] = known


def _check_pressure(sharing: dict[str, Any], context: ParseContext) -> None:
    marks, defaults = sharing.get("pressure", {}), PressureMarks()
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
    age = sharing.get("check_interval_seconds", ResourceSharing().check_interval_seconds)
    expiry = sharing.get("offer_expiry_seconds", ResourceSharing().offer_expiry_seconds)
    if expiry < age:
        context.warn_at(
            "resource_sharing.offer_expiry_seconds",
            f"offers end after {plain_number(expiry)} s but are computed anew only every {plain_number(age)} s",
        )


def _check_scaling(values: dict[str, Any], context: ParseContext) -> None:
    given = values.get("scaling", {})

    def known(name: str) -> float:
        value: float = given.get(name, getattr(Scaling(), name))
        return value

    for small, large, meaning in (
        ("min_workers", "max_workers", "at most"),
        ("scale_down_threshold", "target_utilization", "below"),
        ("target_utilization", "scale_up_threshold", "at most"),
    ):
        low, high = known(small), known(large)
        if low > high or (low == high and meaning == "below"):
            blamed = small if small in given else large
            context.report_at(
                f"scaling.{blamed}", f"{small} {plain_number(low)} must be {meaning} {large} {plain_number(high)}"
            )
    provider = given.get("provider")
    if provider and provider not in (values.get("providers") or {}):
        context.warn_at("scaling.provider", f"there is no {provider} under providers")


def _check_server(server: dict[str, Any], context: ParseContext) -> None:
    """Every connection uses TLS; own certificates come in pairs."""
    for one, other in (("certificate", "key"), ("key", "certificate")):
        if server.get(one) and not server.get(other):
            context.report_at(f"server.{one}", f"there is no {other} to go with it")
    for key, plain in (("tls", False), ("force_plain", True)):
        if server.get(key) is plain:
            context.report_at(f"server.{key}", "there is no connection without TLS: remove this key")


def _check_ray(given: dict[str, Any], context: ParseContext) -> None:
    """Every port of Ray is its own, and those of its workers are a range apart from the others."""
    ray = asdict(Ray()) | given
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
        context.warn_at("ray.auth", "whoever reaches Ray's ports can run anything as you on every node")
