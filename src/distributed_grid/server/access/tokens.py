"""Access tokens: those of users, and those with which nodes join; their text and their store.

- Only hashes of secrets are stored; the one clear text on disk is the owner's own, 0600, beside them.
- A grant, a use and a revocation are durable before their answers.
- A join token is good for one key: the same key again gets the same answer, another one is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.api.id_prefixes import fits, not_found
from distributed_grid.errors import Conflict, GridError, NotFound, Refused, StoreFailed
from distributed_grid.posix.private_files import write_private

PREFIX = "grid_"
HISTORY_MS = 30 * 86_400_000  # revoked tokens stay listed
MAX_EXPIRED = 1_000  # expired tokens that stay listed


def new_token_id() -> str:
    return secrets.token_hex(6)


def new_secret() -> str:
    """256 random bits as text."""
    return secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    """Stored form of a secret: a plain hash is enough for 256 random bits."""
    return hashlib.sha256(secret.encode()).hexdigest()


def secret_matches(secret: str, stored_hash: str) -> bool:
    """True if a secret has this hash; the comparison takes the same time for every secret."""
    return hmac.compare_digest(hash_of(secret), stored_hash)


def bearer_text(token_id: str, secret: str) -> str:
    """Text of a token, for the Authorization header."""
    return f"{PREFIX}{token_id}_{secret}"


def split_token(text: str) -> tuple[str, str]:
    """Id and secret; two empty strings for anything but a token."""
    if not text.startswith(PREFIX):
        return "", ""
    token_id, _, secret = text.removeprefix(PREFIX).partition("_")
    return token_id, secret


class Forbidden(Refused):
    """The caller may not do that: the work of another user, or an invalid token."""


class Caller(Struct, frozen=True):
    """The user behind a request. An admin may end and extend what others own. `is_here`: on this machine."""

    user: str
    admin: bool = False
    team: str = ""
    is_here: bool = False

    @property
    def reader(self) -> str | None:
        """The user whose work an answer may show; None for an admin, who sees all work."""
        return None if self.admin else self.user

    def must_own(self, owner: str, what: str) -> None:
        """Forbidden for anybody but the owner or an admin."""
        if not self.admin and owner != self.user:
            raise Forbidden(f"{what} belongs to {owner}, not to {self.user}")


class UserToken(Struct, frozen=True, kw_only=True):
    """Authenticates a user; `expires_ms` 0 is never."""

    id: str
    hash: str
    user: str
    team: str = ""
    admin: bool = False
    created_ms: int = 0
    expires_ms: int = 0
    revoked_ms: int = 0

    def problem(self, now: int) -> str | None:
        """Reason why it is invalid, or None."""
        return _problem(self, now)


class JoinGrant(Struct, frozen=True, kw_only=True):
    """Lets one node join, once; an empty `node` is any name. A used one has the hash of the node's key."""

    id: str
    hash: str
    node: str = ""
    created_ms: int = 0
    expires_ms: int = 0
    revoked_ms: int = 0
    used_by: str = ""
    key_hash: str = ""
    used_ms: int = 0

    def problem(self, now: int) -> str | None:
        """Reason why it cannot be exchanged, or None; a used one does not expire."""
        return _problem(self, 0 if self.used_by else now)

    @property
    def holds_a_key(self) -> bool:
        return bool(self.used_by) and not self.revoked_ms


class _TokenFile(Struct, frozen=True):
    tokens: dict[str, UserToken] = {}
    grants: dict[str, JoinGrant] = {}


T = TypeVar("T", UserToken, JoinGrant)


class TokenStore:
    """The file of tokens; one process at a time has it open, and calls from several threads take turns."""

    def __init__(self, folder: Path, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._path = folder / "tokens.json"
        self._owner_path = folder / "token"
        self.now_ms = now_ms
        self._lock = threading.Lock()
        try:
            self._file = msgspec.json.decode(self._path.read_bytes(), type=_TokenFile)
        except FileNotFoundError:
            self._file = _TokenFile()
        except (OSError, msgspec.DecodeError) as failure:
            raise GridError(f"cannot read {self._path}: {failure}; move it away to start without tokens") from failure

    def ensure_owner(self, user: str) -> None:
        """Ensure that the owner's token file holds a valid admin token; otherwise make a new one."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            token = self.user_of(self._owner_path.read_text().strip())
            if token is not None and token.admin:
                return
        token_id, secret = new_token_id(), new_secret()
        with self._lock:
            kept = {name: token for name, token in self._file.tokens.items() if not token.admin}
            kept[token_id] = UserToken(
                id=token_id, hash=hash_of(secret), user=user, admin=True, created_ms=self.now_ms()
            )
            self._write(self._owner_path, bearer_text(token_id, secret).encode() + b"\n")
            self._save(replace(self._file, tokens=kept))

    def user_of(self, text: str) -> UserToken | None:
        """The token with this text, if it is still valid."""
        token_id, secret = split_token(text)
        token = self._file.tokens.get(token_id)
        if token is None or not secret_matches(secret, token.hash) or token.problem(self.now_ms()):
            return None
        return token

    def user_by_hash(self, token_id: str, secret_hash: str) -> UserToken | None:
        """The valid token with this id and this hash of its secret."""
        token = self._file.tokens.get(token_id)
        if token is None or not hmac.compare_digest(secret_hash, token.hash) or token.problem(self.now_ms()):
            return None
        return token

    def node_of(self, name: str, key: str) -> str | None:
        """The node's name, where this is the key it joined with."""
        holders = [grant for grant in self._file.grants.values() if grant.holds_a_key and grant.used_by == name]
        return name if any([secret_matches(key, grant.key_hash) for grant in holders]) else None  # noqa: C419 - all are compared

    def tokens(self) -> list[UserToken]:
        return list(self._file.tokens.values())

    def grants(self) -> list[JoinGrant]:
        return list(self._file.grants.values())

    def add(self, token: UserToken) -> UserToken:
        """Add a token; the same one a second time is harmless, another one under its id is refused."""
        with self._lock:
            token = replace(token, created_ms=self.now_ms())
            known = self._file.tokens.get(token.id)
            if known is not None:
                _must_match((known.hash, known.user, known.team), (token.hash, token.user, token.team), token.id)
                return known
            self._save(replace(self._file, tokens={**self._file.tokens, token.id: token}))
            return token

    def add_grant(self, grant: JoinGrant) -> JoinGrant:
        """Let a node join once; the same grant a second time is harmless, another one under its id is refused."""
        with self._lock:
            grant = replace(grant, created_ms=self.now_ms())
            known = self._file.grants.get(grant.id)
            if known is not None:
                _must_match((known.hash, known.node), (grant.hash, grant.node), grant.id)
                return known
            self._save(replace(self._file, grants={**self._file.grants, grant.id: grant}))
            return grant

    def check_unused(self, token_id: str, secret: str) -> JoinGrant:
        """The join token with this secret; Forbidden if it cannot be exchanged any more."""
        grant = self._grant(token_id, secret)
        if grant.used_by:
            raise Forbidden("the join token was used already")
        return grant

    def _grant(self, token_id: str, secret: str) -> JoinGrant:
        """The join token with this secret; Forbidden for an invalid one."""
        grant = self._file.grants.get(token_id)
        if grant is None or not secret_matches(secret, grant.hash):
            raise Forbidden("the join token is unknown")
        if problem := grant.problem(self.now_ms()):
            raise Forbidden(f"the join token {problem}")
        return grant

    def exchange(self, token_id: str, secret: str, *, node: str, hostname: str, key_hash: str) -> JoinGrant:
        """Grant a node the right to connect, in exchange for the token; durable before this returns.

        The node is called `node`, else as the token says, else `hostname`.
        The same token with the same key gets the same answer, so a request with a lost answer can be repeated.
        """
        with self._lock:
            grant = self._grant(token_id, secret)
            node = node or grant.node or hostname
            if grant.node and node != grant.node:
                raise Forbidden(f"the join token is for the node {grant.node}, not for {node}")
            if grant.used_by:
                if (grant.used_by, grant.key_hash) != (node, key_hash):
                    raise Forbidden("the join token was used already")
                return grant
            grants = dict(self._file.grants)
            for other in grants.values():
                if other.holds_a_key and other.used_by == node:
                    if not grant.node:
                        raise Forbidden(
                            f"the name {node} is taken by a node that joined before; "
                            f"revoke its join token {other.id}, or make a token for that name"
                        )
                    grants[other.id] = replace(other, revoked_ms=self.now_ms())
            used = replace(grant, used_by=node, key_hash=key_hash, used_ms=self.now_ms())
            self._save(replace(self._file, grants={**grants, token_id: used}))
            return used

    def revoke(self, name: str) -> UserToken:
        """Revoke a user's token; a second time is harmless."""
        with self._lock:
            token = _find_by_prefix(self._file.tokens, name, "token")
            if token.admin:
                raise Refused(f"this is the owner's own token; to replace it delete {self._owner_path} and restart")
            token = _revoked(token, self.now_ms())
            self._save(replace(self._file, tokens={**self._file.tokens, token.id: token}))
            return token

    def revoke_grant(self, name: str) -> JoinGrant:
        """Revoke a join token, and the key of the node that joined with it; a second time is harmless."""
        with self._lock:
            grant = _revoked(_find_by_prefix(self._file.grants, name, "join token"), self.now_ms())
            self._save(replace(self._file, grants={**self._file.grants, grant.id: grant}))
            return grant

    def _save(self, file: _TokenFile) -> None:
        """Write the file durably, then use it; a write that fails changes nothing."""
        now = self.now_ms()
        file = _TokenFile(_without_history(file.tokens, now), _without_history(file.grants, now))
        self._write(self._path, msgspec.json.encode(file))
        self._file = file

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_private(path, content)
        except OSError as failure:
            raise StoreFailed(f"cannot write {path}: {failure.strerror}") from failure


def _problem(token: UserToken | JoinGrant, now: int) -> str | None:
    if token.revoked_ms:
        return "was revoked"
    return "has expired" if token.expires_ms and now >= token.expires_ms else None


def _without_history(tokens: dict[str, T], now: int) -> dict[str, T]:
    """The tokens without those that were revoked long ago, and without the oldest of too many that have expired.

    Expired ones are limited by number, not by age: a wall clock that is ahead makes valid ones seem expired.
    """
    expired = [token for token in tokens.values() if token.problem(now) and not token.revoked_ms]
    expired.sort(key=lambda token: token.expires_ms, reverse=True)
    gone = {token.id for token in expired[MAX_EXPIRED:]}
    before = now - HISTORY_MS
    return {
        name: token
        for name, token in tokens.items()
        if name not in gone and not (token.revoked_ms and token.revoked_ms < before)
    }


def _revoked(token: T, now: int) -> T:
    return token if token.revoked_ms else replace(token, revoked_ms=now)


def _must_match(known: tuple[str, ...], again: tuple[str, ...], token_id: str) -> None:
    if known != again:
        raise Conflict(f"the token id {token_id} was used before for something else")


def _find_by_prefix(tokens: dict[str, T], name: str, what: str) -> T:
    matches = [token for key, token in tokens.items() if fits(key, name)]
    if len(matches) != 1:
        raise NotFound(f"{name!r} fits several {what}s") if matches else not_found(what, name)
    return matches[0]
