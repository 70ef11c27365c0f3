"""Types of the JSON answers that are no structs yet."""

from __future__ import annotations

from typing import TypedDict


class JoinAnswer(TypedDict):
    """The name under which a node joined."""

    node: str
    joined_at: str | None


class Health(TypedDict):
    status: str


class ErrorBody(TypedDict):
    type: str
    message: str
    reasons: list[str]


class ErrorAnswer(TypedDict):
    """Why a request failed."""

    error: ErrorBody
