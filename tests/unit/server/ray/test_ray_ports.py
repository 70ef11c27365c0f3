"""The ports of Ray where several of its nodes share a machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.config.sections import Ray
from distributed_grid.errors import Refused
from distributed_grid.server.ray.ray_ports import RayPorts, next_free_port, worker_ports

Ports = Callable[..., RayPorts]
SIMULATED = [{"name": "a", "host": "local", "role": "head"}, {"name": "b", "host": "local"}]


def config(nodes: object = SIMULATED, **ray: int) -> ClusterConfig:
    return ClusterConfig.from_mapping({"nodes": nodes, "ray": ray})


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[Ports]:
    """The ports of a config, by default in one file; reserved ones are released after the test."""
    made: list[RayPorts] = []

    def make(cluster: ClusterConfig, name: str = "ray/ports.json") -> RayPorts:
        made.append(RayPorts(cluster, tmp_path / name))
        return made[-1]

    yield make
    for one in made:
        one.release()


def test_two_clones_that_choose_at_once_do_not_choose_the_same_port(ports: Ports) -> None:
    one, other = ports(config(), "one"), ports(config(), "other")
    one.choose()
    other.choose()
    assert one.settings.port < other.settings.port
    assert one.settings.dashboard_port < other.settings.dashboard_port
    third = ports(config(), "one")
    third.reserve()  # harmless, though another has them
    chosen = one.settings
    one.release()
    one.release()
    third.reserve()
    one.choose()
    assert one.settings.port not in (chosen.port, other.settings.port)


def test_a_default_port_that_is_taken_is_replaced_and_kept(ports: Ports) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody has it already
            other.bind(("", Ray().port))
            other.listen()
        ports(config()).choose()
        chosen = ports(config()).settings
        assert chosen.port > Ray().port
        assert chosen.client_port >= Ray().client_port
    assert ports(config()).settings == chosen  # also when the other one is gone


def test_a_port_that_was_taken_meanwhile_is_chosen_again(ports: Ports) -> None:
    mine = ports(config())
    mine.choose()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody was quicker
            other.bind(("", mine.settings.port))
            other.listen()
        before = mine.settings
        assert mine.choose()
        assert mine.settings.port > before.port


def test_a_port_that_the_config_names_stays(ports: Ports) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        mine = ports(config(port=taken))
        mine.choose()
    assert mine.settings.port == taken


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
