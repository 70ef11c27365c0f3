"""From a file to the values of the normal form: read, translate, check what must agree."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_grid.config.cross_checks import check_agreement
from distributed_grid.config.errors import ConfigProblem, ConfigProblems
from distributed_grid.config.key_aliases import CLUSTER
from distributed_grid.config.kinds.containers import homes
from distributed_grid.config.parse_context import KeyPath, ParseContext
from distributed_grid.config.providers import TABLES as PROVIDER_TABLES
from distributed_grid.config.yaml_document import YamlNode, from_plain, parse, read_text

_HOMES = homes(CLUSTER) | {name: [f"providers.{name}"] for name in PROVIDER_TABLES}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """Values ready for the normal form, and what is odd about them."""

    file: str
    values: dict[str, Any]
    warnings: tuple[str, ...]


def load_file(path: str | Path, env: Mapping[str, str] | None = None) -> LoadedConfig:
    """The values in a file."""
    return load_text(read_text(path), str(path), env)


def load_text(text: str, file: str, env: Mapping[str, str] | None = None) -> LoadedConfig:
    """The values in a text."""
    root = parse(text, file)
    if root.value is None:
        message = "is empty, expected at least one key, such as nodes"
        raise ConfigProblems([ConfigProblem(file, 0, "", "nothing", "at least one key", message)])
    return _load(root, file, env)


def load_mapping(values: Mapping[str, Any], env: Mapping[str, str] | None = None) -> LoadedConfig:
    """The values in plain data."""
    return _load(from_plain(dict(values)), "<mapping>", env)


def machine_node(hostname: str) -> dict[str, Any]:
    """This machine as a node, under a name that is fit to be one."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", hostname).lstrip("-_.")[:63]
    return {"name": name or "localhost", "host": "local"}


def _load(root: YamlNode, file: str, env: Mapping[str, str] | None) -> LoadedConfig:
    if not isinstance(root.value, dict):
        message = "the top level must be a mapping with keys such as nodes and resource_sharing"
        raise ConfigProblems([ConfigProblem(file, root.line, "", "no mapping", "a mapping", message)])
    if root.value and root.value.keys() <= PROVIDER_TABLES.keys():  # a providers file
        root = YamlNode({"providers": YamlNode(root.value, root.line)}, root.line)
    desk = ParseContext(file, os.environ if env is None else env, homes=_HOMES)
    values = CLUSTER.read(root, KeyPath(), desk)
    check_agreement(values, desk)
    desk.finish()
    for node in values.get("nodes", ()):
        _fill_from_cluster(node, values)
    if not values.get("nodes"):
        values["nodes"] = [machine_node(socket.gethostname())]
    return LoadedConfig(file, values, tuple(desk.warnings))


def _fill_from_cluster(node: dict[str, Any], values: dict[str, Any]) -> None:
    """A node that sets a part of the thresholds or of the owner policy takes the rest from the cluster."""
    for name, cluster in (
        ("thresholds", values.get("resource_sharing", {}).get("thresholds", {})),
        ("owner_policy", values.get("owner_policy", {})),
    ):
        if name in node:
            node[name] = {**cluster, **node[name]}
