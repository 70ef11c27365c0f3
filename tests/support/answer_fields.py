"""JSON fields of the answers."""

from __future__ import annotations

from msgspec import UNSET, Struct
from msgspec.structs import fields


def fields_of(kind: type[Struct]) -> set[str]:
    """Names of the fields that every such answer has."""
    return {field.encode_name for field in fields(kind) if field.default is not UNSET}
