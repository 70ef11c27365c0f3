"""Files of attempts on a node whose agent is not connected, through the script that SSH runs there."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from distributed_grid.errors import ProtocolError

FILES_PER_QUESTION = 1_000
Count = Annotated[int, Meta(ge=0)]
Counted = tuple[Count, Count] | str
"""Number and bytes of the files of an attempt, or the reason why they cannot be counted."""
Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
T = TypeVar("T")


class _Listing(Struct, frozen=True):
    results: dict[str, Counted]


class _OutputParts(Struct, frozen=True):
    parts: list[tuple[str, str, str]]
    more: bool
    starts: dict[str, Count] = {}


class StoppedNodeFiles:
    """Counts results and reads output. Output is asked for many attempts at a time: a question costs a new session."""

    def __init__(self, ask: Ask) -> None:
        """`ask` has the script on the node carry out an operation."""
        self._ask = ask
        self._ahead: list[tuple[str, str, int]] = []
        self._parts: dict[tuple[str, str, int], tuple[int, bytes]] = {}

    async def list_results(self, attempts: Mapping[str, str]) -> dict[str, Counted]:
        """The attempts that have left results, given with the manifest that was shipped for each."""
        found: dict[str, Counted] = {}
        ahead = list(attempts.items())
        while ahead:
            asked, ahead = dict(ahead[:FILES_PER_QUESTION]), ahead[FILES_PER_QUESTION:]
            answer = _checked(await self._ask("list-results", {"attempts": asked}), _Listing)
            found |= {attempt: counted for attempt, counted in answer.results.items() if attempt in asked}
        return found

    def expect(self, files: Iterable[tuple[str, str]]) -> None:
        """Attempts and the names of their output files that will be read, in this order."""
        self._ahead = [(attempt, name, 0) for attempt, name in files]

    async def read(self, node: str, lease_id: str, name: bytes, offset: int, most: int) -> tuple[int, bytes]:
        """The next part of an output file, which is smaller than `most` may allow; empty at its end."""
        file = (lease_id, name.decode(), offset)
        if file not in self._parts:
            await self._fetch(file)
        start, data = self._parts.pop(file, (offset, b""))
        return start, data[:most]

    async def _fetch(self, first: tuple[str, str, int]) -> None:
        """Have the parts of a file and of those that will be read next; each that was sent whole has its end, too."""
        asked = [first, *(file for file in self._ahead if file[:2] != first[:2])][:FILES_PER_QUESTION]
        answer = _checked(await self._ask("read-output", {"files": asked}), _OutputParts)
        try:
            parts = {(attempt, name): base64.b64decode(data, validate=True) for attempt, name, data in answer.parts}
        except (binascii.Error, ValueError):
            raise ProtocolError("the node sent output that is damaged") from None
        cut = answer.parts[-1][:2] if answer.more and answer.parts else None
        done: set[tuple[str, str, int]] = set()
        for attempt, name, offset in asked:
            data = parts.get((attempt, name), b"")
            done.add((attempt, name, offset))
            start = answer.starts.get(f"{attempt}/{name}", offset)
            self._parts[attempt, name, offset] = (start, data)
            if (attempt, name) == cut:
                break
            self._parts[attempt, name, start + len(data)] = (start + len(data), b"")
        self._ahead = [file for file in self._ahead if file not in done]


def _checked(answer: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as problem:
        raise ProtocolError(f"the node sent something else than what was asked for: {problem}") from None
