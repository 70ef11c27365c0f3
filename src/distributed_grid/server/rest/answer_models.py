"""OpenAPI models of the answers: TypedDicts made from their structs, for FastAPI knows no structs."""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Any, NotRequired

import msgspec
from msgspec import UNSET, Struct, UnsetType
from typing_extensions import TypedDict

from distributed_grid.api.answers import boosts, explanation, jobs, leases, nodes, offloading, reports
from distributed_grid.control import view_types


def __getattr__(name: str) -> Any:
    for module in (boosts, explanation, jobs, leases, nodes, offloading, reports):
        if isinstance(kind := getattr(module, name, None), type) and issubclass(kind, Struct):
            return _model(kind)
    return getattr(view_types, name)


@cache
def _model(kind: type[Struct]) -> Any:
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        fields[field.encode_name] = _type(field.type) if field.default is not UNSET else NotRequired[_type(field.type)]
    model: Any = TypedDict(kind.__name__, fields)  # type: ignore[misc]
    model.__doc__ = kind.__doc__
    return model


def _type(kind: Any) -> Any:
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        parts = tuple(_type(part) for part in parameters if part is not UnsetType)
        return typing.Union[parts]  # noqa: UP007 - made at runtime
    if origin is list:
        return list[_type(parameters[0])]  # type: ignore[misc]
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        return kind
    return dict[str, Any] if kind.__struct_config__.omit_defaults else _model(kind)
