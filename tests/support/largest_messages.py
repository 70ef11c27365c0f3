"""The largest value of a type and values at and beyond its bounds, made from the type by introspection."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

WIDEST = "\U0010ffff"
"""A character that takes the most bytes in UTF-8."""
MOST_WIDELY_ESCAPED = "\x01"
"""A character that takes the most bytes in JSON."""


class Unbounded(AssertionError):
    """A field has no bound in its type, so no message limit can be kept."""


def largest(kind: Any, given: dict[type, Any] | None = None, *, letter: str = WIDEST) -> Any:
    """The value of this type that takes the most bytes; `given` has those of types that are bounded elsewhere."""
    return _largest(inspect.type_info(kind), str(kind), given or {}, letter)


def _largest(info: inspect.Type, where: str, given: dict[type, Any], letter: str) -> Any:
    match info:
        case inspect.StructType():
            if info.cls in given:
                return given[info.cls]
            fields = {field.name: _largest(field.type, f"{where}.{field.name}", given, letter) for field in info.fields}
            return info.cls(**fields)
        case inspect.IntType():
            if info.le is None and info.lt is None:
                raise Unbounded(where)
            return info.le if info.le is not None else (info.lt or 0) - 1
        case inspect.FloatType():
            return 1.5e300
        case inspect.BoolType():
            return False
        case inspect.StrType():
            if info.max_length is None:
                raise Unbounded(where)
            return letter * info.max_length
        case inspect.BytesType():
            if info.max_length is None:
                raise Unbounded(where)
            return b"\xff" * info.max_length
        case inspect.VarTupleType() | inspect.ListType():
            if info.max_length is None:
                raise Unbounded(where)
            return (_largest(info.item_type, f"{where}[]", given, letter),) * info.max_length
        case inspect.TupleType():
            return tuple(_largest(item, f"{where}[]", given, letter) for item in info.item_types)
        case inspect.DictType():
            if info.max_length is None:
                raise Unbounded(where)
            key = _largest(info.key_type, f"{where}<key>", given, letter)
            value = _largest(info.value_type, f"{where}<value>", given, letter)
            keys = (key[: len(key) - 5] + f"{number:05}" for number in range(info.max_length))
            return dict.fromkeys(keys, value)
        case inspect.EnumType():
            return max(info.cls, key=lambda one: len(str(one.value)))
        case inspect.LiteralType():
            return max(info.values, key=lambda one: len(str(one)))
        case inspect.UnionType():
            found = [_largest(one, where, given, letter) for one in info.types]
            return max(found, key=lambda one: len(msgspec.msgpack.encode(one)))
        case inspect.NoneType():
            return None
    raise Unbounded(f"{where}: {info}")


def typical(kind: Any, strings: dict[str, str]) -> Any:
    """A small value of this type, with one item in each list; `strings` has the texts of fields by their names."""
    return _typical(inspect.type_info(kind), "", strings)


def _typical(info: inspect.Type, name: str, strings: dict[str, str]) -> Any:
    match info:
        case inspect.StructType():
            return info.cls(**{field.name: _typical(field.type, field.name, strings) for field in info.fields})
        case inspect.IntType():
            return max(info.ge or 0, 1)
        case inspect.BoolType():
            return False
        case inspect.StrType():
            return strings.get(name, "")
        case inspect.BytesType():
            return b"x"
        case inspect.VarTupleType():
            return (_typical(info.item_type, name, strings),)
        case inspect.TupleType():
            return tuple(_typical(item, name, strings) for item in info.item_types)
        case inspect.EnumType():
            return next(iter(info.cls))
        case inspect.LiteralType():
            return info.values[0]
        case inspect.UnionType():
            return _typical(next(one for one in info.types if not isinstance(one, inspect.NoneType)), name, strings)
    raise AssertionError(info)


def members(union: Any) -> tuple[type, ...]:
    """The types of a union of messages."""
    return tuple(getattr(union, "__args__", (union,)))


MAX_LIE_BYTES = 32 << 20
NUMBERS = (-1, 0, 1, 2**29 - 1, 2**29, 2**31, 2**32, 2**53, 2**61, 2**62, 2**63 - 1, 2**64 - 1, -(2**63))
OTHERS: tuple[Any, ...] = (
    None,
    True,
    1.5,
    float("nan"),
    "",
    "x",
    b"",
    b"\xff",
    [],
    [1],
    {},
    {"type": "AgentHello"},
    [[[[]]]],
)


def lies(message: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, bytes]]:
    """Messages that say one thing else than this one, each with the field it is about: values at and beyond every bound
    of its type, values of other types, the names of others, fields left out, and unknown ones."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    info = inspect.type_info(type(message))
    assert isinstance(info, inspect.StructType)
    for path, value in _variants(info, plain, names):
        yield path, msgspec.msgpack.encode(value)
    yield "unknown", msgspec.msgpack.encode({**plain, "unknown": "x" * 1000})


def _variants(info: inspect.Type, plain: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The same value with one lie in it, at each place of it."""
    if isinstance(info, inspect.StructType) and isinstance(plain, dict):
        for field in info.fields:
            name = field.encode_name
            yield f"{name} missing", {key: value for key, value in plain.items() if key != name}
            for path, value in _variants(field.type, plain.get(name), names):
                yield f"{name}{path}", {**plain, name: value}
        return
    if isinstance(info, inspect.UnionType):
        for one in info.types:
            if not isinstance(one, inspect.NoneType):
                yield from _variants(one, plain, names)
        return
    for value in itertools.chain(_bounds(info, names), NUMBERS, OTHERS):
        yield "", value
    if isinstance(info, inspect.VarTupleType) and isinstance(plain, list | tuple) and plain:
        for path, value in _variants(info.item_type, plain[0], names):
            yield f"[0]{path}", [value, *plain[1:]]


def _bounds(info: inspect.Type, names: tuple[str, ...]) -> Iterator[Any]:
    match info:
        case inspect.IntType():
            for bound in (info.ge, info.le, info.lt):
                if bound is not None:
                    yield from (bound - 1, bound, bound + 1)
        case inspect.StrType():
            yield from names
            yield "\x00\x1b[2J\n" * 8
            if info.max_length is not None:
                yield from ("x" * info.max_length, WIDEST * info.max_length, "x" * (info.max_length + 1))
        case inspect.BytesType():
            if info.max_length is not None:
                yield from (b"\xff" * info.max_length, b"\xff" * (info.max_length + 1))
        case inspect.VarTupleType():
            try:
                item = _largest(info.item_type, "", {}, "x")
            except Unbounded:
                return
            if info.max_length is not None:
                most = MAX_LIE_BYTES // len(msgspec.msgpack.encode(item)) + 1  # more is refused for its size alone
                yield from ([item] * min(count, most) for count in (info.max_length, info.max_length + 1))
