"""Valid messages made from their types by introspection: the corpus that is mutated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from msgspec import inspect

Known = Mapping[str, Callable[[Random], Any]]
"""Values of fields by name, where any value of the type would be refused at once or do harm."""
MAX_ITEMS = 3


def make_corpus(kinds: Iterable[Any], count: int, rng: Random, known: Known) -> list[Any]:
    """So many valid messages of each of these types, as plain dictionaries, lists and numbers."""
    infos = [inspect.type_info(kind) for kind in kinds]
    return [_sample(info, rng, known, "") for info in infos for _ in range(count)]


def _sample(info: inspect.Type, rng: Random, known: Known, name: str) -> Any:
    if name in known:
        return known[name](rng)
    match info:
        case inspect.Metadata():
            return _sample(info.type, rng, known, name)
        case inspect.StructType():
            return _struct(info, rng, known)
        case inspect.UnionType():
            return _sample(rng.choice(info.types), rng, known, name)
        case inspect.IntType():
            least = info.ge if info.ge is not None else (info.gt + 1 if info.gt is not None else -(2**31))
            most = info.le if info.le is not None else (info.lt - 1 if info.lt is not None else 2**31)
            return rng.choice((least, most, rng.randint(least, most), min(most, max(least, rng.randrange(100)))))
        case inspect.FloatType():
            low = float(info.ge if info.ge is not None else info.gt if info.gt is not None else -1e6)
            high = float(info.le if info.le is not None else info.lt if info.lt is not None else 1e6)
            return rng.choice((high, rng.uniform(low, high), min(high, max(low, 1.0))))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.StrType():
            return _text(info, rng)
        case inspect.BytesType():
            return rng.randbytes(rng.choice((0, 1, 40, min(info.max_length or 64, 4096))))
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            count = rng.randrange(info.min_length or 0, max(info.min_length or 0, MAX_ITEMS) + 1)
            return [_sample(info.item_type, rng, known, "") for _ in range(count)]
        case inspect.TupleType():
            return [_sample(item, rng, known, "") for item in info.item_types]
        case inspect.DictType():
            pairs = range(rng.randrange(MAX_ITEMS))
            return {_sample(info.key_type, rng, known, ""): _sample(info.value_type, rng, known, "") for _ in pairs}
        case inspect.EnumType():
            return rng.choice(list(info.cls)).value
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.NoneType():
            return None
        case inspect.AnyType():
            return rng.choice((None, True, rng.randrange(100), "text", [1, None], {"type": "test", "n": [0.5]}))
    raise AssertionError(f"no sample of {info}")


def _struct(info: inspect.StructType, rng: Random, known: Known) -> Any:
    if info.array_like:
        return [_sample(field.type, rng, known, field.name) for field in info.fields]
    made = {info.tag_field: info.tag} if info.tag_field else {}
    for field in info.fields:
        if field.required or rng.random() < 0.7:
            made[field.encode_name] = _sample(field.type, rng, known, field.name)
    return made


def _text(info: inspect.StrType, rng: Random) -> str:
    length = info.max_length if info.max_length is not None else 64
    if info.pattern is None:
        return rng.choice(("", "x", "node", "é" * min(length, 20), "y" * length))[:length].ljust(
            info.min_length or 0, "z"
        )
    candidates = [f"{rng.getrandbits(256):064x}", f"{rng.getrandbits(64):016x}", f"id-{rng.randrange(100)}", "", "a"]
    fitting = [one for one in candidates if re.search(info.pattern, one)]
    assert fitting, f"no text for {info.pattern}"
    return rng.choice(fitting)
