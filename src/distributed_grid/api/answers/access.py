"""Answers about access: the tokens of users and of joining nodes."""

from __future__ import annotations

from distributed_grid.api.answers.common import Answer


class TokenRow(Answer, frozen=True, kw_only=True):
    """A token of a user, without its hash."""

    token_id: str
    user: str
    team: str | None
    admin: bool
    created_at: str | None
    expires_at: str | None
    problem: str | None  # the reason why it is not valid


class TokenDetail(Answer, frozen=True):
    token: TokenRow


class TokenList(Answer, frozen=True):
    tokens: list[TokenRow]


class TokenIdentity(Answer, frozen=True):
    """The user of a valid token."""

    user: str
    admin: bool


class JoinTokenRow(Answer, frozen=True, kw_only=True):
    """A join token, without its hashes, and the node that used it."""

    token_id: str
    node_id: str | None
    used_by: str | None
    used_at: str | None
    created_at: str | None
    expires_at: str | None
    problem: str | None  # the reason why it is not valid


class JoinTokenDetail(Answer, frozen=True):
    join_token: JoinTokenRow


class CreatedJoinToken(Answer, frozen=True):
    """The parts of a join token's text but the secret, which only the caller knows."""

    join_token: JoinTokenRow
    addresses: list[str]
    fingerprint: str


class JoinTokenList(Answer, frozen=True):
    join_tokens: list[JoinTokenRow]


class JoinedNode(Answer, frozen=True):
    """A node that may connect from now on."""

    node: str
    joined_at: str | None
    agent_socket: str | None  # for agents of the same login on this machine
