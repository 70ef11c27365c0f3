"""What Ray is told on each node, and which versions go together."""

from __future__ import annotations

import pytest

from distributed_grid.config.sections import Ray
from distributed_grid.errors import Refused
from distributed_grid.server.ray.ray_nodes import check_versions, security_risk, shared_machine_options, start_options
from tests.support.builders import a_capacity

RAY = Ray(object_store_memory_bytes=123)


def options_of(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def test_the_head_is_told_its_ports_and_the_workers_where_it_is() -> None:
    has = a_capacity(cores=2.5, memory_gb=4, gpus=2, custom={"tpu": 3})
    first, *words = start_options("gpu1", "10.0.0.1", "", RAY, has)
    head = options_of(words)
    assert first == "--head"
    assert (head["--num-cpus"], head["--num-gpus"], head["--memory"]) == ("2", "2", str(4 * 1024**3))
    assert (head["--node-name"], head["--labels"], head["--resources"]) == ("gpu1", "grid-node=gpu1", '{"tpu": 3}')
    assert (head["--port"], head["--dashboard-host"], head["--ray-client-server-port"]) == (
        "6379",
        "127.0.0.1",
        "10001",
    )
    worker = options_of(start_options("gpu2", "10.0.0.2", "10.0.0.1:6379", RAY, a_capacity(cores=0.5)))
    assert (worker["--address"], worker["--num-cpus"]) == ("10.0.0.1:6379", "1")
    assert not {"--port", "--dashboard-host", "--include-dashboard"} & set(worker)


def test_nodes_on_one_machine_have_no_port_in_common() -> None:
    ranged = Ray(min_worker_port=30000, max_worker_port=30099)
    first, second = (options_of(shared_machine_options(ranged, place, 2)) for place in range(2))
    assert (first["--min-worker-port"], first["--max-worker-port"]) == ("30000", "30049")
    assert (second["--min-worker-port"], second["--max-worker-port"]) == ("30050", "30099")
    chosen = options_of(shared_machine_options(RAY, 0, 2))
    assert {*chosen.values()} == {"0"}  # whatever is free
    assert {"--node-manager-port", "--object-manager-port", "--dashboard-agent-listen-port"} < {*chosen}


def test_versions_may_differ_in_pythons_last_number_and_nowhere_else() -> None:
    check_versions({"a": ("3.11.4", "2.60.0"), "b": ("3.11.9", "2.60.0")})
    for other in (("3.12.4", "2.60.0"), ("3.11.4", "2.59.0")):
        with pytest.raises(Refused, match=f"b: Python {other[0]}, Ray {other[1]}") as caught:
            check_versions({"a": ("3.11.4", "2.60.0"), "b": other})
        assert len(caught.value.reasons) == 2


def test_only_a_ray_without_a_token_is_a_risk() -> None:
    assert security_risk(Ray()) is None
    assert "whoever reaches its ports" in str(security_risk(Ray(auth="none")))
