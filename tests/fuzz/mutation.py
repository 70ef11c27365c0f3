"""Seeded mutations: of messages as trees of plain values, and of their bytes."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import msgspec

NUMBERS = (
    -(2**63), -(2**31), -1, 0, 1, 2, 127, 255, 256, 65_535, 2**29, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**61,
    2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 0.5, -0.0, 1e308, 5e-324,
)  # fmt: skip
JSON_NUMBERS = (10**30, -(10**30), 10**400, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", "\0", "a", "node", "liar0", "..", "../../../x", "/", "x" * 64, "x" * 65, "x" * 129, "x" * 201, "x" * 9000,
    "é" * 100, "\U0010ffff", "\u202e", "a\nb", "\x1b[2J", "%s%n%x", "{}", "-1", "0", "1e999", "nan", "true", "null",
    "job-", "a.b", ".1", "0." + "9" * 60, "🙂" * 40,
)  # fmt: skip
NESTED_MSGPACK = (b"\x91" * 40, b"\x91" * 5_000, b"\x81\xa1a" * 2_000)
HUGE_MSGPACK = tuple(
    head + length
    for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")
    for length in (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\xff\xff\xff")
)
NESTED_JSON = (b"[" * 50, b"[" * 5_000, b'{"a":' * 2_000)
BAD_UTF8 = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80" * 9)


class Mutator:
    """Changes messages at random; the same seed makes the same changes."""

    def __init__(self, rng: Random, *, as_json: bool) -> None:
        self.rng = rng
        self._as_json = as_json
        self._numbers = (*NUMBERS, *JSON_NUMBERS) if as_json else NUMBERS
        self._nested = NESTED_JSON if as_json else NESTED_MSGPACK
        self._inserts = (*self._nested, *BAD_UTF8, *(() if as_json else HUGE_MSGPACK))

    def encoded(self, message: Any) -> bytes:
        """A message as bytes, after one to three changes of its tree, of its bytes, or of both."""
        kind = self.rng.random()
        if kind < 0.75:
            message = self.tree(message)
        data = self.encode(message)
        return self.damaged(data) if kind > 0.55 else data

    def encode(self, message: Any) -> bytes:
        """A message as bytes, unchanged."""
        if self._as_json:
            return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return msgspec.msgpack.encode(message)

    # ------------------------------------------------------------------ trees

    def tree(self, message: Any) -> Any:
        """A copy of the message with one to three values changed."""
        message = copy.deepcopy(message)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            self._change_one(message)
        return message

    def _change_one(self, message: Any) -> None:
        places = list(_places(message))
        if not places:
            return
        rng = self.rng
        parent, key = rng.choice(places)
        change = rng.randrange(12)
        if change < 8:
            parent[key] = self._hostile(parent[key])
        elif change == 8:
            del parent[key]
        elif change == 9 and isinstance(parent, dict):
            parent[rng.choice(TEXTS)] = parent[key]
        elif change == 10 and isinstance(parent, list):
            parent.extend([parent[key]] * rng.choice((1, 2, 50)))
        else:
            other, place = rng.choice(places)
            parent[key] = copy.deepcopy(other.get(place) if isinstance(other, dict) else other[place : place + 1])

    def _hostile(self, value: Any) -> Any:
        rng = self.rng
        if rng.random() < 0.6:  # another value of the same type
            if isinstance(value, bool):
                return not value
            if isinstance(value, int | float):
                return rng.choice(self._numbers)
            if isinstance(value, str):
                return rng.choice((*TEXTS, value * 2, value[:1]))
            if isinstance(value, bytes):
                return rng.choice((b"", b"\0" * 65, rng.randbytes(rng.randrange(300)), value * 2))
        pick = rng.randrange(7)
        if pick == 0:
            return rng.choice(self._numbers)
        if pick == 1:
            return rng.choice(TEXTS)
        if pick == 2:
            return rng.choice((None, True, False))
        if pick == 3:
            return [] if rng.random() < 0.5 else [value] * rng.choice((1, 3, 100))
        if pick == 4:
            return {rng.choice(TEXTS): value}
        if pick == 5:
            nested: Any = value
            for _ in range(rng.choice((3, 30, 200))):
                nested = [nested]
            return nested
        return TEXTS[0] if self._as_json else rng.randbytes(rng.randrange(40))

    # ------------------------------------------------------------------ bytes

    def damaged(self, data: bytes, other: bytes = b"") -> bytes:
        """The bytes with one to three changes."""
        changed = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            self._change_bytes(changed, other or data)
        return bytes(changed)

    def _change_bytes(self, data: bytearray, other: bytes) -> None:
        rng = self.rng
        at = rng.randrange(len(data) + 1)
        change = rng.randrange(9)
        if change <= 2 and data:
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif change == 3:
            del data[at:]
        elif change == 4:
            data[at : at + rng.randrange(8)] = rng.choice(self._inserts)
        elif change == 5 and other:
            start = rng.randrange(len(other))
            data[at:] = other[start:]
        elif change == 6:
            end = min(len(data), at + rng.randrange(64))
            data[end:end] = data[at:end] * rng.choice((1, 2, 20))
        elif change == 7:
            number = rng.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, len(data), len(data) + 1))
            data[at : at + 4] = number.to_bytes(4, rng.choice(("big", "little")))
        else:
            data[at : at + rng.randrange(16)] = rng.randbytes(rng.randrange(16))


def _places(value: Any) -> Any:
    """Every container in a tree with each of its keys."""
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])
