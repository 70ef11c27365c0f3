"""How Ray is started, as a cluster file says it."""

import pytest

from distributed_grid.config import ClusterConfig, ConfigProblems


def test_without_a_word_there_is_a_token_and_the_dashboard_is_for_the_head_alone():
    ray = ClusterConfig.from_text("name: x").ray
    assert (ray.auth, ray.dashboard_host, ray.port, ray.client_port, ray.dashboard_port, ray.python, ray.tls) == (
        *("token", "127.0.0.1", 6379, 10001, 8265, None, False),
    )


def test_everything_can_be_said():
    text = (
        "ray: {python: ~/ray/bin/python, port: 7000, client_port: 7001, dashboard_port: 7002, dashboard_host: 0.0.0.0, "
        "min_worker_port: 7100, max_worker_port: 7200, object_store_memory_gb: 0.5, auth: token, tls: true}\n"
        "nodes: [{name: a, ray_python: /opt/ray/bin/python, ray_address: 10.0.0.1}]"
    )
    config = ClusterConfig.from_text(text)
    assert (config.ray.object_store_memory_bytes, config.ray.max_worker_port) == (512 * 1024**2, 7200)
    assert (config.nodes[0].ray_python, config.nodes[0].ray_address) == ("/opt/ray/bin/python", "10.0.0.1")
    assert ClusterConfig.from_mapping(config.as_dict()) == config


def test_ray_without_a_token_is_warned_about():
    assert "run anything as you" in ClusterConfig.from_text("ray: {auth: none}").warnings[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ray: {port: 0}", "a port number 1-65535"),
        ("ray: {auth: password}", "one of token, none"),
        ("ray: {tls: 1}", "true or false"),
        ("ray: {dashboard_host: 'a b'}", "a host name or address"),
        ("ray: {object_store_memory_gb: 0}", "more than 0"),
        ("ray: {min_worker_port: 21000}", "must be at most max_worker_port 20999"),
        ("ray: {client_port: 20500}", "20500 is taken by the ports of the workers"),
        ("ray: {dashboard_port: 6379}", "6379 is taken by port"),
        ("ray: {pyhton: x}", "did you mean 'python'"),
        ("nodes: [{name: a, ray_address: 'ana@b'}]", "a host name or address alone"),
    ],
)
def test_what_makes_no_sense_is_told(text, told):
    with pytest.raises(ConfigProblems, match=told):
        ClusterConfig.from_text(text)
