"""The text of a token: an id to look it up by and a secret, of which only the hash is ever stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets

PREFIX = "grid_"


def new_id() -> str:
    """An id for a token; it may be shown."""
    return secrets.token_hex(6)


def new_secret() -> str:
    """256 bits that only their holder knows."""
    return secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    """What is stored of a secret. A plain hash is enough for 256 random bits."""
    return hashlib.sha256(secret.encode()).hexdigest()


def fits(secret: str, stored_hash: str) -> bool:
    """Whether this is the secret of that hash, in the same time whatever the answer."""
    return hmac.compare_digest(hash_of(secret), stored_hash)


def bearer_text(token_id: str, secret: str) -> str:
    """What a person copies and a program sends."""
    return f"{PREFIX}{token_id}_{secret}"


def parts_of(text: str) -> tuple[str, str]:
    """Id and secret; two empty words where it is no token."""
    if not text.startswith(PREFIX):
        return "", ""
    token_id, _, secret = text.removeprefix(PREFIX).partition("_")
    return token_id, secret
