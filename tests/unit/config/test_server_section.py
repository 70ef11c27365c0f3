"""Where the control plane listens, as a cluster file says it."""

import pytest

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.kinds.text import is_loopback


def test_without_a_word_it_is_this_machine_only():
    server = ClusterConfig.from_text("name: x").server
    assert (server.host, server.port, server.tls, server.force_plain, server.names) == (
        "127.0.0.1",
        None,
        None,
        False,
        (),
    )


def test_everything_can_be_said():
    text = "server: {host: 0.0.0.0, port: 1234, names: [a.example], tls: true, certificate: c.pem, key: k.pem}"
    config = ClusterConfig.from_text(text)
    assert (config.server.host, config.server.port, config.server.names) == ("0.0.0.0", 1234, ("a.example",))
    assert ClusterConfig.from_mapping(config.as_dict()).server == config.server


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("server: {host: 0.0.0.0, tls: false}", "leave tls on, or add force_plain: true"),
        ("server: {host: box, tls: no}", "leave tls on"),
        ("server: {tls: true, force_plain: true}", "the opposite of tls"),
        ("server: {certificate: c.pem}", "there is no key to go with it"),
        ("server: {key: c.pem}", "there is no certificate to go with it"),
        ("server: {port: 70000}", "a port number 0-65535"),
        ("server: {host: 'a b'}", "a host name or address"),
        ("server: {prot: 1}", "did you mean 'port'?"),
    ],
)
def test_what_contradicts_itself_is_told(text, told):
    with pytest.raises(ConfigProblems, match=told):
        ClusterConfig.from_text(text)


@pytest.mark.parametrize("text", ["server: {tls: false}", "server: {host: 10.0.0.1, tls: false, force_plain: true}"])
def test_plain_is_possible_on_this_machine_or_where_it_is_forced(text):
    assert ClusterConfig.from_text(text).server.tls is False


def test_only_loopback_is_loopback():
    assert all(map(is_loopback, ["local", "localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "127.a.b.c", "127.0.0.1.evil.example", "10.0.0.1", "box"]))
