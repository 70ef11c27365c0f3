"""Where the port may be, and which port an address without a named one gets."""

from __future__ import annotations

import socket

import pytest

from distributed_grid.errors import BadInput, GridError
from distributed_grid.server.rest.listener import DEFAULT_PORT, Address, host_port, own_addresses, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]:80", "::1", 80),
        ("::1", "::1", None),
        ("localhost", "localhost", None),
        ("box.example.org:0", "box.example.org", 0),
        (":7433", "0.0.0.0", 7433),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int | None) -> None:
    found = parse_address(text)
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("text", ["", "x:y", "x:70000", "http://x:1", "a b:1", "u@x:1", "x:-1", "[]:1x", "x:٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="expected HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "box", "127.a.b.example", "1270.0.0.1")],
)
def test_only_loopback_is_local(host: str, is_local: bool) -> None:
    assert Address(host).is_local is is_local


def test_where_the_usual_port_is_taken_this_machine_gets_another() -> None:
    first = Address().bind()
    second = Address().bind()
    try:
        assert second.getsockname()[1] not in (DEFAULT_PORT, first.getsockname()[1])
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("port", [None, 0])
def test_a_remembered_port_is_tried_first_unless_another_one_is_named(port: int | None) -> None:
    with Address(port=0).bind() as probe:
        remembered = probe.getsockname()[1]
    with Address(port=port).bind(remembered) as listener:
        assert listener.getsockname()[1] == remembered
        with Address(port=port).bind(remembered) as other:
            assert other.getsockname()[1] != remembered
    with Address(port=0).bind() as probe:
        named = probe.getsockname()[1]
    with Address(port=named).bind(remembered) as listener:
        assert listener.getsockname()[1] == named


def test_a_port_that_was_named_is_had_or_the_failure_is_told() -> None:
    with Address(port=0).bind() as taken, pytest.raises(GridError, match=r"cannot listen on 127\.0\.0\.1"):
        Address(port=taken.getsockname()[1]).bind()


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(GridError, match="cannot listen on"):
        Address("203.0.113.7", 0).bind()


@pytest.mark.parametrize("host", ["x" * 64, "a..b", "\U0010ffff"])
def test_what_no_host_can_be_called_is_refused(host: str) -> None:
    with pytest.raises(BadInput, match="no name of a host"):
        Address(host, 0).bind()


def test_a_listener_is_passed_on_to_nobody_and_never_blocks() -> None:
    with Address(port=0).bind() as listener:
        assert not listener.get_inheritable()
        assert not listener.getblocking()


def test_addresses_are_written_as_they_are_read() -> None:
    assert host_port("::1", 80) == "[::1]:80"
    assert parse_address(host_port("10.0.0.1", 80)) == Address("10.0.0.1", 80)


def test_own_addresses_are_addresses_of_other_interfaces_than_loopback() -> None:
    for address in own_addresses():
        assert len(socket.inet_aton(address)) == 4
        assert not address.startswith("127.")
