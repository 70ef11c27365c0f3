"""The pages agree with each other and with the code: links, commands, messages, fields."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from distributed_grid.api.answers.jobs import AttemptRow, CheckpointRow, DeliveryRow, JobRow, SizingRow
from distributed_grid.api.answers.leases import AllocationRow, BoostRow
from distributed_grid.api.answers.nodes import NodeRow, OfferRow
from distributed_grid.cli.command_line import Group, Option
from distributed_grid.cli.root_command import COMMANDS, GRID
from distributed_grid.reactor.decision import RECORD_TYPES
from tests.support.project import PROJECT

PAGES = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
PAGES += sorted((PROJECT / "docs").rglob("*.md"))
TEXTS = {page: page.read_text() for page in PAGES}
DOCS = "\n".join(text for page, text in TEXTS.items() if page.name != "CHANGELOG.md")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]+`", "", text, flags=re.DOTALL)


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """The names that headings get where such pages are shown."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    """Problems of the links of a page, one line each."""
    for target in LINK.findall(without_code(TEXTS[page])):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            yield f"{page.relative_to(PROJECT)}: {target} is not there"
        elif anchor and anchor not in anchors_of(there):
            yield f"{page.relative_to(PROJECT)}: {target}: no such heading"


def test_every_link_leads_somewhere() -> None:
    assert [problem for page in PAGES for problem in broken_links(page)] == []


def commands() -> Iterator[str]:
    """Every command that can be typed, such as `jobs show`."""
    for name in COMMANDS:
        command = GRID.find(name)
        if isinstance(command, Group):
            yield from (f"{name} {inner}" for inner in command.commands)
        else:
            yield name


def test_every_command_is_in_the_docs() -> None:
    assert [command for command in commands() if f"grid {command}" not in DOCS] == []


def test_every_option_of_run_shared_is_in_the_docs() -> None:
    command = GRID.find("run-shared")
    assert command is not None
    options = {max(one.spellings, key=len) for one in command.parameters if isinstance(one, Option)}
    assert {option for option in options if option not in DOCS} == set()


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    reached, ahead = set[Path](), [PROJECT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        targets = (target.partition("#")[0] for target in LINK.findall(without_code(page.read_text())))
        pages = ((page.parent / target).resolve() for target in targets if target.endswith(".md") and ":" not in target)
        ahead += [page for page in pages if page not in reached and page not in ahead]
    assert {str(page) for page in PAGES if "docs" in page.parts} <= {str(page) for page in reached}


def literals() -> Iterator[str]:
    """Every text in the source, its variable parts as a NUL."""
    for file in (PROJECT / "src").rglob("*.py"):
        ahead: list[object] = [ast.parse(file.read_text())]
        while ahead:  # half of the time that ast.walk takes
            node = ahead.pop()
            if isinstance(node, ast.Constant):
                if isinstance(node.value, str):
                    yield node.value
            elif isinstance(node, list):
                ahead += node
            elif isinstance(node, ast.AST):
                ahead += vars(node).values()
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


def test_the_messages_in_troubleshooting_are_those_of_the_code() -> None:
    text = TEXTS[PROJECT / "docs/reference/troubleshooting.md"]
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    messages = [line for block in blocks for line in block.splitlines()]
    known = [literal for literal in literals() if len(literal) >= 8]
    every = "\n\n".join(known)
    patterns = [literal.split("\0") for literal in known if "\0" in literal]

    def is_documented(line: str) -> bool:
        parts = [part for part in (part.strip(" ();,:") for part in line.split("…")) if part]
        if all(part in every for part in parts):
            return True
        fitting = (texts for texts in patterns if all(text in line for text in texts))
        return any(re.fullmatch(".+".join(map(re.escape, texts)), line) for texts in fitting)

    assert len(messages) > 25
    assert [line for line in messages if not is_documented(line)] == []


def test_the_fields_that_are_shown_are_written_down() -> None:
    kinds = (AllocationRow, AttemptRow, BoostRow, CheckpointRow, DeliveryRow, JobRow, NodeRow, OfferRow, SizingRow)
    shown = {name for kind in kinds for name in kind.__struct_encode_fields__}
    written = set(re.findall(r"\b\w+\b", TEXTS[PROJECT / "docs/reference/api.md"]))
    assert shown - written == set()
    assert len(shown) > 40


def test_every_type_of_event_is_in_the_docs() -> None:
    row = next(line for line in (PROJECT / "docs/reference/api.md").read_text().splitlines() if "`late-report`" in line)
    assert re.findall(r"`([a-z-]+)`", row)[1:] == list(RECORD_TYPES)


def test_every_promise_names_a_test_or_a_decision_and_every_named_path_exists() -> None:
    page = (PROJECT / "docs/reference/guarantees.md").read_text()
    named = set(re.findall(r"`((?:tests|bench|scripts|src)/[^`\s]+)`", page))
    assert {path for path in named if not (PROJECT / path).exists()} == set()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    promises = [row for row in rows if row[0] not in ("promise", "---")]
    assert len(promises) > 30
    for promise, proof in promises:
        assert re.search(r"`(tests|bench)/|\(see ADR \d", proof), f"no test of: {promise}"
