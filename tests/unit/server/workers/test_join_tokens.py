"""Join tokens of workers: the same one again, good once and for one name, worthless after the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from distributed_grid.agent.join_client import JoinToken
from distributed_grid.api.requests import JoinRequest
from distributed_grid.errors import Refused
from distributed_grid.server.access.admission import Admission, AdvertisedAddress
from distributed_grid.server.access.tokens import TokenStore
from distributed_grid.server.workers.worker_reconciler import KEY_FILE, WorkerJoinTokens


def tokens_in(folder: Path, *addresses: str) -> WorkerJoinTokens:

    async def advertise() -> AdvertisedAddress:
        return AdvertisedAddress(addresses or ("10.0.0.1:7433",), "0" * 64)

    admission = Admission(
        TokenStore(folder),
        configured=["head"],
        advertise=advertise,
        disconnect=lambda node: None,
    )
    return WorkerJoinTokens(folder, admission)


def test_the_token_of_a_worker_is_the_same_after_a_restart_and_differs_between_workers(tmp_path: Path) -> None:
    first = asyncio.run(tokens_in(tmp_path).issue("worker-1", 60))
    assert asyncio.run(tokens_in(tmp_path).issue("worker-1", 60)) == first
    other = asyncio.run(tokens_in(tmp_path).issue("worker-2", 60))
    assert JoinToken.parse(other).secret != JoinToken.parse(first).secret
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert JoinToken.parse(first).secret not in (tmp_path / "tokens.json").read_text()


def test_it_lets_a_node_of_that_name_join_once_and_nobody_after_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        tokens = tokens_in(tmp_path)
        text = await tokens.issue("worker-1", 60)
        admission = tokens._admission
        with pytest.raises(Refused, match="is for the node worker-1"):
            await admission.join(JoinRequest(text, "a" * 64, node="worker-9"))
        joined = await admission.join(JoinRequest(text, "a" * 64))
        assert joined.node == "worker-1"
        with pytest.raises(Refused, match="was used already"):
            await admission.join(JoinRequest(text, "b" * 64))
        await tokens.revoke("worker-1")
        with pytest.raises(Refused, match="was revoked"):
            await admission.join(JoinRequest(text, "a" * 64))
        await tokens.revoke("worker-1")
        await tokens.revoke("worker-never")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("addresses", "is_loopback"),
    [
        (("127.0.0.1:7433",), True),
        (("localhost:1", "[::1]:7433"), True),
        (("10.0.0.1:7433",), False),
        (("box.example.org:7433", "127.0.0.1:7433"), False),
    ],
)
def test_whether_only_this_machine_reaches_it(tmp_path: Path, addresses: tuple[str, ...], is_loopback: bool) -> None:
    assert asyncio.run(tokens_in(tmp_path, *addresses).is_loopback_only()) == is_loopback
