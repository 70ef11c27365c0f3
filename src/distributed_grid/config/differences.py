"""Differences between two configs by meaning: which keys have other values, and which of them can change live.

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
from distributed_grid.config.key_tables import KeyTable, Section
from distributed_grid.config.sections import NodeConfig
from distributed_grid.config.value_kinds import Secret

NODES = "nodes"
SectionT = TypeVar("SectionT", bound=Section)


class KeyDifference(NamedTuple):
    """A key with two values; `live`: a running control plane takes the other value over."""

    key: str
    live: bool


def meaning_digest(config: ClusterConfig) -> str:
    """Digest of all values, secrets included; the same for two files that mean the same."""
    content = msgspec.json.encode(replace(config, warnings=()), enc_hook=_encode_secret, order="deterministic")
    return hashlib.sha256(content).hexdigest()


def _encode_secret(value: Any) -> str:
    assert isinstance(value, Secret)
    return value.reveal()


def differences(old: ClusterConfig, new: ClusterConfig) -> list[KeyDifference]:
    """The keys with other values in `new`, in the order of the key table."""
    found = list(_table_differences(ClusterConfig.key_table, old, new, "", live=False))
    if not any(key.startswith(NODES) for key, _ in found) and old.head.name != new.head.name:
        found.append(KeyDifference(NODES, False))
    return found


def with_live_keys(old: ClusterConfig, new: ClusterConfig) -> ClusterConfig:
    """`old` with the live keys of `new`; all others keep their values."""
    return replace(_merged(old, new), warnings=new.warnings)


def _table_differences(table: KeyTable, old: Any, new: Any, path: str, *, live: bool) -> Iterator[KeyDifference]:
    for key in table.keys:
        if key.overrides:
            continue
        values = _value_of(old, key.field), _value_of(new, key.field)
        if values[0] == values[1]:
            continue
        name, is_live = f"{path}{key.spellings[0]}", live or key.live
        if isinstance(values[0], Section) and isinstance(values[1], Section):
            yield from _table_differences(values[0].key_table, *values, f"{name}.", live=is_live)
        elif name == NODES:
            yield from _node_differences(*values)
        elif isinstance(values[0], dict) and isinstance(values[1], dict):
            for entry in sorted(values[0].keys() | values[1].keys()):
                if values[0].get(entry) != values[1].get(entry):
                    yield KeyDifference(f"{name}.{entry}", is_live)
        else:
            yield KeyDifference(name, is_live)


def _value_of(section: Any, field: str) -> Any:
    for name in field.split("."):
        section = getattr(section, name)
    return section


def _node_differences(old: tuple[NodeConfig, ...], new: tuple[NodeConfig, ...]) -> Iterator[KeyDifference]:
    before, after = ({node.name: node for node in nodes} for nodes in (old, new))
    for name in [*before, *(name for name in after if name not in before)]:
        if name in before and name in after:
            yield from _table_differences(
                NodeConfig.key_table, before[name], after[name], f"{NODES}.{name}.", live=False
            )
        else:
            yield KeyDifference(f"{NODES}.{name}", False)


def _merged(old: SectionT, new: SectionT) -> SectionT:
    changes: dict[str, Any] = {}
    for name, declared in old.settings.items():
        before, after = getattr(old, name), getattr(new, name)
        if declared.live:
            changes[name] = after
        elif name == NODES:
            named = {node.name: node for node in after}
            changes[name] = tuple(_merged(node, named[node.name]) if node.name in named else node for node in before)
        elif isinstance(before, Section) and isinstance(after, Section):
            changes[name] = _merged(before, after)
    return replace(old, **changes)
