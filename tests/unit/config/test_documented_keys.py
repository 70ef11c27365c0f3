"""What docs/reference/configuration.md says is so: its blocks load, and no key or spelling is missing from it."""

import re

import pytest

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.key_tables import KeyTable, ListOf, MapOf
from distributed_grid.config.providers import PROVIDERS
from tests.support.project import PROJECT

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
