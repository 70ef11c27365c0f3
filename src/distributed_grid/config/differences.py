"""Differences between two configs by meaning, and which of them can change live.

Comments, the order of keys, spellings and defaults that are written out make no difference; expanded variables do.
Nodes are compared by name; their order counts only where it makes another node the head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from distributed_grid.config.cluster_config import ClusterConfig
from distributed_grid.config.key_tables import Section
from distributed_grid.config.sections import NodeConfig
from distributed_grid.config.value_kinds import Secret

NODES = "nodes"
SectionT = TypeVar("SectionT", bound=Section)


class KeyDifference(NamedTuple):
    """A key with two values."""

    key: str
    live: bool  # a running control plane takes the other value over


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
            yield from _node_differences(before, after)
        elif isinstance(before, dict) and isinstance(after, dict):
            for entry in sorted(before.keys() | after.keys()):
                if before.get(entry) != after.get(entry):
                    yield KeyDifference(f"{spelling}.{entry}", is_live)
        else:
            yield KeyDifference(spelling, is_live)


def _node_differences(old: tuple[NodeConfig, ...], new: tuple[NodeConfig, ...]) -> Iterator[KeyDifference]:
    before, after = ({node.name: node for node in nodes} for nodes in (old, new))
    for name in before | after:
        if name in before and name in after:
            yield from _section_differences(before[name], after[name], f"{NODES}.{name}.", live=False)
        else:
            yield KeyDifference(f"{NODES}.{name}", False)


def with_live_keys(old: ClusterConfig, new: ClusterConfig) -> ClusterConfig:
    """`old` with the live keys of `new`; all others keep their values."""
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
