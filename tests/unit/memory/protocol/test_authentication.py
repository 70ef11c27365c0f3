"""Content of a ticket, and its protection against forgery."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.frames import READ, WRITE, TicketClaims, issue_ticket, read_claims

SOME = TicketClaims("mem-1:1", 3, 4096, READ | WRITE, 1000, 0, "abc")


def test_a_ticket_says_what_was_claimed() -> None:
    assert read_claims(issue_ticket(b"k" * 32, SOME).claims) == SOME


def test_the_secret_depends_on_the_key_and_on_every_claim() -> None:
    secrets = {issue_ticket(b"k" * 32, SOME).secret, issue_ticket(b"j" * 32, SOME).secret}
    for change in ({"copy": "mem-2:1"}, {"generation": 4}, {"size": 8192}, {"rights": READ}, {"expires_boot_ms": 2}):
        secrets.add(issue_ticket(b"k" * 32, msgspec.structs.replace(SOME, **change)).secret)
    assert len(secrets) == 7


def test_a_ticket_does_not_show_its_secret() -> None:
    ticket = issue_ticket(b"k" * 32, SOME)
    assert ticket.secret.hex() not in repr(ticket)
    assert repr(ticket.secret) not in repr(ticket)


@pytest.mark.parametrize(
    "change",
    [
        {"copy": ""},
        {"copy": "../../etc/passwd"},
        {"copy": "a" * 201},
        {"size": 0},
        {"size": -1},
        {"size": 2**46 + 1},
        {"rights": 8},
        {"rights": -1},
        {"generation": -1},
        {"expires_boot_ms": 2**63 - 1},
        {"ends_boot_ms": -5},
        {"incarnation": "a/b"},
    ],
)
def test_claims_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        read_claims(issue_ticket(b"k", msgspec.structs.replace(SOME, **change)).claims)


@given(st.binary(max_size=1200))
def test_rubbish_is_refused_and_nothing_else_happens(data: bytes) -> None:
    try:
        found = read_claims(data)
    except ProtocolError:
        return
    assert 1 <= found.size <= 2**46
