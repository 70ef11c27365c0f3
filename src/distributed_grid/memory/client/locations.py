"""What the desk has said of a block: its size, its generation, and where its copies are."""

from __future__ import annotations

import base64
import binascii
from typing import Any, NamedTuple

from distributed_grid.errors import ProtocolError
from distributed_grid.wire import Endpoint, Ticket


class CopyLocation(NamedTuple):
    """One copy of a block: the server that has it, and the ticket for it. `line` names the way to that server: the same
    for all of its copies, and cheap to look up."""

    node: str
    copy: str
    endpoint: Endpoint
    ticket: Ticket
    on_disk: bool
    line: str


class BlockLocation(NamedTuple):
    """A block and its places; reads go to the first."""

    block_id: str
    size: int
    generation: int
    places: tuple[CopyLocation, ...]


def known_from(found: dict[str, Any]) -> BlockLocation:
    """The desk's answer as a value; ProtocolError where it is none."""
    try:
        block = found["block"]
        places = tuple(_place(entry) for entry in found["places"])
        known = BlockLocation(str(block["block_id"]), int(block["size"]), int(block["generation"]), places)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ProtocolError(f"an answer about a block that makes no sense: {error!r}") from None
    if not places:
        raise ProtocolError(f"block {known.block_id} is said to be nowhere")
    return known


def _place(entry: dict[str, Any]) -> CopyLocation:
    endpoint = Endpoint(
        str(entry["host"]),
        int(entry["port"]),
        str(entry.get("fingerprint") or ""),
        str(entry.get("path") or ""),
        str(entry.get("incarnation") or ""),
    )
    line = "|".join((endpoint.host, str(endpoint.port), endpoint.fingerprint, endpoint.path, endpoint.incarnation))
    ticket = Ticket(base64.b64decode(entry["claims"]), base64.b64decode(entry["secret"]))
    return CopyLocation(str(entry["node"]), str(entry["copy"]), endpoint, ticket, bool(entry.get("on_disk")), line)
