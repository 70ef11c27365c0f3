"""Key tables: any document loads or is refused, what loads shows as what loads again, and every key is documented."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.key_tables import KeyTable, ListOf, MapOf
from distributed_grid.config.providers import PROVIDERS, ProviderSettings
from distributed_grid.config.sections import PROVIDER_NAME, ResourceSharing
from distributed_grid.config.value_kinds import (
    CUSTOM_NAME,
    JUMPS,
    LOGIN,
    NODE_NAME,
    Amount,
    Count,
    Flag,
    HostAddress,
    OneOf,
    Percent,
    PlainNumber,
    Ratio,
    Seconds,
    SecretText,
)
from tests.support.project import PROJECT

NAMES = ["ana", "box-1", "x.y", "n0", "a_b"]
TEXTS = ["a b", "no", "12", "ü: #", "$${x}", "~", "'q'", "{", "*a", "☃"]


def sound(kind: Any, rng: random.Random) -> Any:
    """A value that fits a kind."""
    match kind:
        case KeyTable():
            return a_table(kind, rng)
        case ListOf():
            items = [sound(kind.kind, rng) for _ in range(rng.randrange(3))]
            named = {item["name"] if isinstance(item, dict) and "name" in item else str(item): item for item in items}
            return list(named.values())
        case MapOf():
            return {sound(kind.name, rng): sound(kind.kind, rng) for _ in range(rng.randrange(3))}
        case Flag():
            return rng.random() < 0.5
        case OneOf():
            return rng.choice(kind.words)
        case Ratio():
            return rng.random()
        case Percent():
            return round(rng.uniform(2, 100), rng.randrange(4))
        case Count():
            return rng.randint(kind.low, min(kind.high, 2000))
        case Amount() | PlainNumber() | Seconds():
            return round(rng.uniform(2, 5000), rng.randrange(4))
        case ProviderSettings():
            return {"docker_local": {"image": "a:${TAG}", "cpu_limit": 2, "memory_limit": "1.5g"}}
        case SecretText():
            return "https://example.org/x"
        case HostAddress():
            return rng.choice(["local", "10.0.0.1", "box", "fe80::1"])
    if kind == CUSTOM_NAME:
        return rng.choice(["tpu", "fpga"])
    return rng.choice(NAMES if kind in (LOGIN, NODE_NAME, JUMPS, PROVIDER_NAME) else TEXTS)


def a_table(table: KeyTable, rng: random.Random) -> dict[str, Any]:
    """A mapping with some of a table's keys, each in one of its spellings."""
    tree: dict[str, Any] = {}
    for entry in table.keys:
        spelling = rng.choice(entry.spellings)
        if spelling not in table.required and rng.random() < 0.6:
            continue
        *way, last = spelling.split(".")
        inner = tree
        for part in way:
            inner = inner.setdefault(part, {})
        inner[last] = sound(entry.kind, rng)
    return tree


def survives(tree: dict[str, Any]) -> bool:
    """Whether the values agree with each other; if they do, showing them loses nothing."""
    try:
        config = ClusterConfig.from_text(json.dumps(tree, ensure_ascii=False), env={})
    except ConfigProblems as refused:
        if any("found" in problem.message and "lists" not in problem.message for problem in refused.problems):
            raise
        return False
    shown = json.loads(json.dumps(config.as_dict(), allow_nan=False))
    if config.alerts.webhook is not None:
        assert shown["alerts"].pop("webhook") == "***"
        config = replace(config, alerts=replace(config.alerts, webhook=None))
    again = ClusterConfig.from_mapping(shown, env={})
    assert replace(again, warnings=config.warnings) == config
    return True


def test_any_cluster_shows_as_what_loads_to_the_same():
    assert sum(survives(a_table(ClusterConfig.key_table, random.Random(seed))) for seed in range(600)) > 60


def test_any_two_sharing_sections_come_to_one_that_loads_to_the_same():
    kept = 0
    for seed in range(400):
        rng = random.Random(seed)
        top, inner = a_table(ResourceSharing.key_table, rng), a_table(ResourceSharing.key_table, rng)
        kept += survives({"resource_sharing": top, "execution": {"resource_sharing": inner}})
    assert kept > 60


SOUND = [path.read_text() for folder in ("config", "tests/fixtures/seeds") for path in (PROJECT / folder).iterdir()]


def names_in(kind: object) -> set[str]:
    """Every name that means something somewhere in a cluster file."""
    if isinstance(kind, KeyTable):
        names = {part for entry in kind.keys for spelling in entry.spellings for part in spelling.split(".")}
        return names.union(*(names_in(entry.kind) for entry in kind.keys))
    return names_in(kind.kind) if isinstance(kind, ListOf | MapOf) else set()


KEY_NAMES = sorted(
    names_in(ClusterConfig.key_table) | {"aws", "gcp", "docker_local", "region", "credentials", "memory_limit"}
)
WORDS = st.sampled_from(["local", "a", "head", "balanced", "throttle", "16g", "${X}", "${", "no", "json", "tpu"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEY_NAMES) | WORDS, inner, max_size=5),
    max_leaves=25,
)
DOCUMENTS = st.dictionaries(st.sampled_from(KEY_NAMES), TREES, max_size=6)


def load_or_refuse(text: str) -> ClusterConfig | None:
    try:
        return ClusterConfig.from_text(text, "c.yaml", env={"X": "1"})
    except ConfigProblems as refused:
        lines = [str(problem) for problem in refused.problems]
    assert lines
    assert all(line.isprintable() for line in lines)
    return None


def assert_shows_and_loads_again(config: ClusterConfig) -> None:
    shown = json.loads(json.dumps(config.as_dict(), allow_nan=False))
    plain = replace(config, warnings=(), alerts=replace(config.alerts, webhook=None))
    shown.get("alerts", {}).pop("webhook", None)
    again = ClusterConfig.from_mapping(shown, env={"X": "1"})
    if not config.providers:
        assert replace(again, warnings=()) == plain


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_any_text_loads_or_is_refused(text):
    load_or_refuse(text)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_any_tree_of_known_words_loads_or_is_refused_and_shows_what_it_loaded(tree):
    text = yaml.safe_dump(tree, allow_unicode=True)
    if config := load_or_refuse(text):
        assert_shows_and_loads_again(config)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_sound_file_with_any_piece_changed_loads_or_is_refused(data):
    text = data.draw(st.sampled_from(SOUND))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        piece = st.sampled_from(["\n", ": ", "- ", "[", "}", "&a ", "*a", "'", "!x ", "${", "  ", "0", "-1", "<<: "])
        text = text[:at] + data.draw(piece | st.text(max_size=3)) + text[at + cut :]
    if config := load_or_refuse(text):
        assert_shows_and_loads_again(config)


TEXT = (PROJECT / "docs/reference/configuration.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def keys_of(kind: object) -> set[str]:
    """Every dotted spelling of a table and of the tables within it, each from its own table on."""
    if isinstance(kind, KeyTable):
        own = {spelling for entry in kind.keys for spelling in entry.spellings}
        return own.union(*(keys_of(entry.kind) for entry in kind.keys))
    return keys_of(kind.kind) if isinstance(kind, ListOf | MapOf) else set()


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_loads_without_a_warning(block):
    assert ClusterConfig.from_text(block, env={"USER": "ana"}).warnings == ()


def test_there_are_blocks():
    assert len(BLOCKS) > 5


def test_every_key_and_spelling_is_written_down():
    keys = keys_of(ClusterConfig.key_table).union(*(keys_of(one.key_table) for one in PROVIDERS.values()))
    # "Every … key may also be written without `_seconds`" covers those.
    keys -= {name.removesuffix("_seconds") for name in keys if name.endswith("_seconds")}
    written = set(re.findall(r"`([A-Za-z_.]+)`", TEXT))
    ends = {name[at + 1 :] for name in written for at in range(-1, len(name)) if at < 0 or name[at] == "."}
    # The idle thresholds have a table of their own, so they stand there without the section's name.
    missing = {name for name in keys if name not in ends and name.removeprefix("thresholds.") not in ends}
    assert missing == set()


def test_the_error_lines_shown_are_the_ones_told():
    text = """\
# a cluster with
# three mistakes
name: lab

nodes:
- name: a
  port: abc
- name: b
  memmory_gb: 4

resource_sharing:

  thresholds:
    cpu_pressure_high: 80
"""
    with pytest.raises(ConfigProblems) as caught:
        ClusterConfig.from_text(text, "config/lab.yaml")
    assert f"```text\n{caught.value}\n```" in TEXT


def test_python_blocks_are_valid_python():
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        compile(block, "docs/reference/configuration.md", "exec")
