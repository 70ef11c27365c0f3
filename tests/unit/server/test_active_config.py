"""Which config a daemon uses, and what of it acts: all of a file that was named, nothing that acts of one found."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.events import NodeDeclared
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import encode_row
from distributed_grid.errors import BadInput, Refused
from distributed_grid.ports import Batch, LiveRow
from distributed_grid.server.active_config import (
    MAX_NAMED,
    ConfigRegistry,
    NamedConfigs,
    SelectedConfig,
    compare_config,
    declare_nodes,
    save_selection,
    select_config,
)
from distributed_grid.state_dir import StateDir
from tests.support.builders import a_capacity, a_request
from tests.unit.server.in_process_grid import InProcessGrid

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
    store, lease = InMemoryStore(), Lease(id=request.id, request=request, asked_at_ms=1)
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


def test_a_named_file_that_means_the_same_acts_though_its_bytes_have_changed(select: Select, file: Path) -> None:
    select(file, explicit=True)
    file.write_text(f"# a comment\n{ACTING}")
    assert select(file).inert == ()
    file.write_text(ACTING.replace("touch /tmp/x", "touch /tmp/y"))
    assert set(select(file).inert) == KEYS


def test_living_work_is_found_again_under_the_last_config_where_its_file_is_gone(
    select: Select, file: Path, state_dir: StateDir
) -> None:
    save_selection(select(file, explicit=True), state_dir, stay=False)
    busy = store_with(a_request("any"))
    file.write_text("nodes: [")
    found = select_config(str(file), True, busy, state_dir)
    assert [node.name for node in found.config.nodes] == ["one", "two"]
    (note,) = found.notes()
    assert note.startswith(f"{file}:2: not YAML")
    assert note.endswith("; the control plane goes on with the config it has read before")
    file.unlink()
    assert select_config(None, False, busy, state_dir).problem == f"{file}: no such file"
    with pytest.raises(BadInput, match="no such file"):  # nothing is alive that would need it
        select(file, explicit=True)


def test_none_is_this_machine_alone(state_dir: StateDir) -> None:
    found = select_config("none", True, InMemoryStore(), state_dir)
    assert (found.path, len(found.config.nodes)) == (None, 1)
    assert compare_config(found, "none", {}).keys == ()


def test_a_found_file_contradicts_itself_in_nothing_once_it_is_named(select: Select, file: Path) -> None:
    compared = compare_config(select(file), str(file), {})
    assert compared.live == ["alerts.command", "alerts.webhook"]
    assert "nodes.one.python" in compared.fixed
    assert compared.blocking == []


def test_a_variable_that_the_caller_does_not_have_keeps_its_value(
    select: Select, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRID_TEST_CPUS", "2")
    file.write_text("nodes: [{name: one, host: far, resource_sharing: {max_share_cpu: '${GRID_TEST_CPUS}'}}]\n")
    selected = select(file, explicit=True)
    assert compare_config(selected, str(file), {}).keys == ()
    assert compare_config(selected, str(file), {"GRID_TEST_CPUS": "3"}).live == [
        "nodes.one.resource_sharing.max_share_cpu"
    ]


async def _declared(*texts: str) -> Node:
    """The node gpu1 after these configs, one after the other."""
    grid = InProcessGrid().grid
    await grid.start()
    for text in texts:
        await declare_nodes(grid, ClusterConfig.from_text(text), a_capacity(cores=2, memory_gb=4))
    node = await grid.read(lambda ledger, now: ledger.nodes["gpu1"])
    await grid.stop()
    return node


SIMULATED = """
nodes:
- {name: gpu1, host: local, cpu_count: 64, memory_gb: 512, gpu_count: 8, custom: {tpu: 4}, labels: {rack: x}, tags: [t]}
- {name: gpu2, host: local}
"""


@pytest.mark.parametrize("host", ["gpu1.lan", "local"])
def test_nothing_of_a_simulated_node_stays_behind_for_a_real_one_of_the_same_name(host: str) -> None:
    real = f"nodes: [{{name: gpu1, host: {host}}}]\n"
    assert asyncio.run(_declared(SIMULATED)).capacity.cpu_milli == 64_000
    assert asyncio.run(_declared(SIMULATED, real)) == asyncio.run(_declared(real))


def test_a_node_on_another_machine_keeps_the_capacity_that_its_agent_reported() -> None:
    async def restarted() -> int:
        grid = InProcessGrid().grid
        await grid.start()
        config = ClusterConfig.from_text("nodes: [{name: gpu1, host: gpu1.lan}]")
        await declare_nodes(grid, config, a_capacity(cores=2))
        node = await grid.read(lambda ledger, now: ledger.nodes["gpu1"])
        await grid.handle(NodeDeclared(replace(node, capacity=a_capacity(cores=8))))
        await declare_nodes(grid, config, a_capacity(cores=2))
        milli: int = await grid.read(lambda ledger, now: ledger.nodes["gpu1"].capacity.cpu_milli)
        await grid.stop()
        return milli

    assert asyncio.run(restarted()) == 8000
