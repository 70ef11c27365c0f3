"""Pages of help, and completion: made from the declarations of the commands."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from distributed_grid.cli.command_line import CommandSpec, Group
from distributed_grid.cli.help_pages import completion, help_page, usage_message
from distributed_grid.cli.root_command import GRID
from tests.support.click_commands import click_command


def paths(path: tuple[CommandSpec, ...]) -> Iterator[tuple[CommandSpec, ...]]:
    yield path
    if isinstance(path[-1], Group):
        for name in path[-1].names:
            command = path[-1].find(name)
            assert command is not None
            yield from paths((*path, command))


@pytest.mark.parametrize("path", list(paths((GRID,))), ids=lambda path: " ".join(one.name for one in path))
def test_a_page_of_help_is_the_one_that_click_makes(
    path: tuple[CommandSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    context = None
    for command in path:
        context = click.Context(click_command(command), parent=context, info_name=command.name)
        context.max_content_width, context.help_option_names = 100, ["-h", "--help"]
    assert context is not None
    assert help_page(path) == context.get_help()


def test_a_mistake_is_shown_with_the_usage_of_its_command() -> None:
    jobs = GRID.find("jobs")
    assert jobs is not None
    assert usage_message((GRID, jobs), "Missing command.") == (
        "Usage: grid jobs [OPTIONS] COMMAND [ARGS]...\nTry 'grid jobs --help' for help.\n\nError: Missing command."
    )


@pytest.mark.parametrize(
    ("words", "begun", "fitting"),
    [
        (["grid"], "run-sh", ["run-shared"]),
        (["grid", "jobs"], "", ["cancel", "fetch", "list", "logs", "show", "wait"]),
        (["grid", "jobs", "list"], "--al", ["--all"]),
        (["grid", "--json", "ledger", "--by"], "n", ["node"]),
        (["grid", "status"], "x", []),
    ],
)
def test_a_shell_gets_the_words_that_fit(
    words: list[str], begun: str, fitting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", " ".join([*words, begun]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert completion(GRID, "bash_complete").splitlines() == [f"plain,{word}" for word in fitting]
    assert completion(GRID, "zsh_complete").splitlines()[1::3] == fitting
    monkeypatch.setenv("COMP_CWORD", begun)
    assert [line.partition("\t")[0] for line in completion(GRID, "fish_complete").splitlines()] == [
        f"plain,{word}" for word in fitting
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell: str) -> None:
    assert f"_GRID_COMPLETE={shell}_complete" in completion(GRID, f"{shell}_source")
