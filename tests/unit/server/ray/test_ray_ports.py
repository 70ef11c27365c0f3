"""The ports of Ray where several of its nodes share a machine."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.config.sections import Ray
from distributed_grid.errors import Refused
from distributed_grid.server.ray.ray_ports import RayPorts, next_free_port, worker_ports

SIMULATED = [{"name": "a", "host": "local", "role": "head"}, {"name": "b", "host": "local"}]


def config(nodes: object = SIMULATED, **ray: int) -> ClusterConfig:
    return ClusterConfig.from_mapping({"nodes": nodes, "ray": ray})


def test_a_default_port_that_is_taken_is_replaced_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "ray" / "ports.json"
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody has it already
            other.bind(("", Ray().port))
            other.listen()
        RayPorts(config(), path).choose()
        chosen = RayPorts(config(), path).settings
        assert chosen.port > Ray().port
        assert chosen.client_port >= Ray().client_port
    assert RayPorts(config(), path).settings == chosen  # also when the other one is gone


def test_a_port_that_was_taken_meanwhile_is_chosen_again(tmp_path: Path) -> None:
    ports = RayPorts(config(), tmp_path / "ports.json")
    ports.choose()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody was quicker
            other.bind(("", ports.settings.port))
            other.listen()
        before = ports.settings
        assert ports.choose()
        assert ports.settings.port > before.port


def test_a_port_that_the_config_names_stays(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = RayPorts(config(port=taken), tmp_path / "ports.json")
        ports.choose()
    assert ports.settings.port == taken


def test_the_next_free_port_is_one_that_nobody_listens_on() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert taken < next_free_port(taken) < taken + 100


def test_between_machines_the_ports_are_those_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    far = config([{"name": "a", "host": "10.0.0.1", "role": "head"}, {"name": "b", "host": "local"}])
    RayPorts(far, path).choose()
    assert not path.exists()
    path.write_text('{"port": 1234}')
    assert RayPorts(far, path).settings == far.ray


def test_a_file_that_says_nothing_leaves_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    path.write_text("not JSON")
    assert RayPorts(config(), path).settings == Ray()


def test_workers_get_any_free_port_unless_the_config_has_a_range_which_is_divided() -> None:
    assert worker_ports(Ray(), 1, 3) == (0, 0)
    ray = Ray(min_worker_port=30000, max_worker_port=30299)
    assert [worker_ports(ray, place, 3) for place in range(3)] == [(30000, 30099), (30100, 30199), (30200, 30299)]
    with pytest.raises(Refused, match="too few ports for 3 nodes"):
        worker_ports(Ray(min_worker_port=30000, max_worker_port=30001), 0, 3)
