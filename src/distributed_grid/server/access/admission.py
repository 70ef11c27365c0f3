"""Admission of users and nodes over the network: creating, listing and revoking tokens, joining, connecting."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping

from msgspec import Struct

from distributed_grid.agent.join_client import JoinToken
from distributed_grid.api import requests
from distributed_grid.api.answers.access import (
    CreatedJoinToken,
    JoinedNode,
    JoinTokenDetail,
    JoinTokenList,
    JoinTokenRow,
    TokenDetail,
    TokenIdentity,
    TokenList,
    TokenRow,
)
from distributed_grid.api.answers.common import utc
from distributed_grid.config.value_kinds import LOGIN, NAME_PATTERN
from distributed_grid.errors import BadInput, Refused
from distributed_grid.server.access.tokens import Caller, JoinGrant, TokenStore, UserToken, hash_of
from distributed_grid.server.endpoints import ADMIN, endpoint

AGENT_PATH = "/v1/agent"
log = logging.getLogger(__name__)


class AdvertisedAddress(Struct, frozen=True):
    """Addresses of the port for other machines, and its certificate."""

    addresses: tuple[str, ...]
    fingerprint: str
    socket: str = ""  # for agents of the same login on this machine

    @property
    def is_loopback_only(self) -> bool:
        """True if only this machine can reach them."""
        return all(address.startswith(("127.", "localhost:", "[::1]:")) for address in self.addresses)


class Admission:
    """Authenticates nodes, and answers the requests about tokens.

    `configured` are the names that no node may join under, `advertise` says how the port is reached now, and
    `disconnect` ends the connections of a node whose key was revoked or replaced.
    """

    def __init__(
        self,
        tokens: TokenStore,
        *,
        configured: Iterable[str],
        advertise: Callable[[], Awaitable[AdvertisedAddress]],
        disconnect: Callable[[str], None],
    ) -> None:
        self.tokens = tokens
        self._configured = frozenset(configured)
        self._advertise = advertise
        self._disconnect = disconnect

    def admit(self, path: str, headers: Mapping[str, str]) -> str | None:
        """The node that may connect with these headers, if any."""
        if path.partition("?")[0] != AGENT_PATH or "origin" in headers:
            return None
        node, _, key = bearer_token(headers.get("authorization", "")).rpartition(".")
        return self.tokens.node_of(node, key) if node and key else None

    @endpoint(ADMIN)
    async def create_token(self, op: requests.CreateToken, caller: Caller) -> TokenDetail:
        for name in (op.user, *([op.team] if op.team else [])):
            if LOGIN.pattern is None or not LOGIN.pattern.fullmatch(name):
                raise BadInput(f"{name!r} is no login name such as ana: letters, digits and _ . @ $ -, at most 64")
        expires = self._expiry(op.ttl_seconds)
        token = UserToken(id=op.token_id, hash=op.secret_hash, user=op.user, team=op.team, expires_ms=expires)
        return TokenDetail(token_row(await asyncio.to_thread(self.tokens.add, token), self.tokens.now_ms()))

    @endpoint(ADMIN)
    async def identify_token(self, op: requests.IdentifyToken, caller: Caller) -> TokenIdentity:
        """The user of a valid token."""
        token = self.tokens.user_by_hash(op.token_id, op.secret_hash)
        if token is None:
            raise Refused("the token is not valid")
        return TokenIdentity(token.user, token.admin)

    @endpoint(ADMIN)
    async def create_join_token(self, op: requests.CreateJoinToken, caller: Caller) -> CreatedJoinToken:
        """The parts of the token's text but the secret, which only the caller knows."""
        if op.node:
            self._check_name(op.node)
        grant = JoinGrant(id=op.token_id, hash=op.secret_hash, node=op.node, expires_ms=self._expiry(op.ttl_seconds))
        address = await self._advertise()
        made = await asyncio.to_thread(self.tokens.add_grant, grant)
        row = join_token_row(made, self.tokens.now_ms())
        return CreatedJoinToken(row, list(address.addresses), address.fingerprint)

    async def address(self) -> AdvertisedAddress:
        return await self._advertise()

    async def grant_join(self, token_id: str, secret: str, node: str, ttl_seconds: float) -> str:
        """The text of a join token for this name; the same one again while it is valid."""
        self._check_name(node)
        grant = JoinGrant(id=token_id, hash=hash_of(secret), node=node, expires_ms=self._expiry(ttl_seconds))
        await asyncio.to_thread(self.tokens.add_grant, grant)
        address = await self._advertise()
        return JoinToken(address.addresses, address.fingerprint, token_id, secret).text()

    @endpoint(ADMIN, keeps_config=True)
    async def list_tokens(self, op: requests.ListTokens, caller: Caller) -> TokenList:
        now = self.tokens.now_ms()
        return TokenList([token_row(token, now) for token in self.tokens.tokens()])

    @endpoint(ADMIN, keeps_config=True)
    async def list_join_tokens(self, op: requests.ListJoinTokens, caller: Caller) -> JoinTokenList:
        now = self.tokens.now_ms()
        return JoinTokenList([join_token_row(grant, now) for grant in self.tokens.grants()])

    @endpoint(ADMIN, keeps_config=True)
    async def revoke_token(self, op: requests.RevokeToken, caller: Caller) -> TokenDetail:
        token = await asyncio.to_thread(self.tokens.revoke, op.token_id)
        return TokenDetail(token_row(token, self.tokens.now_ms()))

    @endpoint(ADMIN, keeps_config=True)
    async def revoke_join_token(self, op: requests.RevokeJoinToken, caller: Caller) -> JoinTokenDetail:
        return JoinTokenDetail(join_token_row(await self.revoke_join(op.token_id), self.tokens.now_ms()))

    async def revoke_join(self, token_id: str) -> JoinGrant:
        """Revoke a join token, and disconnect the node that joined with it at once."""
        grant = await asyncio.to_thread(self.tokens.revoke_grant, token_id)
        if grant.used_by:
            self._disconnect(grant.used_by)
        return grant

    async def join(self, op: requests.JoinRequest) -> JoinedNode:
        """Exchange a join token for the right to connect with the key of this hash."""
        token = JoinToken.parse(op.token)
        if op.node:
            self._check_name(op.node)
        if op.hostname and not re.fullmatch(NAME_PATTERN, op.hostname):
            raise BadInput("the host name cannot be a node's name; give another with --name, such as gpu-1")
        used = await asyncio.to_thread(
            self.tokens.exchange,
            token.id,
            token.secret,
            node=op.node,
            hostname=f"{op.hostname[:56]}-joined" if op.hostname in self._configured else op.hostname,
            key_hash=op.key_hash,
        )
        self._disconnect(used.used_by)  # a connection with the replaced key
        log.info("%s joined with the token %s", used.used_by, used.id)
        address = await self._advertise()
        return JoinedNode(used.used_by, iso_time(used.used_ms), address.socket or None)

    def check_join_token(self, text: str) -> None:
        """Forbidden for a token that cannot be exchanged; a valid one stays unused."""
        token = JoinToken.parse(text)
        self.tokens.check_unused(token.id, token.secret)

    def _check_name(self, name: str) -> None:
        if not re.fullmatch(NAME_PATTERN, name):
            raise BadInput(
                f"{name!r} cannot be a node's name: letters, digits, '.', '_' and '-', at most 63, such as gpu-1"
            )
        if name in self._configured:
            raise Refused(f"{name} is a node of the config, and joins from there")

    def _expiry(self, ttl_seconds: float) -> int:
        return self.tokens.now_ms() + round(1000 * ttl_seconds) if ttl_seconds else 0


def bearer_token(header: str) -> str:
    """The token in an Authorization header, or ""."""
    scheme, _, credentials = header.partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else ""


def token_row(token: UserToken, now: int) -> TokenRow:
    return TokenRow(
        token_id=token.id,
        user=token.user,
        team=token.team or None,
        admin=token.admin,
        created_at=iso_time(token.created_ms),
        expires_at=iso_time(token.expires_ms),
        problem=token.problem(now),
    )


def join_token_row(grant: JoinGrant, now: int) -> JoinTokenRow:
    return JoinTokenRow(
        token_id=grant.id,
        node_id=grant.node or None,
        used_by=grant.used_by or None,
        used_at=iso_time(grant.used_ms),
        created_at=iso_time(grant.created_ms),
        expires_at=iso_time(grant.expires_ms),
        problem=grant.problem(now),
    )


def iso_time(at_ms: int) -> str | None:
    """A wall-clock time in ISO 8601; None for 0."""
    return utc(at_ms) if at_ms else None
