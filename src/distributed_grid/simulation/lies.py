"""Lies of an agent: its messages with one field changed, within the types of the wire."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from msgspec import Struct, inspect

from distributed_grid.errors import ProtocolError
from distributed_grid.wire import FromAgent, decode_from_agent, encode

LARGE = 2**61


class Liar:
    """Changes messages; `names` are nodes and attempts, its own and others, that it may speak of."""

    def __init__(self, random: Random, names: tuple[str, ...]) -> None:
        self._random = random
        self._names = names

    def lie(self, message: FromAgent) -> FromAgent:
        """The message with one field changed; as it was where the change does not fit on the wire."""
        try:
            return decode_from_agent(encode(self._struct(message)))
        except (ProtocolError, OverflowError):
            return message

    def _struct(self, value: Any) -> Any:
        """One field of it changed."""
        info = inspect.type_info(type(value))
        assert isinstance(info, inspect.StructType)
        field = self._random.choice(info.fields)
        return msgspec.structs.replace(value, **{field.name: self._value(field.type, getattr(value, field.name))})

    def _value(self, kind: inspect.Type, value: Any) -> Any:
        """Another value of a type."""
        random = self._random
        match kind:
            case inspect.UnionType():
                return self._value(random.choice(kind.types), value)
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return not value
            case inspect.IntType():
                least, most = kind.ge if kind.ge is not None else 0, _most(kind)
                near = (value or 0) + random.choice((-1, 1, 1_000, 1_000_000))
                return min(max(random.choice((least, most, near, near)), least), most)
            case inspect.StrType():
                return random.choice(("", *self._names, "no such name"))
            case inspect.EnumType():
                return random.choice(list(kind.cls))
            case inspect.VarTupleType():
                some = tuple(one for one in value or () if random.random() < 0.5)
                more = (self._value(kind.item_type, None),) if random.random() < 0.5 else ()
                return (*some, *more)
            case inspect.StructType() if isinstance(value, Struct):
                return self._struct(value)
        return value


def _most(kind: inspect.IntType) -> int:
    """The most that a number may be."""
    return kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else LARGE
