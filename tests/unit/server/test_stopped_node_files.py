"""Files of a node without an agent: output comes in large answers, and what the node says is not believed blindly."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

import pytest

from distributed_grid.errors import ProtocolError
from distributed_grid.server.purge_guard import FILES_PER_QUESTION, StoppedNodeFiles


class Script:
    """The script of a node that has these files, and how often it was asked."""

    def __init__(self, files: dict[tuple[str, str], bytes], room: int = 100) -> None:
        self.files = files
        self.room = room
        self.asked: list[str] = []

    async def ask(self, operation: str, data: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(operation)
        if operation == "list-results":
            return {"results": dict.fromkeys(data["attempts"], (1, 2)) | {"stranger": (9, 9)}}
        room, parts = self.room, []
        for attempt, name, offset in data["files"]:
            content = self.files.get((attempt, name), b"")[offset : offset + room]
            if content:
                parts.append((attempt, name, b64encode(content).decode()))
                room -= len(content)
            if not room:
                return {"parts": parts, "more": True}
        return {"parts": parts, "more": False}


async def read_all(node: StoppedNodeFiles, attempt: str, name: str) -> bytes:
    content = b""
    while data := (await node.read("gpu1", attempt, name.encode(), len(content), 1000))[1]:
        content += data
    return content


def test_output_of_many_attempts_comes_in_few_answers() -> None:
    async def scenario() -> None:
        files = {(f"a{number}", name): b"%d" % number * 3 for number in range(20) for name in ("stdout", "stderr")}
        files["a7", "stdout"] = b"x" * 250
        files["a8", "stdout"] = b""
        script = Script(files)
        node = StoppedNodeFiles(script.ask)
        node.expect(files)
        assert {file: await read_all(node, *file) for file in files} == files
        assert len(script.asked) < 8
        assert await read_all(node, "none", "stdout") == b""

    asyncio.run(scenario())


def test_results_are_asked_for_in_pages_and_only_of_attempts_that_were_named() -> None:
    async def scenario() -> None:
        script = Script({})
        attempts = {f"a{number}": "" for number in range(FILES_PER_QUESTION + 1)}
        found = await StoppedNodeFiles(script.ask).list_results(attempts)
        assert found == dict.fromkeys(attempts, (1, 2))
        assert script.asked == ["list-results"] * 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer", [{}, {"parts": [("a", "stdout", "no base64!")], "more": False}, {"parts": [1], "more": False}]
)
def test_an_answer_that_is_none_is_refused(answer: dict[str, Any]) -> None:
    async def ask(operation: str, data: dict[str, Any]) -> dict[str, Any]:
        return answer

    async def scenario() -> None:
        node = StoppedNodeFiles(ask)
        with pytest.raises(ProtocolError, match="the node sent"):
            await node.read("gpu1", "a", b"stdout", 0, 1000)
        with pytest.raises(ProtocolError, match="the node sent"):
            await node.list_results({"a": ""})

    asyncio.run(scenario())
