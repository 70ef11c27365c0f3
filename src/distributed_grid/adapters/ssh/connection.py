"""Connecting to a node: its options, the hops before it, the keys, and the host key of each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncssh

from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import Hop, Target, jump_of
from distributed_grid.adapters.ssh.host_keys import HostKeyCheck, KnownHosts

KEEPALIVE_SECONDS, KEEPALIVES = 5, 3
MOST_HOPS = 5
CONNECT_SECONDS = 10.0


class SshConnection:
    """An SSH connection to a node, with the ones it runs through."""

    def __init__(self, chain: Sequence[asyncssh.SSHClientConnection]) -> None:
        self._chain = list(chain)
        self.ssh = self._chain[-1]

    @property
    def is_closed(self) -> bool:
        return any(connection.is_closed() for connection in self._chain)

    async def wait_closed(self) -> None:
        """Return when it has ended, by itself or not."""
        waits = [asyncio.ensure_future(connection.wait_closed()) for connection in self._chain]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def close(self) -> None:
        """Hang up, the far end first; safe to call twice."""
        for connection in reversed(self._chain):
            connection.close()
            with contextlib.suppress(TimeoutError, OSError, asyncssh.Error):
                async with asyncio.timeout(2):
                    await connection.wait_closed()


async def dial(target: Target, auth_sock: str) -> SshConnection:
    """A connection to a node; raises Failed with one sentence that says what is wrong."""
    hops = [*target.via, target.hop]
    chain: list[asyncssh.SSHClientConnection] = []
    try:
        for hop in hops:
            await _extend(chain, hop, auth_sock)
    except BaseException:
        if chain:
            await SshConnection(chain).close()
        raise
    return SshConnection(chain)


async def _extend(chain: list[asyncssh.SSHClientConnection], hop: Hop, auth_sock: str) -> None:
    """One more connection, through the last one where there is one."""
    user, port = hop.user, hop.port or 22
    keys = _KeyRing(hop, auth_sock)
    try:
        found = asyncssh.SSHClientConnectionOptions(config=(), host=hop.host, **_given(hop), client_keys=None)
        user, port = found.username, found.port
        if not chain:
            for before in _jumps(found.tunnel, hop):
                await _extend(chain, before, auth_sock)
        await _connect(chain, hop, found, keys)
    except (NodeOperationFailed, asyncssh.Error, OSError, ValueError, TimeoutError) as failure:
        told = explained(failure, hop, user=user, port=port, keys=keys.words())
        raise told from failure


async def _connect(
    chain: list[asyncssh.SSHClientConnection], hop: Hop, found: asyncssh.SSHClientConnectionOptions, keys: _KeyRing
) -> None:
    known = KnownHosts(hop, found.host_key_alias or found.host, found.port, _files(hop, found))
    judges: list[HostKeyCheck] = []

    def judge() -> HostKeyCheck:
        judges.append(known.client())
        return judges[-1]

    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await asyncssh.connect(
                hop.host,
                **_given(hop),
                **keys.options(),
                **({"tunnel": chain[-1]} if chain else {}),
                client_factory=judge,
                known_hosts=known.trusted,
                **({"server_host_key_algs": kinds} if (kinds := known.algorithms()) else {}),
                keepalive_interval=KEEPALIVE_SECONDS,
                keepalive_count_max=KEEPALIVES,
                password_auth=False,
                kbdint_auth=False,
                agent_forwarding=False,
                x11_forwarding=False,
            )
    except asyncssh.HostKeyNotVerifiable:
        refusals = [each.refusal for each in judges if each.refusal]
        if refusals:
            raise NodeOperationFailed(refusals[-1]) from None
        raise
    chain.append(connection)


def _given(hop: Hop) -> dict[str, Any]:
    """Only what was given: SSH's own configuration says the rest."""
    given: dict[str, Any] = {}
    if hop.port:
        given["port"] = hop.port
    if hop.user:
        given["username"] = hop.user
    return given


def _files(hop: Hop, found: asyncssh.SSHClientConnectionOptions) -> list[str]:
    """The files of known hosts; the first is the one that a new key is written to."""
    if hop.known_hosts:
        return [hop.known_hosts]
    configured = found.known_hosts if isinstance(found.known_hosts, list) else []
    return [str(file) for file in configured] or ["~/.ssh/known_hosts"]


def _jumps(tunnel: object, hop: Hop) -> list[Hop]:
    """The hops that SSH's own configuration puts before a server."""
    if not isinstance(tunnel, str) or tunnel.lower() == "none":
        return []
    jumps = [jump_of(part, hop) for part in tunnel.split(",") if part.strip()]
    if len(jumps) > MOST_HOPS:
        raise NodeOperationFailed(f"there are more than {MOST_HOPS} hops before {hop.host}")
    return jumps


class _KeyRing:
    """The keys to try: the one the config names, else SSH's own and the agent's."""

    def __init__(self, hop: Hop, auth_sock: str) -> None:
        self._path = str(Path(hop.key).expanduser()) if hop.key else ""
        self._agent = auth_sock if auth_sock and os.path.exists(auth_sock) else ""

    def options(self) -> dict[str, Any]:
        """What asyncssh is to use; raises Failed for a key that cannot be used."""
        if not self._path:
            return {"agent_path": self._agent} if self._agent else {}
        try:
            return {"client_keys": [asyncssh.read_private_key(self._path)], "agent_path": None}
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as failure:
            if self._is_locked():
                return self._from_agent()
            raise NodeOperationFailed(f"the key {self._path} cannot be used: {failure}") from failure
        except OSError as failure:
            raise NodeOperationFailed(f"the key {self._path} cannot be read: {failure.strerror}") from failure

    def _is_locked(self) -> bool:
        """Whether the key has a passphrase: only then is a wrong one refused."""
        try:
            asyncssh.read_private_key(self._path, passphrase="-")  # noqa: S106 (nobody's)
        except asyncssh.KeyEncryptionError:
            return True
        except asyncssh.KeyImportError:
            return False
        return False

    def _from_agent(self) -> dict[str, Any]:
        """A key with a passphrase has to be in the agent already: nobody is there to type it."""
        if not self._agent:
            raise NodeOperationFailed(
                f"the key {self._path} has a passphrase: load it with ssh-add, then type the command again"
            )
        public = [self._path + ".pub"] if os.path.exists(self._path + ".pub") else None
        keys = {"client_keys": [self._path], "ignore_encrypted": True}
        return {**keys, "agent_path": self._agent, "agent_identities": public}

    def words(self) -> str:
        """What to look at when no key was accepted."""
        if self._path:
            return f"the key {self._path} was not accepted; is its public part in authorized_keys there?"
        tried = "keys in ~/.ssh and those of the SSH agent" if self._agent else "keys in ~/.ssh (there is no SSH agent)"
        return f"none of the {tried} was accepted; set ssh_key_path, or load the key with ssh-add and try again"


def explained(failure: BaseException, hop: Hop, *, user: str, port: int, keys: str) -> NodeOperationFailed:
    """The failure to reach a server as one clear sentence."""

    where = f"{hop.host} port {port}"
    match failure:
        case NodeOperationFailed():
            return failure
        case asyncssh.PermissionDenied():
            return NodeOperationFailed(f"permission denied for {user}@{hop.host}: {keys}")
        case asyncssh.HostKeyNotVerifiable():
            return NodeOperationFailed(f"the host key of {hop.host} cannot be trusted: {failure.reason}")
        case asyncssh.KeyExchangeFailed():
            return NodeOperationFailed(f"{where} and we have no way of speaking in common: {failure.reason}")
        case asyncssh.KeyEncryptionError() | asyncssh.KeyImportError():
            return NodeOperationFailed(f"the key {hop.key or 'for ' + hop.host} cannot be used: {failure}")
        case asyncssh.ChannelOpenError():
            return NodeOperationFailed(
                f"{where} cannot be reached from the host before it: {failure.reason}", final=False
            )
        case asyncssh.ConfigParseError():
            return NodeOperationFailed(f"~/.ssh/config cannot be used: {failure}")
        case TimeoutError():
            return NodeOperationFailed(f"no answer from {where} within {CONNECT_SECONDS:g} s", final=False)
        case ConnectionRefusedError():
            return NodeOperationFailed(f"{where} refused the connection: is sshd running there?", final=False)
        case socket.gaierror():
            return NodeOperationFailed(f"the name {hop.host} cannot be resolved: {failure.strerror}", final=False)
        case asyncssh.Error():
            return NodeOperationFailed(f"the connection to {where} broke: {failure.reason}", final=False)
        case OSError():
            return NodeOperationFailed(f"{where} cannot be reached: {failure.strerror or failure}", final=False)
    return NodeOperationFailed(f"{where}: {type(failure).__name__}: {failure}", final=False)
