"""Which config a daemon uses, and what of it acts: all of a file that was named, nothing that acts of one found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import encode_row
from distributed_grid.errors import BadInput, Refused
from distributed_grid.ports import Batch, LiveRow
from distributed_grid.server.active_config import (
    MAX_NAMED,
    ConfigRegistry,
    NamedConfigs,
    SelectedConfig,
    save_selection,
    select_config,
)
from distributed_grid.state_dir import StateDir
from tests.support.builders import a_request

ACTING = """
trusted_network: true
alerts: {memory: 0.5, command: touch /tmp/x, webhook: "http://192.0.2.1/"}
server: {host: 0.0.0.0, port: 7000, names: [a], certificate: /c, key: /k}
logging: {file: /tmp/log}
ray: {python: /bin/python, dashboard_host: 0.0.0.0, auth: none}
nodes:
- {name: one, host: local, python: /bin/evil, ssh_key_path: /k, known_hosts: /h, accept_new: true, proxy_jump: x}
- {name: two, host: local, ray_python: /bin/evil, cpu_count: 3}
"""
KEYS = {
    *("trusted_network", "alerts.command", "alerts.webhook", "server.host", "server.port", "server.names"),
    *("server.certificate", "server.key", "logging.file", "ray.python", "ray.dashboard_host", "ray.auth"),
    *("nodes.python", "nodes.ssh_key_path", "nodes.known_hosts", "nodes.accept_new", "nodes.proxy_jump"),
    "nodes.ray_python",
}
Select = Callable[..., SelectedConfig]


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    found = StateDir(tmp_path / "state")
    found.create()
    return found


@pytest.fixture
def select(state_dir: StateDir) -> Select:
    return lambda path, explicit=False: select_config(str(path), explicit, InMemoryStore(), state_dir)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(ACTING)
    path.chmod(0o644)
    tmp_path.chmod(0o755)
    return path


def test_a_file_that_was_found_lends_but_does_not_act(select: Select, file: Path) -> None:
    selected = select(file)
    assert set(selected.inert) == KEYS
    config = selected.config
    assert (config.alerts.command, config.alerts.webhook, config.alerts.memory_high) == (None, None, 0.5)
    assert config.server == ClusterConfig.embedded("x").server
    assert [(node.python, node.ray_python, node.ssh_key_path) for node in config.nodes] == [(None, None, None)] * 2
    assert config.nodes[1].cpu_count == 3
    assert not config.trusted_network
    (note,) = selected.notes()
    assert note.endswith(f"act only once you have named that file: grid --config {file} daemon start")
    assert "192.0.2.1" not in note


def test_a_file_that_was_named_acts_also_when_it_is_found_later_but_not_once_it_has_changed(
    select: Select, file: Path, state_dir: StateDir
) -> None:
    named = select(file, True)
    assert (named.inert, named.notes(), named.config.alerts.command) == ((), [], "touch /tmp/x")
    assert select(file) == named
    (remembered,) = state_dir.host_dir.glob("named_configs.json")
    assert remembered.stat().st_mode & 0o777 == 0o600
    file.write_text(ACTING + "hold_seconds: 30\n")
    assert set(select(file).inert) == KEYS
    file.write_text(ACTING)
    assert select(file) == named
    copy = file.with_name("copy.yaml")
    copy.write_text(ACTING)
    assert set(select(copy).inert) == KEYS


def test_a_file_that_does_not_act_is_used_as_it_is(select: Select, file: Path) -> None:
    file.write_text("nodes: [{name: one, host: local}]\n")
    assert (select(file).inert, select(file).notes()) == ((), [])


def test_a_file_that_others_may_write_to_is_refused_until_it_is_named(select: Select, file: Path) -> None:
    file.chmod(0o646)
    with pytest.raises(Refused, match="everybody may write to it; to use it all the same: grid --config"):
        select(file)
    assert select(file, True).inert == ()
    assert select(file).inert == ()


def store_with(request: Request) -> InMemoryStore:
    """A store in which a lease is alive."""
    store, lease = InMemoryStore(), Lease(request.id, request, 1)
    store.commit(Batch([LiveRow(lease.kind, lease.id, encode_row(lease))]))
    return store


def test_the_config_of_living_work_is_trusted_no_further_than_any_other(
    select: Select, file: Path, state_dir: StateDir
) -> None:
    save_selection(select(file), state_dir, stay=False)
    busy = store_with(a_request("any"))
    assert set(select_config(None, False, busy, state_dir).inert) == KEYS
    file.chmod(0o646)
    with pytest.raises(Refused, match="everybody may write to it"):
        select_config(None, False, busy, state_dir)


def test_what_the_grid_borrowed_by_itself_keeps_no_config(select: Select, file: Path, state_dir: StateDir) -> None:
    save_selection(select(file), state_dir, stay=False)
    automatic = store_with(a_request("auto-gpu1-memory-1", user=GRID_USER, target="gpu1"))
    assert select_config(None, False, automatic, state_dir).path is None
    assert select_config(None, False, store_with(a_request("auto-mine")), state_dir).path == str(file)


def test_only_the_last_names_are_remembered_and_a_broken_memory_is_none(state_dir: StateDir) -> None:
    named = NamedConfigs(state_dir)
    for number in range(MAX_NAMED + 1):
        named.add(f"/{number}", "digest", "meaning")
    assert not named.has("/0", "digest", "meaning")
    assert named.has("/1", "digest", "meaning")
    assert not named.has("/1", "other", "other")
    (state_dir.host_dir / "named_configs.json").write_text("[1")
    assert not named.has("/1", "digest", "meaning")
    named.add("/1", "digest", "meaning")
    assert named.has("/1", "digest", "meaning")


def test_a_pipe_in_the_place_of_a_config_is_refused_at_once(select: Select, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for explicit in (False, True):
        with pytest.raises(BadInput, match="is no regular file"):
            select(tmp_path / "pipe.yaml", explicit)


def test_a_worker_of_a_provider_has_no_owner_and_lends_whatever_runs_beside_it(tmp_path: Path) -> None:
    config = ClusterConfig.from_text("name: lab")
    registry = ConfigRegistry(config, tmp_path, is_worker=lambda name: name == "worker-1")
    worker, stranger = registry.newcomer("worker-1"), registry.newcomer("stranger")
    assert worker is not None
    assert stranger is not None
    assert (worker.thresholds, registry.owner_rules("worker-1")) == (None, None)
    assert stranger.thresholds is not None
    assert registry.owner_rules("stranger") is not None
