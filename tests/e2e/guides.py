"""Guides that are walked from top to bottom: their headings and code blocks, in their order."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tests.support.project import PROJECT

FOLDER = PROJECT / "tests/fixtures/guides"


class GuideBlock(NamedTuple):
    """A code block, and the heading it stands under."""

    heading: str
    language: str
    text: str


class Guide:
    """A guide that is read block by block, so that none is left out."""

    def __init__(self, name: str) -> None:
        self.blocks = list(_blocks((FOLDER / f"{name}.txt").read_text()))
        self._read = 0

    def next(self, heading: str) -> str:
        """The next block, which has to stand under this heading."""
        block = self.blocks[self._read]
        assert block.heading == heading, f"the next block is one of {block.heading!r}"
        self._read += 1
        return block.text

    def assert_all_read(self) -> None:
        assert [block.heading for block in self.blocks[self._read :]] == []


def _blocks(text: str) -> Iterator[GuideBlock]:
    heading = ""
    for line in re.finditer(r"^```(\w+)\n(.*?)^```$|^#+ ([^\n]+)$", text, re.MULTILINE | re.DOTALL):
        language, block, found = line.groups()
        heading = found or heading
        if language:
            yield GuideBlock(heading, language, block)


def page_blocks(path: str, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return [block.text for block in _blocks((PROJECT / path).read_text()) if block.language == language]


async def run_block(program: str, names: dict[str, Any]) -> None:
    """Run a block that awaits at its top level, with these names and those that it adds."""
    code = compile(program, "the guide", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)
    assert inspect.iscoroutine(running)
    await running


def assert_within(part: Any, whole: Any) -> None:
    """A YAML block of a guide says nothing that the config does not say, too; lists are compared item by item."""
    if isinstance(part, dict):
        for key, value in part.items():
            assert key in whole, key
            assert_within(value, whole[key])
    elif isinstance(part, list):
        for mine, theirs in zip(part, whole, strict=False):
            assert_within(mine, theirs)
    else:
        assert part == whole


def load_config(name: str) -> Any:
    """A shipped config as plain values."""
    return yaml.safe_load((PROJECT / "config" / name).read_text())
