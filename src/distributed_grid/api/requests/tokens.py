"""Who is let in: tokens of people, and those with which nodes join."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from distributed_grid.api.requests.message import Hash, Message, Name, Seconds, Text, TokenId


class CreateToken(Message, frozen=True):
    """A token for a person. The caller makes id and secret, so asking twice makes one; 0 seconds is for good."""

    token_id: TokenId
    secret_hash: Hash
    user: Name
    team: Name = ""
    ttl_seconds: Seconds = 0.0


class ListTokens(Message, frozen=True):
    """The tokens of people."""


class RevokeToken(Message, frozen=True):
    """Shut a token out."""

    token_id: Name


class CreateJoinToken(Message, frozen=True):
    """A token that lets one node join, once. The caller makes id and secret, so asking twice makes one."""

    token_id: TokenId
    secret_hash: Hash
    node: Name = ""
    ttl_seconds: Annotated[float, Meta(gt=0, le=3.2e9)] = 3600.0


class ListJoinTokens(Message, frozen=True):
    """The join tokens, and who used them."""


class RevokeJoinToken(Message, frozen=True):
    """Shut a join token out, and the node that joined with it."""

    token_id: Name


class Join(Message, frozen=True):
    """A join token for the right to come in with a key; what a node asks over REST."""

    token: Text
    key_hash: Hash
    node: Name = ""
    hostname: Name = ""
